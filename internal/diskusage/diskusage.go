// Package diskusage counts what trees of files take on disk.
//
// # Contract
//
// File data counts in blocks of the filesystem, holes do not, and a directory is one
// block, so that the same tree has the same figure on every filesystem with that
// block size. A file with several names counts once.
//
// The tree may be changing and may belong to somebody hostile: nothing is followed out
// of it, names that vanish are left out, and neither memory nor descriptors grow with
// its size. What is nested deeper than MaxDepth is left out; of files with several
// names, those beyond a large number count once for each name.
package diskusage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"berth/internal/safefs"
)

// MaxDepth is how many directories a Tree may be deep: each is open while it is counted.
const MaxDepth = 512

// maxLinked is how many files with several names are remembered.
const maxLinked = 100_000

// Usage is what a tree takes.
type Usage struct {
	Bytes  uint64
	Inodes uint64
}

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

// Tree counts root, a directory on a filesystem with that block size, and all below it.
func Tree(ctx context.Context, root *os.File, block int64) (Usage, error) {
	dir, err := safefs.OpenDir(root, "")
	if err != nil {
		return Usage{}, err
	}
	defer dir.Close()
	c := counter{ctx: ctx, block: block, linked: map[uint64]bool{}}
	if err := c.directory(dir, 1); err != nil {
		return Usage{}, err
	}
	return c.usage, nil
}

type counter struct {
	ctx    context.Context
	block  int64
	linked map[uint64]bool // inodes with several names that have been counted
	usage  Usage
}

func (c *counter) directory(dir *safefs.Dir, depth int) error {
	c.add(c.block)
	if err := c.ctx.Err(); err != nil {
		return err
	}
	return ignoreGone(dir.EachName(func(name string) error { return ignoreGone(c.entry(dir, name, depth)) }))
}

func (c *counter) entry(dir *safefs.Dir, name string, depth int) error {
	st, err := dir.Stat(name)
	if err != nil {
		return err
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		if depth == MaxDepth {
			return nil
		}
		sub, err := dir.Open(name)
		if err != nil {
			return err
		}
		return errors.Join(c.directory(sub, depth+1), sub.Close())
	case unix.S_IFREG:
		if c.isAgain(&st) {
			return nil
		}
		c.add(min(st.Blocks*512, (st.Size+c.block-1)/c.block*c.block))
	default:
		if !c.isAgain(&st) {
			c.add(0)
		}
	}
	return nil
}

func (c *counter) isAgain(st *unix.Stat_t) bool {
	if st.Nlink < 2 {
		return false
	}
	again := c.linked[st.Ino]
	if len(c.linked) < maxLinked {
		c.linked[st.Ino] = true
	}
	return again
}

func (c *counter) add(bytes int64) {
	c.usage.Inodes++
	c.usage.Bytes += uint64(bytes)
}

// ignoreGone drops the errors of what vanished, or became something else, meanwhile.
func ignoreGone(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return nil
	}
	return err
}
