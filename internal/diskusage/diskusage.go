// Package diskusage counts what trees of files take on disk.
//
// # Contract
//
// Tree counts the blocks that are allocated, as du(1) does: those of preallocated
// files, directories and long symlinks too. Nominal counts what the data needs, so that
// the same tree has the same figure on every filesystem with that block size: file data in
// whole blocks, holes not, one block for a directory. A file with several names
// counts once; where there are very many of them, each name counts as its part of the file.
//
// The tree may be changing and may belong to somebody hostile: nothing is followed out
// of it, names that vanish are left out, and memory and descriptors are bounded. A figure
// that may be too low comes with an error that says so:
//
//   - ErrChanged: directories changed meanwhile, and what was moved may be left out.
//   - safefs.ErrTooDeep: directories are nested deeper than a walk goes.
//   - any other: the walk ended before it was complete.
//
// A file that is open and has no name any more is not counted: no walk finds it.
package diskusage

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"

	"golang.org/x/sys/unix"

	"berth/internal/safefs"
)

// ErrChanged says that directories changed while a tree was counted. What was moved meanwhile may
// be left out.
var ErrChanged = errors.New("directories changed while they were counted")

const (
	// maxSeen is how many files are remembered so that they count once.
	maxSeen = 200_000
	// largeFile is the size of files that count once also when they are moved during the walk: one
	// that is counted twice could get its pod evicted.
	largeFile = 1 << 20
)

// Usage is the disk usage of a tree.
type Usage struct {
	Bytes  uint64 `json:"bytes"`
	Inodes uint64 `json:"inodes"`
}

// Add returns the sum of both.
func (u Usage) Add(v Usage) Usage { return Usage{u.Bytes + v.Bytes, u.Inodes + v.Inodes} }

// BlockSize returns the block size of the filesystem f is on, in bytes.
func BlockSize(f *os.File) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		return 0, fmt.Errorf("statfs %s: %w", f.Name(), err)
	}
	if st.Bsize <= 0 || st.Bsize > 1<<20 { // a FUSE filesystem may say anything
		return 4096, nil
	}
	return int64(st.Bsize), nil
}

// Tree counts what root, a directory, and all below it on its filesystem has allocated. Beside an
// error there is the usage of what was counted.
func Tree(ctx context.Context, root *os.File) (Usage, error) {
	return tree(ctx, root, func(st *unix.Stat_t) int64 { return st.Blocks * 512 })
}

// Nominal counts what root, a directory on a filesystem with that block size, and all below it
// needs. Beside an error there is the usage of what was counted. The tree is expected not to
// change.
func Nominal(ctx context.Context, root *os.File, block int64) (Usage, error) {
	usage, err := tree(ctx, root, func(st *unix.Stat_t) int64 {
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFDIR:
			return block
		case unix.S_IFREG:
			return min(st.Blocks*512, (st.Size+block-1)/block*block)
		default:
			return 0
		}
	})
	if errors.Is(err, ErrChanged) { // it was made a moment ago
		err = nil
	}
	return usage, err
}

func tree(ctx context.Context, root *os.File, size func(*unix.Stat_t) int64) (usage Usage, err error) {
	walk, err := safefs.NewWalk(root, true)
	if err != nil {
		return Usage{}, err
	}
	defer func() { err = errors.Join(err, walk.Close()) }()
	var st unix.Stat_t
	if err := unix.Fstat(int(root.Fd()), &st); err != nil {
		return Usage{}, fmt.Errorf("stat %s: %w", root.Name(), err)
	}
	c := counter{size: size, device: st.Dev, seen: map[uint64]struct{}{}}
	c.add(&st)
	if err := c.content(ctx, walk); err != nil {
		return c.usage(), err
	}
	if err := walk.Incomplete(); err != nil {
		return c.usage(), err
	}
	if walk.Changed() {
		return c.usage(), ErrChanged
	}
	return c.usage(), nil
}

type counter struct {
	size   func(*unix.Stat_t) int64
	device uint64
	seen   map[uint64]struct{} // inodes that must not count again
	bytes  uint64
	inodes float64 // each name of a file with several has its part, where that is not in seen
}

// content counts all that walk finds.
func (c *counter) content(ctx context.Context, walk *safefs.Walk) error {
	for {
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		e, err := walk.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		st, err := e.Stat()
		if safefs.IsGone(err) {
			continue
		}
		if err != nil {
			return err
		}
		if st.Dev != c.device {
			continue
		}
		if !c.add(&st) && e.Dir { // it was moved, and its content was counted at the other place
			walk.Skip()
		}
	}
}

// add counts a file, unless it was counted before.
func (c *counter) add(st *unix.Stat_t) bool {
	size := uint64(c.size(st))
	isDir := st.Mode&unix.S_IFMT == unix.S_IFDIR
	names := uint64(1)
	if !isDir {
		names = max(1, uint64(st.Nlink))
	}
	if isDir || names > 1 || size >= largeFile {
		if _, again := c.seen[st.Ino]; again {
			return false
		}
		if len(c.seen) < maxSeen {
			c.seen[st.Ino] = struct{}{}
			names = 1
		}
	}
	c.bytes += (size + names - 1) / names
	c.inodes += 1 / float64(names)
	return true
}

func (c *counter) usage() Usage {
	return Usage{Bytes: c.bytes, Inodes: uint64(math.Ceil(c.inodes - 1e-6))}
}
