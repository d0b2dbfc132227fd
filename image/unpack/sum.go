package unpack

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

// Sum is a checksum of a tree: of all names with what they name, and of the owner, mode, device
// number and content of everything that has a name. Times and extended attributes are left out. It finds what a
// disk or a mistake has changed; who changes a tree on purpose can change the sum beside it too.
//
// It is made while the tree is, in whatever order, so it is a sum indeed: each name and each file is hashed, and the hashes
// are added, in four parts. A file counts once, however many names it has.
type Sum [4]uint64

// IsZero reports whether s was never made: up to 0.2.0 there were none.
func (s Sum) IsZero() bool { return s == Sum{} }

// Bytes is the sum's form for the wire.
func (s Sum) Bytes() []byte {
	var b []byte
	for _, part := range s {
		b = binary.BigEndian.AppendUint64(b, part)
	}
	return b
}

// SumSize is the length of Bytes.
const SumSize = 32

// SumOf is the sum that has these Bytes.
func SumOf(b [SumSize]byte) (s Sum) {
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
	if err != nil || len(b) != SumSize {
		return fmt.Errorf("%.80q is no checksum of a tree", text)
	}
	*s = SumOf([SumSize]byte(b))
	return nil
}

// add adds what is hashed as text.
func (s *Sum) add(text []byte) {
	sum := SumOf(sha256.Sum256(text))
	for i := range s {
		s[i] += sum[i]
	}
}

// name adds a name of something of a type (S_IFMT).
func (s *Sum) name(path string, mode uint32) {
	text := binary.BigEndian.AppendUint32([]byte("name"), mode&unix.S_IFMT)
	s.add(append(text, path...))
}

// content is what is in a regular file or a symlink; of others the zero value.
type content struct {
	size   int64  // of a regular file
	hash   uint64 // of that
	target string // of a symlink
}

// file adds something that has names. Of a whiteout nothing counts but that it is one.
func (s *Sum) file(mode, uid, gid uint32, dev uint64, c content) {
	if mode&unix.S_IFMT == unix.S_IFCHR && dev == whiteoutDev {
		mode, uid, gid = unix.S_IFCHR, 0, 0
	}
	text := binary.BigEndian.AppendUint32([]byte("file"), mode)
	text = binary.BigEndian.AppendUint32(text, uid)
	text = binary.BigEndian.AppendUint32(text, gid)
	text = binary.BigEndian.AppendUint64(text, dev)
	text = binary.BigEndian.AppendUint64(text, uint64(c.size))
	text = binary.BigEndian.AppendUint64(text, c.hash)
	s.add(append(text, c.target...))
}

// status adds something that has names by its status.
func (s *Sum) status(st *unix.Stat_t, c content) {
	dev := st.Rdev
	if t := st.Mode & unix.S_IFMT; t != unix.S_IFCHR && t != unix.S_IFBLK {
		dev = 0
	}
	s.file(st.Mode, st.Uid, st.Gid, dev, c)
}

// SumTree reads a tree that nobody changes and returns its sum, which is that of the layer if it is as it was
// unpacked. It needs no more descriptors for a deep tree than for a flat one.
func SumTree(ctx context.Context, root *os.File) (Sum, error) {
	_, sum, err := sumTree(ctx, root, func() {})
	return sum, err
}

// sumTree is SumTree, counts whiteouts, and calls tick again and again.
func sumTree(ctx context.Context, root *os.File, tick func()) (whiteouts int, _ Sum, err error) {
	t := summing{ctx: ctx, root: root, tick: tick, linked: map[uint64]bool{}, dirs: []string{""}, buf: copyPool.Get().(*[copySize]byte)}
	defer copyPool.Put(t.buf)
	for len(t.dirs) > 0 {
		last := len(t.dirs) - 1
		dir := t.dirs[last]
		t.dirs = t.dirs[:last]
		if err := t.directory(dir); err != nil {
			return 0, Sum{}, fmt.Errorf("sum directory %s: %w", quoted(dir), err)
		}
	}
	return t.whiteouts, t.sum, nil
}

type summing struct {
	ctx       context.Context
	root      *os.File
	tick      func()
	sum       Sum
	whiteouts int
	linked    map[uint64]bool // inodes with several names that have been added
	dirs      []string        // directories that are still to be read
	buf       *[copySize]byte
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
	t.sum.name(path, st.Mode)
	t.sum.status(&st, content{})
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
	t.sum.name(path, st.Mode)
	if IsWhiteout(&st) {
		t.whiteouts++
	}
	if st.Nlink > 1 {
		if t.linked[st.Ino] {
			return nil
		}
		t.linked[st.Ino] = true
	}
	var c content
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		c, err = t.regular(path)
	case unix.S_IFLNK:
		c.target, err = dir.Readlink(name)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", quoted(name), err)
	}
	t.sum.status(&st, c)
	return nil
}

func (t *summing) regular(path string) (content, error) {
	// Reading is to leave no trace: a layer has the access times that its tar says.
	f, err := safefs.Open(t.root, path, unix.O_RDONLY|unix.O_NOATIME, 0)
	if err != nil {
		return content{}, err
	}
	defer f.Close() // read only
	h := xxhash.New()
	n, err := io.CopyBuffer(onlyWriter{h}, &untilDone{t, f}, t.buf[:])
	return content{size: n, hash: h.Sum64()}, err
}

// untilDone is a reader that fails when the context is done: a file may be large.
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

// SumPacked is SumTree for a layer that was packed: root is its tree, data its data file.
func SumPacked(ctx context.Context, root *tree.Node, data *os.File) (Sum, error) {
	buf := copyPool.Get().(*[copySize]byte)
	defer copyPool.Put(buf)
	t := &summing{ctx: ctx, tick: func() {}}
	h := xxhash.New()
	_, sum, err := sumOf(root, t.tick, func(n *tree.Node) (uint64, error) {
		h.Reset()
		content := io.NewSectionReader(data, int64(n.Data.Block)*tree.BlockSize, n.Data.Size)
		_, err := io.CopyBuffer(onlyWriter{h}, &untilDone{t, content}, buf[:])
		return h.Sum64(), err
	})
	return sum, err
}

// sumOf sums a tree whose files' content hash tells, and counts its whiteouts.
func sumOf(root *tree.Node, tick func(), hash func(n *tree.Node) (uint64, error)) (whiteouts int, sum Sum, err error) {
	known := map[*tree.Node]bool{}
	var walk func(path string, n *tree.Node) error
	walk = func(path string, n *tree.Node) error {
		tick()
		if n.IsLink() {
			return nil // to a layer below: whose it is
		}
		sum.name(path, n.Mode)
		if known[n] {
			return nil
		}
		dev, c := uint64(0), content{target: n.Target}
		switch n.Type() {
		case unix.S_IFREG:
			known[n] = true
			h, err := hash(n)
			if err != nil {
				return fmt.Errorf("%s: %w", quoted(path), err)
			}
			c.size, c.hash = n.Data.Size, h
		case unix.S_IFCHR, unix.S_IFBLK:
			known[n] = true
			dev = unix.Mkdev(n.Major, n.Minor)
			if n.IsWhiteout() {
				whiteouts++
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
		sum.file(n.Mode, n.UID, n.GID, dev, c)
		return nil
	}
	return whiteouts, sum, walk("", root)
}
