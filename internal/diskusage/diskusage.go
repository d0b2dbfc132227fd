// Package diskusage counts the disk usage of directory trees, by a walk or by project quotas
// (Quotas), and limits it by project quotas.
//
// # Contract
//
// Tree counts allocated blocks, as du(1) does, including those of preallocated files, directories
// and long symlinks. Nominal counts the blocks that the content needs: file data in whole blocks
// without holes, and one block for each directory. So a tree has the same nominal usage on every
// filesystem with that block size. A file with several names counts once. If a tree has more such
// files than the walk remembers, each name of a file counts as a fraction of it.
//
// The tree may change and may be hostile. The walk never leaves the filesystem and skips names that
// disappear. Its memory and descriptors are limited. If the result may be too low, the error is one
// of these:
//
//   - ErrChanged: directories changed meanwhile, and moved files may be missing.
//   - safefs.ErrTooDeep: directories are nested too deeply for a walk.
//   - any other error: the walk ended early.
//
// An open file without a name does not count, because a walk does not find it.
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

// ErrChanged means that directories changed during the count. Files that were moved may be missing.
var ErrChanged = errors.New("directories changed while they were counted")

const (
	// maxSeen is how many files the walk remembers, so that they count once.
	maxSeen = 200_000
	// largeFile is the size from which a file counts once even if it is moved during the walk.
	// Counting it twice could cause the eviction of its pod.
	largeFile = 1 << 20
)

// Usage is the disk usage of a tree.
type Usage struct {
	Bytes  uint64 `json:"bytes"`
	Inodes uint64 `json:"inodes"`
}

// Add returns the sum of two usages.
func (u Usage) Add(v Usage) Usage { return Usage{u.Bytes + v.Bytes, u.Inodes + v.Inodes} }

// BlockSize returns the block size of the filesystem f is on, in bytes.
func BlockSize(f *os.File) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		return 0, fmt.Errorf("statfs %s: %w", f.Name(), err)
	}
	if st.Bsize <= 0 || st.Bsize > 1<<20 { // a FUSE filesystem may return any value
		return 4096, nil
	}
	return int64(st.Bsize), nil
}

// Tree counts the allocated space of the directory root and of its content on the same filesystem.
// After an error it also returns the usage counted so far.
func Tree(ctx context.Context, root *os.File) (Usage, error) {
	return tree(ctx, root, func(st *unix.Stat_t) int64 { return st.Blocks * 512 })
}

// Nominal counts the space that the directory root and its content need with that block size. The
// tree should not change meanwhile. After an error it also returns the usage counted so far.
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
	if errors.Is(err, ErrChanged) { // a new directory looks like a changed one
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
	inodes float64 // if a file with several names is not in seen, each name counts as a fraction of it
}

// content counts everything that the walk finds.
func (c *counter) content(ctx context.Context, walk *safefs.Walk) error {
	for {
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		e, err := walk.Next()
		if errors.Is(err, io.EOF) {
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
		if !c.add(&st) && e.Dir { // the directory was moved, and its content was counted in the other place
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
