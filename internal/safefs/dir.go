package safefs

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// maxSymlinks is the kernel's limit of symlinks in one resolution (MAXSYMLINKS).
const maxSymlinks = 40

// Dir is an open directory inside a root, from [OpenDir] or [Maker.MkdirAll]. Its methods take
// names of single path components and refuse other names with EINVAL. A Dir has no finalizer: the
// owner must close it.
type Dir struct {
	fd   int
	path string
}

// OpenDir opens the directory at path inside root without following any symlink. It returns ELOOP
// if path contains a symlink.
func OpenDir(root *os.File, path string) (*Dir, error) {
	clean := Clean(path)
	fd, err := openBeneath(root, clean)
	if err != nil {
		return nil, &fs.PathError{Op: "open directory", Path: clean, Err: err}
	}
	return &Dir{fd, clean}, nil
}

// Maker has options for [Maker.MkdirAll], [Maker.ResolveDir] and [Maker.Resolve].
type Maker struct {
	// Perm is the mode of new directories.
	Perm uint32
	// Made, if set, is called for each new directory.
	Made func(*Dir) error
	// Blocked, if set, is called if name in dir is neither a directory nor a symlink. It may remove
	// the entry or replace it with a directory. Then it returns nil, and the walk continues. An
	// error ends the walk.
	Blocked func(dir *Dir, name string, st *unix.Stat_t) error
	// Step, if set, is called for each step of a walk with its cost. A lookup of a name costs 1.
	// Even a short path can take tens of thousands of steps through forty symlinks. An error ends
	// the walk.
	Step func(cost int) error
}

// MkdirAll opens the directory at path inside root. It follows symlinks inside root. It creates
// missing directories, including the target of a dangling symlink. The result's Path is free of
// symlinks.
func (m Maker) MkdirAll(root *os.File, path string) (*Dir, error) {
	w := walk{Maker: m, root: root, rest: split(path)}
	dir, err := w.run()
	if err != nil {
		return nil, &fs.PathError{Op: "make directory", Path: path, Err: err}
	}
	return dir, nil
}

// ResolveDir opens the directory at path inside root. It follows symlinks inside root. The result's
// Path is free of symlinks.
func (m Maker) ResolveDir(root *os.File, path string) (*Dir, error) {
	w := walk{Maker: m, root: root, rest: split(path), existing: true}
	dir, err := w.run()
	if err != nil {
		return nil, &fs.PathError{Op: "open directory", Path: path, Err: err}
	}
	return dir, nil
}

// Resolve returns the path to which path leads inside root, without symlinks. It keeps the missing
// names at the end. The error is ENOTDIR if the path leads to or through a file, and ENOENT for
// ".." below a missing name.
func (m Maker) Resolve(root *os.File, path string) (string, error) {
	w := walk{Maker: m, root: root, rest: split(path), existing: true}
	dir, err := w.run()
	if err == nil {
		return dir.Path(), dir.Close()
	}
	if errors.Is(err, unix.ENOENT) && w.missing != "" && !slices.Contains(w.rest, "..") {
		return Clean(Join(w.missing, strings.Join(w.rest, "/"))), nil
	}
	return "", &fs.PathError{Op: "resolve", Path: path, Err: err}
}

// Clean returns a clean path relative to the root, without a leading slash. ".." never leads above
// the root. "" is the root.
func Clean(p string) string { return path.Clean("/" + p)[1:] }

// Split returns the directory of a clean path and its last component.
func Split(clean string) (dir, base string) {
	i := strings.LastIndexByte(clean, '/')
	return clean[:max(i, 0)], clean[i+1:]
}

// Join returns the clean path of a name in a directory; "" is the root.
func Join(dir, name string) string {
	if dir == "" {
		return name
	}
	return dir + "/" + name
}

func split(p string) []string {
	return strings.FieldsFunc(p, func(r rune) bool { return r == '/' })
}

func openBeneath(root *os.File, clean string) (int, error) {
	if clean == "" {
		clean = "."
	}
	conn, err := root.SyscallConn()
	if err != nil {
		return -1, err
	}
	fd, openErr := -1, error(nil)
	err = conn.Control(func(dir uintptr) {
		fd, openErr = openat2(int(dir), clean, unix.O_PATH|unix.O_DIRECTORY, 0, resolveInRoot|unix.RESOLVE_NO_SYMLINKS)
	})
	if err != nil {
		return -1, err
	}
	return fd, openErr
}

// walk resolves a path component by component. It opens each component relative to the previous
// directory, and follows no symlink by itself. This is the only way to find the path without
// symlinks, and to continue through a symlink with a missing target.
type walk struct {
	Maker
	root     *os.File
	existing bool     // create no directory
	missing  string   // the name that does not exist, if existing is set
	rest     []string // components that are not resolved yet
	links    int
}

func (w *walk) run() (*Dir, error) {
	cur, err := w.reopen("")
	for err == nil && len(w.rest) > 0 {
		var next *Dir
		next, err = w.step(cur)
		if next != cur {
			cur.Close()
			cur = next
		}
	}
	if err != nil && cur != nil {
		cur.Close()
		return nil, err
	}
	return cur, err
}

func (w *walk) reopen(clean string) (*Dir, error) {
	fd, err := openBeneath(w.root, clean)
	if err != nil {
		return nil, err
	}
	return &Dir{fd, clean}, nil
}

// charge reports the cost of the next step, which resolves name, to Step.
func (w *walk) charge(cur *Dir, name string) error {
	if w.Step == nil {
		return nil
	}
	cost := 1
	if name == ".." { // ".." is resolved again from the root
		const quick = 32 // number of names that the kernel resolves in the time of one step of this walk
		cost += strings.Count(cur.path, "/") / quick
	}
	return w.Step(cost)
}

// step resolves the next component of the path and returns its directory.
func (w *walk) step(cur *Dir) (*Dir, error) {
	name := w.rest[0]
	w.rest = w.rest[1:]
	if err := w.charge(cur, name); err != nil {
		return cur, err
	}
	switch name {
	case ".":
		return cur, nil
	case "..":
		return w.reopen(Clean(path.Dir(cur.path)))
	}
	fd, err := openat2(cur.fd, name, unix.O_PATH|unix.O_NOFOLLOW, 0, 0)
	if errors.Is(err, unix.ENOENT) && !w.existing {
		return w.mkdir(cur, name)
	}
	if errors.Is(err, unix.ENOENT) {
		w.missing = Join(cur.path, name)
	}
	if err != nil {
		return cur, err
	}
	return w.enter(cur, name, fd)
}

// enter continues with an existing entry: it enters a directory or follows a symlink. It closes fd
// or returns it as a Dir.
func (w *walk) enter(cur *Dir, name string, fd int) (*Dir, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		unix.Close(fd)
		return cur, err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return &Dir{fd, path.Join(cur.path, name)}, nil
	}
	defer unix.Close(fd)
	if st.Mode&unix.S_IFMT == unix.S_IFLNK {
		return w.follow(cur, fd)
	}
	if w.Blocked == nil {
		return cur, unix.ENOTDIR
	}
	if err := w.Blocked(cur, name, &st); err != nil {
		return cur, err
	}
	return w.mkdir(cur, name)
}

func (w *walk) follow(cur *Dir, link int) (*Dir, error) {
	if w.links++; w.links > maxSymlinks {
		return cur, unix.ELOOP
	}
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(link, "", buf)
	if err != nil {
		return cur, err
	}
	target := string(buf[:n])
	w.rest = append(split(target), w.rest...)
	if strings.HasPrefix(target, "/") {
		return w.reopen("")
	}
	return cur, nil
}

func (w *walk) mkdir(cur *Dir, name string) (*Dir, error) {
	err := unix.Mkdirat(cur.fd, name, w.Perm)
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return cur, err
	}
	existed := errors.Is(err, unix.EEXIST)
	fd, err := openat2(cur.fd, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_DIRECTORY, 0, 0)
	if err != nil {
		return cur, err
	}
	next := &Dir{fd, path.Join(cur.path, name)}
	if existed {
		return next, nil
	}
	if err := w.finish(next); err != nil {
		next.Close()
		return cur, err
	}
	return next, nil
}

func (w *walk) finish(made *Dir) error {
	if err := made.Chmod(w.Perm); err != nil { // mkdirat applied the process's umask
		return err
	}
	if w.Made == nil {
		return nil
	}
	return w.Made(made)
}

// Path returns the directory's path relative to the root when it was opened; "" is the root.
func (d *Dir) Path() string { return d.path }

// Close closes the directory.
func (d *Dir) Close() error {
	if err := unix.Close(d.fd); err != nil {
		return &fs.PathError{Op: "close directory", Path: d.path, Err: err}
	}
	return nil
}

// Create creates the regular file name, which must not exist, for writing. Its mode is perm less
// the umask.
func (d *Dir) Create(name string, perm uint32) (*os.File, error) {
	if err := d.check("create", name); err != nil {
		return nil, err
	}
	fd, err := openat2(d.fd, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW, perm, 0)
	if err != nil {
		return nil, d.err("create", name, err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// OpenRegular opens the regular file name with O_RDONLY or O_WRONLY. It returns
// [ErrNotRegular] for other types, and for a symlink. Like the function [OpenRegular] it never
// opens a device or a FIFO.
func (d *Dir) OpenRegular(name string, flags int) (*os.File, error) {
	if err := d.check("open", name); err != nil {
		return nil, err
	}
	fd, err := openat2(d.fd, name, unix.O_PATH|unix.O_NOFOLLOW, 0, 0)
	if err != nil {
		return nil, d.err("open", name, err)
	}
	f, err := reopenRegular(fd, name, flags)
	if err != nil {
		return nil, d.err("open", name, err)
	}
	return f, nil
}

// Open opens the directory name.
func (d *Dir) Open(name string) (*Dir, error) {
	if err := d.check("open directory", name); err != nil {
		return nil, err
	}
	fd, err := openat2(d.fd, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0, 0)
	if err != nil {
		return nil, d.err("open directory", name, err)
	}
	return &Dir{fd, path.Join(d.path, name)}, nil
}

// Names returns the names in the directory, unordered.
func (d *Dir) Names() ([]string, error) {
	fd, err := openat2(d.fd, ".", unix.O_RDONLY|unix.O_DIRECTORY, 0, 0)
	if err != nil {
		return nil, d.err("open directory", "", err)
	}
	f := os.NewFile(uintptr(fd), d.path)
	defer f.Close()
	names, err := f.Readdirnames(-1)
	if err != nil {
		return nil, d.err("read directory", "", err)
	}
	return names, nil
}

// EachName calls do with each name in the directory, unordered, until do fails. It keeps only a few
// names in memory, even for a large directory.
func (d *Dir) EachName(do func(name string) error) error {
	fd, err := openat2(d.fd, ".", unix.O_RDONLY|unix.O_DIRECTORY, 0, 0)
	if err != nil {
		return d.err("open directory", "", err)
	}
	f := os.NewFile(uintptr(fd), d.path)
	defer f.Close()
	for {
		names, err := f.Readdirnames(256)
		for _, name := range names {
			if err := do(name); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return d.err("read directory", "", err)
		}
	}
}

// Mkdir creates the directory name with mode perm less the umask.
func (d *Dir) Mkdir(name string, perm uint32) error {
	return d.at("make directory", name, func() error { return unix.Mkdirat(d.fd, name, perm) })
}

// Mknod creates the node name. mode holds the type (S_IFCHR …) and permissions less the umask.
func (d *Dir) Mknod(name string, mode uint32, dev uint64) error {
	return d.at("make node", name, func() error { return unix.Mknodat(d.fd, name, mode, int(dev)) })
}

// Symlink creates the symlink name and stores target unchanged.
func (d *Dir) Symlink(target, name string) error {
	return d.at("make symlink", name, func() error { return unix.Symlinkat(target, d.fd, name) })
}

// Link adds name as another name of oldName in the directory old.
func (d *Dir) Link(old *Dir, oldName, name string) error {
	if err := old.check("link", oldName); err != nil {
		return err
	}
	return d.at("link", name, func() error { return unix.Linkat(old.fd, oldName, d.fd, name, 0) })
}

// Stat returns the status of name without following a symlink. An empty name means the directory.
func (d *Dir) Stat(name string) (unix.Stat_t, error) {
	var st unix.Stat_t
	if name == "" {
		if err := unix.Fstat(d.fd, &st); err != nil {
			return st, d.err("stat", name, err)
		}
		return st, nil
	}
	err := d.at("stat", name, func() error { return unix.Fstatat(d.fd, name, &st, unix.AT_SYMLINK_NOFOLLOW) })
	return st, err
}

// Readlink returns the target of the symlink name.
func (d *Dir) Readlink(name string) (string, error) {
	buf := make([]byte, unix.PathMax)
	n := 0
	err := d.at("read link", name, func() (err error) { n, err = unix.Readlinkat(d.fd, name, buf); return err })
	if err != nil { // n is -1
		return "", err
	}
	return string(buf[:n]), nil
}

// Unlink removes name, which is not a directory.
func (d *Dir) Unlink(name string) error {
	return d.at("remove", name, func() error { return unix.Unlinkat(d.fd, name, 0) })
}

// RemoveAll removes name and, if it is a directory, its content. It returns nil if name does not
// exist.
func (d *Dir) RemoveAll(name string) error {
	return d.RemoveAllUntil(context.Background(), name)
}

// RemoveAllUntil is [Dir.RemoveAll], but returns ctx's error when ctx ends.
func (d *Dir) RemoveAllUntil(ctx context.Context, name string) error {
	return d.at("remove", name, func() error { return removeAll(ctx, d.fd, name) })
}

// Chown sets the owner of name without following a symlink. An empty name means the directory. uid
// and gid are 0 to 2^32-2. It rejects 2^32-1, which means "unchanged" for the kernel.
func (d *Dir) Chown(name string, uid, gid uint32) error {
	if uid == ^uint32(0) || gid == ^uint32(0) {
		return d.err("chown", name, unix.EINVAL)
	}
	if name == "" {
		if err := unix.Fchownat(d.fd, "", int(uid), int(gid), unix.AT_EMPTY_PATH); err != nil {
			return d.err("chown", "", err)
		}
		return nil
	}
	return d.at("chown", name, func() error {
		return unix.Fchownat(d.fd, name, int(uid), int(gid), unix.AT_SYMLINK_NOFOLLOW)
	})
}

// Chmod sets the permission bits of the directory, including setuid, setgid and sticky.
func (d *Dir) Chmod(mode uint32) error {
	// fchmod refuses O_PATH, so use the magic link of this process's descriptor.
	if err := unix.Fchmodat(unix.AT_FDCWD, d.proc(), mode, 0); err != nil {
		return d.err("chmod", "", err)
	}
	return nil
}

// ChmodNode sets the permission bits of name, which should not be a symlink. If a symlink has
// replaced it, ChmodNode does not follow it and returns EOPNOTSUPP.
func (d *Dir) ChmodNode(name string, mode uint32) error {
	return d.at("chmod", name, func() error {
		fd, err := openat2(d.fd, name, unix.O_PATH|unix.O_NOFOLLOW, 0, unix.RESOLVE_NO_SYMLINKS)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Fchmodat(unix.AT_FDCWD, procFD(fd), mode, 0)
	})
}

// Utimes sets the times of name without following a symlink. An empty name means the directory.
func (d *Dir) Utimes(name string, atime, mtime unix.Timespec) error {
	ts := []unix.Timespec{atime, mtime}
	if name == "" {
		// utimensat accepts an empty path since Linux 5.8. The magic link works on all kernels.
		if err := unix.UtimesNanoAt(unix.AT_FDCWD, d.proc(), ts, 0); err != nil {
			return d.err("set times", "", err)
		}
		return nil
	}
	return d.at("set times", name, func() error { return unix.UtimesNanoAt(d.fd, name, ts, unix.AT_SYMLINK_NOFOLLOW) })
}

// Setxattr sets an extended attribute of name without following a symlink. An empty name means the
// directory.
func (d *Dir) Setxattr(name, attr string, value []byte) error {
	if name == "" {
		if err := unix.Setxattr(d.proc(), attr, value, 0); err != nil {
			return d.err("set "+attr, "", err)
		}
		return nil
	}
	return d.at("set "+attr, name, func() error { return unix.Lsetxattr(d.proc()+"/"+name, attr, value, 0) })
}

// Getxattr returns an extended attribute of name without following a symlink. An empty name means
// the directory. It returns ENODATA if the attribute does not exist.
func (d *Dir) Getxattr(name, attr string) ([]byte, error) {
	var value []byte
	get := func() (err error) { value, err = getxattr(d.xattrPath(name), attr); return err }
	if name == "" {
		if err := get(); err != nil {
			return nil, d.err("get "+attr, "", err)
		}
		return value, nil
	}
	err := d.at("get "+attr, name, get)
	return value, err
}

// Listxattr returns the names of the extended attributes of name without following a symlink. An
// empty name means the directory.
func (d *Dir) Listxattr(name string) ([]string, error) {
	var names []string
	list := func() (err error) { names, err = listxattr(d.xattrPath(name)); return err }
	if name == "" {
		if err := list(); err != nil {
			return nil, d.err("list attributes", "", err)
		}
		return names, nil
	}
	err := d.at("list attributes", name, list)
	return names, err
}

// xattrPath names an entry for the l*xattr calls, which take no dirfd before Linux 6.13. "/." makes
// the system calls follow the magic link to the directory.
func (d *Dir) xattrPath(name string) string {
	if name == "" {
		name = "."
	}
	return d.proc() + "/" + name
}

func getxattr(path, attr string) ([]byte, error) {
	const maxValue = 64 << 10 // XATTR_SIZE_MAX
	buf := make([]byte, 256)
	for {
		n, err := unix.Lgetxattr(path, attr, buf)
		if err == nil {
			return buf[:n], nil
		}
		if err != unix.ERANGE || len(buf) == maxValue {
			return nil, err
		}
		buf = make([]byte, maxValue)
	}
}

func listxattr(path string) ([]string, error) {
	const maxList = 64 << 10 // XATTR_LIST_MAX
	buf := make([]byte, 1024)
	n, err := unix.Llistxattr(path, buf)
	if err == unix.ERANGE {
		buf = make([]byte, maxList)
		n, err = unix.Llistxattr(path, buf)
	}
	if err != nil {
		return nil, err
	}
	return strings.FieldsFunc(string(buf[:n]), func(r rune) bool { return r == 0 }), nil
}

func (d *Dir) proc() string { return procFD(d.fd) }

// descriptors is the directory of the process's open files by number.
var descriptors = "/proc/self/fd/"

// DescriptorsIn sets the path of /proc/self/fd for a process without /proc. The path ends with a
// slash; "" means the working directory. It must be called before other functions of this package.
func DescriptorsIn(dir string) { descriptors = dir }

func procFD(fd int) string { return descriptors + strconv.Itoa(fd) }

// at runs call if name is valid, and wraps its error.
func (d *Dir) at(op, name string, call func() error) error {
	if err := d.check(op, name); err != nil {
		return err
	}
	for {
		err := call()
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return d.err(op, name, err)
		}
		return nil
	}
}

func (d *Dir) check(op, name string) error {
	if name == "" || name == "." || name == ".." || strings.ContainsAny(name, "/\x00") {
		return d.err(op, name, syscall.EINVAL)
	}
	return nil
}

func (d *Dir) err(op, name string, err error) error {
	return &fs.PathError{Op: op, Path: path.Join("/", d.path, name), Err: err}
}
