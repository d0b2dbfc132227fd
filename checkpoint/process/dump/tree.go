package dump

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/errdefs"
	"berth/internal/safefs"
	"berth/internal/userns"
)

// maxLevels limits the depth of a tree. Each level takes a descriptor.
const maxLevels = 256

// Layer writes the content of an overlay's upper directory to a tar. It returns the paths of the
// deleted files, absolute in the container. An opaque directory, which hides the lower layers'
// files, has the extended attribute trusted.overlay.opaque in the tar, and an entry .wh..wh..opq
// among the deleted files. Other programs find no file of the entry's name when they delete the
// files of the list.
func Layer(ctx context.Context, upper *os.File, to io.Writer) (deleted []string, err error) {
	t := newTree(ctx, to)
	t.overlay = true
	if err := t.write(upper); err != nil {
		return nil, fmt.Errorf("copy the writable layer: %w", err)
	}
	return t.deleted, nil
}

// Directory writes the content of a directory to a tar. Other processes may change it meanwhile.
func Directory(ctx context.Context, dir *os.File, to io.Writer) error {
	if err := newTree(ctx, to).write(dir); err != nil {
		return fmt.Errorf("copy %s: %w", dir.Name(), err)
	}
	return nil
}

// Volume writes a directory of an image to a tar, with an entry for the directory itself. If
// mappings are given, the tar has the host IDs of the owners in the user namespace with these
// mappings.
func Volume(ctx context.Context, dir *os.File, mappings *userns.Mappings, to io.Writer) error {
	t := newTree(ctx, to)
	t.mappings, t.withRoot = mappings, true
	if err := t.write(dir); err != nil {
		return fmt.Errorf("copy %s of the image: %w", dir.Name(), err)
	}
	return nil
}

// inode identifies a file with several links.
type inode struct{ dev, ino uint64 }

// tree is a tree that is being copied.
type tree struct {
	ctx     context.Context
	out     io.Writer
	tar     *tar.Writer
	overlay bool
	deleted []string
	links   map[inode]string // the first path of files with several links

	withRoot bool             // the tar has an entry for the root
	mappings *userns.Mappings // of the owners' IDs; nil: unchanged
}

func newTree(ctx context.Context, to io.Writer) *tree {
	return &tree{ctx: ctx, out: to, tar: tar.NewWriter(to), links: map[inode]string{}}
}

func (t *tree) write(root *os.File) error {
	dir, err := safefs.OpenDir(root, "")
	if err != nil {
		return err
	}
	defer dir.Close() // it was only read
	if t.withRoot {
		if err := t.root(dir); err != nil {
			return err
		}
	}
	if err := t.dir(dir, "", 1); err != nil {
		return err
	}
	return t.tar.Close()
}

// root writes the entry of the root.
func (t *tree) root(dir *safefs.Dir) error {
	st, err := dir.Stat("")
	if err != nil {
		return err
	}
	h, err := t.header(dir, "", ".", st)
	if err != nil {
		return err
	}
	return t.tar.WriteHeader(h)
}

// dir writes the content of a directory.
func (t *tree) dir(dir *safefs.Dir, prefix string, level int) error {
	if level > maxLevels {
		return errdefs.FailedPrecondition("directories are nested deeper than %d levels", maxLevels)
	}
	return dir.EachName(func(name string) error {
		if err := context.Cause(t.ctx); err != nil {
			return err
		}
		err := t.entry(dir, name, path.Join(prefix, name), level)
		if errors.Is(err, fs.ErrNotExist) && !t.overlay {
			return nil // another process has removed it
		}
		return err
	})
}

// entry writes a file or a directory with its content.
func (t *tree) entry(dir *safefs.Dir, name, full string, level int) error {
	st, err := dir.Stat(name)
	if err != nil {
		return err
	}
	kind := st.Mode & unix.S_IFMT
	if kind == unix.S_IFCHR && st.Rdev == 0 { // no driver has this device: overlayfs shows none
		t.deleted = append(t.deleted, "/"+full)
		return nil
	}
	if kind == unix.S_IFSOCK {
		return nil
	}
	if strings.HasPrefix(name, whiteout) {
		return errdefs.FailedPrecondition("%s: in a tar of a layer, this name means a deleted file", full)
	}
	if kind != unix.S_IFDIR && st.Nlink > 1 {
		id := inode{st.Dev, st.Ino}
		if first, known := t.links[id]; known {
			return t.tar.WriteHeader(&tar.Header{Typeflag: tar.TypeLink, Name: full, Linkname: first, Format: tar.FormatPAX})
		}
		t.links[id] = full
	}
	h, err := t.header(dir, name, full, st)
	if err != nil {
		return err
	}
	switch kind {
	case unix.S_IFREG:
		return t.file(dir, name, h, st)
	case unix.S_IFDIR:
		if err := t.tar.WriteHeader(h); err != nil {
			return err
		}
		if h.PAXRecords[xattrRecord+opaque] != "" {
			t.deleted = append(t.deleted, "/"+path.Join(full, opaqueMark))
		}
		below, err := dir.Open(name)
		if err != nil {
			return err
		}
		defer below.Close() // it was only read
		return t.dir(below, full, level+1)
	case unix.S_IFLNK:
		if h.Linkname, err = dir.Readlink(name); err != nil {
			return err
		}
	}
	return t.tar.WriteHeader(h)
}

// types are the types of tar entries by the types of files.
var types = map[uint32]byte{
	unix.S_IFREG: tar.TypeReg, unix.S_IFDIR: tar.TypeDir, unix.S_IFLNK: tar.TypeSymlink,
	unix.S_IFCHR: tar.TypeChar, unix.S_IFBLK: tar.TypeBlock, unix.S_IFIFO: tar.TypeFifo,
}

func (t *tree) header(dir *safefs.Dir, name, full string, st unix.Stat_t) (*tar.Header, error) {
	kind, known := types[st.Mode&unix.S_IFMT]
	if !known {
		return nil, fmt.Errorf("%s: unknown file type %#o", full, st.Mode)
	}
	h := &tar.Header{
		Typeflag: kind, Name: full, Mode: int64(st.Mode & 0o7777), Uid: int(st.Uid), Gid: int(st.Gid),
		ModTime: time.Unix(st.Mtim.Unix()), Format: tar.FormatPAX,
	}
	if t.mappings != nil {
		h.Uid, h.Gid = t.mappings.HostUID(st.Uid), t.mappings.HostGID(st.Gid)
	}
	switch kind {
	case tar.TypeDir:
		h.Name += "/"
	case tar.TypeChar, tar.TypeBlock:
		h.Devmajor, h.Devminor = int64(unix.Major(st.Rdev)), int64(unix.Minor(st.Rdev))
	}
	var err error
	h.PAXRecords, err = t.attributes(dir, name, full)
	return h, err
}

const (
	xattrRecord   = "SCHILY.xattr."
	overlayPrefix = "trusted.overlay."
	opaque        = overlayPrefix + "opaque"
)

// whiteout is the prefix of names that have a special meaning in image layers.
const whiteout = ".wh."

// opaqueMark is the name of an entry that marks a directory as opaque in image layers.
const opaqueMark = ".wh..wh..opq"

// kept are the extended attributes that belong to a file's content. A name that ends with a dot or
// an underscore is a prefix.
var kept = []string{"user.", "security.capability", "system.posix_acl_"}

// attributes returns the PAX records of a file's extended attributes.
func (t *tree) attributes(dir *safefs.Dir, name, full string) (map[string]string, error) {
	list, err := dir.Listxattr(name)
	if errors.Is(err, unix.EOPNOTSUPP) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var records map[string]string
	for _, attr := range list {
		if t.overlay && (attr == overlayPrefix+"redirect" || attr == overlayPrefix+"metacopy") {
			return nil, errdefs.FailedPrecondition("%s has the attribute %s; its content is in another layer", full, attr)
		}
		if !isKept(attr) && (attr != opaque || !t.overlay) {
			continue
		}
		value, err := dir.Getxattr(name, attr)
		if err != nil {
			return nil, err
		}
		if t.mappings != nil {
			value = mapAttribute(attr, value, t.mappings)
		}
		if records == nil {
			records = map[string]string{}
		}
		records[xattrRecord+attr] = string(value)
	}
	return records, nil
}

func isKept(attr string) bool {
	for _, k := range kept {
		if attr == k || strings.HasPrefix(attr, k) && strings.ContainsAny(k[len(k)-1:], "._") {
			return true
		}
	}
	return false
}

// file writes a regular file.
func (t *tree) file(dir *safefs.Dir, name string, h *tar.Header, st unix.Stat_t) error {
	f, err := dir.OpenRegular(name, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer f.Close() // it was only read
	h.Size = st.Size
	segments, err := dataSegments(f, st)
	if err != nil {
		return fmt.Errorf("%s: %w", h.Name, err)
	}
	if segments != nil {
		if err := t.tar.Flush(); err != nil {
			return err
		}
		return t.sparse(f, h, segments)
	}
	if err := t.tar.WriteHeader(h); err != nil {
		return err
	}
	return t.copy(t.tar, f, 0, st.Size)
}

// chunk is the size of one copy, in bytes. The context is checked between two copies.
const chunk = 8 << 20

// copy copies a part of a file. A file that has become shorter is filled with zeros.
func (t *tree) copy(to io.Writer, f *os.File, offset, length int64) error {
	if _, err := f.Seek(offset, io.SeekStart); err != nil {
		return err
	}
	for length > 0 {
		if err := context.Cause(t.ctx); err != nil {
			return err
		}
		n, err := io.CopyN(to, f, min(length, chunk))
		length -= n
		if errors.Is(err, io.EOF) {
			return zeros(to, length)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func zeros(to io.Writer, n int64) error {
	_, err := io.CopyN(to, zeroReader{}, n)
	return err
}

// zeroReader reads zeros without end.
type zeroReader struct{}

func (zeroReader) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// blocked pads text to whole blocks of a tar.
func blocked(text []byte) []byte {
	const size = 512
	return append(text, bytes.Repeat([]byte{0}, (size-len(text)%size)%size)...)
}
