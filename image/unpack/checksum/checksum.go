// Package checksum computes a checksum of a layer. The layer is a directory or a packed tree.
//
// # Contract
//
// A layer has the same Sum during creation (AddName, AddFile), as a directory (OfDirectory) and as
// a packed tree (OfTree, OfPacked). Reading a tree changes nothing, not even access times. It takes
// memory for the names of unread directories and for the inode numbers of files with several names.
package checksum

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/cespare/xxhash/v2"
	"golang.org/x/sys/unix"

	"berth/image/tree"
	"berth/internal/safefs"
)

// Sum is a checksum of a tree. It covers all names, and the owner, mode, device number and content
// of all files. It does not cover times and extended attributes. It detects damage by a disk or a
// mistake. An attacker who changes a tree could also change its recorded sum.
//
// Files are created in any order, so a checksum must not depend on the order. Each name and each
// file is hashed, and the hashes are added, in four parts. A file with several names counts once.
type Sum [4]uint64

// IsZero reports whether s is missing, as in records of berth up to 0.2.0.
func (s Sum) IsZero() bool { return s == Sum{} }

// Bytes is the sum's form for the wire.
func (s Sum) Bytes() []byte {
	var b []byte
	for _, part := range s {
		b = binary.BigEndian.AppendUint64(b, part)
	}
	return b
}

// Size is the length of a Sum's Bytes.
const Size = 32

// FromBytes is the sum that has these Bytes.
func FromBytes(b [Size]byte) (s Sum) {
	for i := range s {
		s[i] = binary.BigEndian.Uint64(b[8*i:])
	}
	return s
}

// String is the sum in hexadecimal.
func (s Sum) String() string { return hex.EncodeToString(s.Bytes()) }

// MarshalText implements encoding.TextMarshaler.
func (s Sum) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (s *Sum) UnmarshalText(text []byte) error {
	b, err := hex.DecodeString(string(text))
	if err != nil || len(b) != Size {
		return fmt.Errorf("%.80q is no checksum of a tree", text)
	}
	*s = FromBytes([Size]byte(b))
	return nil
}

// add adds the hash of text.
func (s *Sum) add(text []byte) {
	sum := FromBytes(sha256.Sum256(text))
	for i := range s {
		s[i] += sum[i]
	}
}

// AddName adds a name of a file of the given type (S_IFMT).
func (s *Sum) AddName(path string, mode uint32) {
	text := binary.BigEndian.AppendUint32([]byte("name"), mode&unix.S_IFMT)
	s.add(append(text, path...))
}

// Content is the content of a regular file or a symlink; the zero value for others.
type Content struct {
	Size   int64  // of a regular file
	Hash   uint64 // of that, by xxhash
	Target string // of a symlink
}

// AddFile adds a file, once for all its names. Only the type of a whiteout counts.
func (s *Sum) AddFile(mode, uid, gid uint32, dev uint64, c Content) {
	if isWhiteout(mode, dev) {
		mode, uid, gid = unix.S_IFCHR, 0, 0
	}
	text := binary.BigEndian.AppendUint32([]byte("file"), mode)
	text = binary.BigEndian.AppendUint32(text, uid)
	text = binary.BigEndian.AppendUint32(text, gid)
	text = binary.BigEndian.AppendUint64(text, dev)
	text = binary.BigEndian.AppendUint64(text, uint64(c.Size))
	text = binary.BigEndian.AppendUint64(text, c.Hash)
	s.add(append(text, c.Target...))
}

// AddStatus is AddFile for a file's status.
func (s *Sum) AddStatus(st *unix.Stat_t, c Content) {
	dev := st.Rdev
	if t := st.Mode & unix.S_IFMT; t != unix.S_IFCHR && t != unix.S_IFBLK {
		dev = 0
	}
	s.AddFile(st.Mode, st.Uid, st.Gid, dev, c)
}

// isWhiteout reports whether a file is overlayfs' mark for a hidden name.
func isWhiteout(mode uint32, dev uint64) bool { return mode&unix.S_IFMT == unix.S_IFCHR && dev == 0 }

// Found is the result of reading a tree.
type Found struct {
	Sum       Sum
	Whiteouts int
}

// OfDirectory sums a directory tree that does not change. It calls tick periodically. The number of
// open descriptors does not depend on the depth of the tree.
func OfDirectory(ctx context.Context, root *os.File, tick func()) (Found, error) {
	t := summing{
		ctx:    ctx,
		root:   root,
		tick:   tick,
		linked: map[uint64]bool{},
		dirs:   []string{""},
		buf:    make([]byte, bufferSize),
	}
	for len(t.dirs) > 0 {
		last := len(t.dirs) - 1
		dir := t.dirs[last]
		t.dirs = t.dirs[:last]
		if err := t.directory(dir); err != nil {
			return Found{}, fmt.Errorf("sum directory %.256q: %w", dir, err)
		}
	}
	return t.Found, nil
}

// bufferSize is the number of bytes of one read.
const bufferSize = 128 << 10

type summing struct {
	Found
	ctx    context.Context
	root   *os.File
	tick   func()
	linked map[uint64]bool // inodes with several names that have been added
	dirs   []string        // directories that are still to be read
	buf    []byte
}

func (t *summing) directory(path string) (err error) {
	dir, err := safefs.OpenDir(t.root, path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dir.Close()) }()
	st, err := dir.Stat("")
	if err != nil {
		return err
	}
	t.Sum.AddName(path, st.Mode)
	t.Sum.AddStatus(&st, Content{})
	return dir.EachName(func(name string) error { return t.entry(dir, name) })
}

func (t *summing) entry(dir *safefs.Dir, name string) error {
	t.tick()
	if err := t.ctx.Err(); err != nil {
		return err
	}
	st, err := dir.Stat(name)
	if err != nil {
		return err
	}
	path := safefs.Join(dir.Path(), name)
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		t.dirs = append(t.dirs, path)
		return nil
	}
	t.Sum.AddName(path, st.Mode)
	if isWhiteout(st.Mode, st.Rdev) {
		t.Whiteouts++
	}
	if st.Nlink > 1 {
		if t.linked[st.Ino] {
			return nil
		}
		t.linked[st.Ino] = true
	}
	var c Content
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		c, err = t.regular(path)
	case unix.S_IFLNK:
		c.Target, err = dir.Readlink(name)
	}
	if err != nil {
		return fmt.Errorf("%.256q: %w", name, err)
	}
	t.Sum.AddStatus(&st, c)
	return nil
}

func (t *summing) regular(path string) (Content, error) {
	// O_NOATIME keeps the access times of the layer's tar.
	f, err := safefs.Open(t.root, path, unix.O_RDONLY|unix.O_NOATIME, 0)
	if err != nil {
		return Content{}, err
	}
	defer f.Close() // read only
	h := xxhash.New()
	n, err := io.CopyBuffer(h, &untilDone{t, f}, t.buf)
	return Content{Size: n, Hash: h.Sum64()}, err
}

// untilDone is a reader that fails when the context is done, because a file may be large.
type untilDone struct {
	*summing
	in io.Reader
}

func (r *untilDone) Read(p []byte) (int, error) {
	r.tick()
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.in.Read(p)
}

// OfPacked is OfDirectory for a packed layer. root is its tree, and data is its data file.
func OfPacked(ctx context.Context, root *tree.Node, data *os.File, tick func()) (Found, error) {
	t, buf, h := &summing{ctx: ctx, tick: tick}, make([]byte, bufferSize), xxhash.New()
	return OfTree(root, tick, func(n *tree.Node) (uint64, error) {
		h.Reset()
		content := io.NewSectionReader(data, int64(n.Data.Block)*tree.BlockSize, n.Data.Size)
		_, err := io.CopyBuffer(h, &untilDone{t, content}, buf)
		return h.Sum64(), err
	})
}

// OfTree is OfPacked with a function that returns the xxhash of a regular file's content.
func OfTree(root *tree.Node, tick func(), hash func(n *tree.Node) (uint64, error)) (found Found, err error) {
	known := map[*tree.Node]bool{}
	var walk func(path string, n *tree.Node) error
	walk = func(path string, n *tree.Node) error {
		tick()
		if n.IsLink() {
			return nil // the linked file belongs to a layer below
		}
		found.Sum.AddName(path, n.Mode)
		if known[n] {
			return nil
		}
		dev, c := uint64(0), Content{Target: n.Target}
		switch n.Type() {
		case unix.S_IFREG:
			known[n] = true
			h, err := hash(n)
			if err != nil {
				return fmt.Errorf("%.256q: %w", path, err)
			}
			c.Size, c.Hash = n.Data.Size, h
		case unix.S_IFCHR, unix.S_IFBLK:
			known[n] = true
			dev = unix.Mkdev(n.Major, n.Minor)
			if n.IsWhiteout() {
				found.Whiteouts++
			}
		case unix.S_IFDIR:
			for name, child := range n.Children {
				if err := walk(safefs.Join(path, name), child); err != nil {
					return err
				}
			}
		default:
			known[n] = true
		}
		found.Sum.AddFile(n.Mode, n.UID, n.GID, dev, c)
		return nil
	}
	err = walk("", root)
	return found, err
}
