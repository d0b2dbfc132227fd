// Package copytree copies files between two directory trees. At least one of them is a container's,
// whose processes may change it during the copy.
//
// # Contract
//
// Copy never reads or writes outside the two roots, even if processes change the trees meanwhile
// (CVE-2018-15664, CVE-2019-14271). It resolves both paths inside their roots. Below these paths it
// works on open directories and follows no symlink. It runs no program of either tree. Symlinks are
// copied unchanged. Devices, FIFOs and sockets are skipped and reported, because a device node on
// the host would give access to the device.
//
// Both trees may show the same files, because a volume of the host is mounted in a container. A
// file is not copied onto itself, nor a directory into itself. Only the inode identifies them,
// because their paths differ.
package copytree

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"berth/internal/safefs"
)

// Place is a path inside a root.
type Place struct {
	Root *os.File // opened by safefs.OpenRoot
	Path string
}

// Options control a copy. Owner and Warn are required.
type Options struct {
	Follow bool // copy the target of a symlink at the source's path, not the symlink
	SetID  bool // keep the setuid and setgid bits
	// Owner returns the owner of the copy of a file.
	Owner func(uid, gid uint32) (newUID, newGID uint32)
	Warn  func(format string, args ...any) // reports a file that is skipped
}

// maxDepth bounds the depth of a tree, because each level needs two descriptors.
const maxDepth = 256

// maxLinks is the kernel's limit of symlinks in one resolution.
const maxLinks = 40

// Copy copies the file or directory at from. An existing directory at to gets the copy under the
// source's name. If the source's path ends in "/.", that directory gets the source's content.
// Otherwise to is the path of the copy, and its directory must exist. Files are overwritten, and
// directories are merged.
func Copy(ctx context.Context, from, to Place, o Options) error {
	c := copier{ctx, o}
	dir, name, err := c.source(from)
	if err != nil {
		return err
	}
	defer dir.Close()
	isDir := name == "" // the root
	if !isDir {
		st, err := dir.Stat(name)
		if err != nil {
			return err
		}
		isDir = st.Mode&unix.S_IFMT == unix.S_IFDIR
	}
	keepName := path.Base(path.Clean(from.Path))
	if path.Base(from.Path) == "." || name == "" {
		keepName = "" // only the content
	}
	target, newName, err := destination(to, keepName, isDir)
	if err != nil {
		return err
	}
	defer target.Close()
	if name == "" {
		return c.content(dir, target, nil)
	}
	if newName != "" {
		id, err := identify(target)
		if err != nil {
			return err
		}
		return c.entry(dir, name, target, newName, []inode{id})
	}
	content, err := dir.Open(name)
	if err != nil {
		return err
	}
	defer content.Close()
	return c.content(content, target, nil)
}

// source resolves the source's path. An empty name means the root.
func (c copier) source(from Place) (*safefs.Dir, string, error) {
	clean := safefs.Clean(from.Path)
	// A trailing slash, or ".", follows a symlink to a directory, as in the shell.
	follow := c.Follow || strings.HasSuffix(from.Path, "/") || path.Base(from.Path) == "."
	for range maxLinks {
		parent, name := safefs.Split(clean)
		dir, err := safefs.Maker{}.ResolveDir(from.Root, parent)
		if err != nil || name == "" {
			return dir, name, err
		}
		st, err := dir.Stat(name)
		if err == nil && (st.Mode&unix.S_IFMT != unix.S_IFLNK || !follow) {
			return dir, name, nil
		}
		var link string
		if err == nil {
			link, err = dir.Readlink(name)
		}
		if !path.IsAbs(link) {
			link = safefs.Join(dir.Path(), link)
		}
		clean = safefs.Clean(link)
		if err := errors.Join(err, dir.Close()); err != nil {
			return nil, "", err
		}
	}
	return nil, "", &fs.PathError{Op: "open", Path: from.Path, Err: unix.ELOOP}
}

// destination resolves the destination's path. The result is an open directory and the name of the
// copy in it. An empty name means that the directory gets the content of the source.
func destination(to Place, keepName string, isDir bool) (*safefs.Dir, string, error) {
	dir, err := safefs.Maker{}.ResolveDir(to.Root, to.Path)
	if err == nil {
		return dir, keepName, nil
	}
	if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTDIR) {
		return nil, "", err
	}
	if strings.HasSuffix(to.Path, "/") && !isDir {
		return nil, "", err
	}
	parent, name := safefs.Split(safefs.Clean(to.Path))
	if dir, err = (safefs.Maker{}).ResolveDir(to.Root, parent); err != nil {
		return nil, "", err
	}
	return dir, name, nil
}

// copier copies entries of directories.
type copier struct {
	ctx context.Context
	Options
}

// inode identifies a file on any path.
type inode struct{ dev, ino uint64 }

func inodeOf(st *unix.Stat_t) inode { return inode{st.Dev, st.Ino} }

func identify(d *safefs.Dir) (inode, error) {
	st, err := d.Stat("")
	return inodeOf(&st), err
}

// entry copies one entry of a directory. The last element of into is to, the others are the
// directories above it, down from the destination.
func (c copier) entry(from *safefs.Dir, name string, to *safefs.Dir, newName string, into []inode) error {
	if err := c.ctx.Err(); err != nil {
		return context.Cause(c.ctx)
	}
	st, err := from.Stat(name)
	if err != nil {
		return err
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return c.directory(from, name, to, newName, into)
	case unix.S_IFREG:
		return c.file(from, name, to, newName)
	case unix.S_IFLNK:
		return c.symlink(from, name, to, newName, &st)
	}
	c.Warn("skipping /%s: it is a device, a FIFO or a socket", safefs.Join(from.Path(), name))
	return nil
}

func (c copier) directory(from *safefs.Dir, name string, to *safefs.Dir, newName string, into []inode) error {
	if len(into) > maxDepth {
		return fmt.Errorf("copy /%s: the tree has more than %d levels", safefs.Join(from.Path(), name), maxDepth)
	}
	src, err := from.Open(name)
	if err != nil {
		return err
	}
	defer src.Close()
	if err := outside(src, into); err != nil {
		return err
	}
	const private = 0o700 // until the owner is set
	made := to.Mkdir(newName, private)
	if made != nil && !errors.Is(made, fs.ErrExist) {
		return made
	}
	dst, err := to.Open(newName)
	if err != nil {
		return err
	}
	defer dst.Close()
	if err := c.content(src, dst, into); err != nil || made != nil {
		return err // an existing directory keeps its owner and mode
	}
	st, err := src.Stat("")
	if err != nil {
		return err
	}
	uid, gid := c.Owner(st.Uid, st.Gid)
	return errors.Join(dst.Chown("", uid, gid), dst.Chmod(c.mode(&st)), dst.Utimes("", st.Atim, st.Mtim))
}

// outside returns an error if the copy of a directory would be inside of it.
func outside(from *safefs.Dir, into []inode) error {
	id, err := identify(from)
	if err == nil && slices.Contains(into, id) {
		err = fmt.Errorf("copy /%s: cannot copy a directory into itself", from.Path())
	}
	return err
}

// content copies all entries of a directory. into are the directories above to.
func (c copier) content(from, to *safefs.Dir, into []inode) error {
	id, err := identify(to)
	if err != nil {
		return err
	}
	into = append(slices.Clip(into), id)
	if err := outside(from, into); err != nil {
		return err
	}
	return from.EachName(func(name string) error {
		err := c.entry(from, name, to, name, into)
		if errors.Is(err, fs.ErrNotExist) && gone(from, name) { // deleted meanwhile
			return nil
		}
		return err
	})
}

func gone(dir *safefs.Dir, name string) bool {
	_, err := dir.Stat(name)
	return errors.Is(err, fs.ErrNotExist)
}

// mode returns the permissions of a copy.
func (c copier) mode(st *unix.Stat_t) uint32 {
	mode := st.Mode & 0o7777
	if !c.SetID {
		mode &^= unix.S_ISUID | unix.S_ISGID
	}
	return mode
}

func (c copier) file(from *safefs.Dir, name string, to *safefs.Dir, newName string) (err error) {
	src, err := from.OpenRegular(name, unix.O_RDONLY)
	if err != nil {
		return err
	}
	defer src.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(src.Fd()), &st); err != nil {
		return fmt.Errorf("stat /%s: %w", safefs.Join(from.Path(), name), err)
	}
	dst, err := create(to, newName, inodeOf(&st))
	if err != nil {
		return fmt.Errorf("copy /%s: %w", safefs.Join(from.Path(), name), err)
	}
	defer func() { err = errors.Join(err, dst.Close()) }()
	if _, err := io.Copy(dst, contextReader{c.ctx, src}); err != nil {
		return fmt.Errorf("copy /%s: %w", safefs.Join(from.Path(), name), err)
	}
	uid, gid := c.Owner(st.Uid, st.Gid)
	fd := int(dst.Fd())
	if err := errors.Join(unix.Fchown(fd, int(uid), int(gid)), unix.Fchmod(fd, c.mode(&st))); err != nil { // chown clears setuid
		return fmt.Errorf("set the owner of /%s: %w", safefs.Join(to.Path(), newName), err)
	}
	return to.Utimes(newName, st.Atim, st.Mtim)
}

// create opens a file for writing. It truncates an existing file, which may be a mount such as
// /etc/hosts, and replaces a symlink or a running program. The source itself stays as it is.
func create(dir *safefs.Dir, name string, source inode) (*os.File, error) {
	const private = 0o600 // until the owner is set
	f, err := dir.Create(name, private)
	if !errors.Is(err, fs.ErrExist) {
		return f, err
	}
	if f, err := dir.OpenRegular(name, unix.O_WRONLY); err == nil {
		var st unix.Stat_t
		err := unix.Fstat(int(f.Fd()), &st)
		if err == nil && inodeOf(&st) == source {
			err = sameFile(dir, name)
		}
		if err == nil {
			err = f.Truncate(0)
		}
		if err != nil {
			return nil, errors.Join(err, f.Close())
		}
		return f, nil
	}
	if st, err := dir.Stat(name); err == nil && inodeOf(&st) == source {
		return nil, sameFile(dir, name)
	}
	if err := dir.Unlink(name); err != nil {
		return nil, err
	}
	return dir.Create(name, private)
}

func sameFile(dir *safefs.Dir, name string) error {
	return fmt.Errorf("it and /%s are the same file", safefs.Join(dir.Path(), name))
}

func (c copier) symlink(from *safefs.Dir, name string, to *safefs.Dir, newName string, st *unix.Stat_t) error {
	target, err := from.Readlink(name)
	if err != nil {
		return err
	}
	err = to.Symlink(target, newName)
	if errors.Is(err, fs.ErrExist) {
		if err = to.Unlink(newName); err == nil {
			err = to.Symlink(target, newName)
		}
	}
	if err != nil {
		return err
	}
	uid, gid := c.Owner(st.Uid, st.Gid)
	return to.Chown(newName, uid, gid)
}

// contextReader fails when the context has ended.
type contextReader struct {
	ctx context.Context
	io.Reader
}

// Read implements io.Reader.
func (r contextReader) Read(b []byte) (int, error) {
	if r.ctx.Err() != nil {
		return 0, context.Cause(r.ctx)
	}
	return r.Reader.Read(b)
}
