// Package diskusage counts what trees of files take on disk.
//
// # Contract
//
// Tree counts the blocks that are allocated, as du(1) does: those of preallocated
// files, directories and long symlinks too. Nominal counts what the data needs, so that
// the same tree has the same figure on every filesystem with that block size: file data in
// whole blocks, holes not, one block for a directory. A file with several names
// counts once.
//
// The tree may be changing and may belong to somebody hostile: nothing is followed out
// of it, names that vanish are left out, and neither memory nor descriptors grow with
// its size or depth. What can't be counted within these bounds is ErrTooDeep, with what was.
// Of files with several names, those beyond a large number count once for each name.
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

const (
	// levels is how deep a tree is walked at once: each directory on the way is open, twice.
	levels = 256
	// maxDeeper is how many directories at that depth are left open, to be walked later.
	maxDeeper = 1024
)

// ErrTooDeep says that a tree has more than a thousand directories so deep in it that they
// were not counted.
var ErrTooDeep = errors.New("too many directories are nested too deep to be counted")

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

// Tree counts what root, a directory, and all below it has allocated. Beside
// ErrTooDeep there is the usage of the rest.
func Tree(ctx context.Context, root *os.File) (Usage, error) {
	return tree(ctx, root, func(st *unix.Stat_t) int64 { return st.Blocks * 512 })
}

// Nominal counts what root, a directory on a filesystem with that block size, and all
// below it needs. Beside ErrTooDeep there is the usage of the rest.
func Nominal(ctx context.Context, root *os.File, block int64) (Usage, error) {
	return tree(ctx, root, func(st *unix.Stat_t) int64 {
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFDIR:
			return block
		case unix.S_IFREG:
			return min(st.Blocks*512, (st.Size+block-1)/block*block)
		default:
			return 0
		}
	})
}

func tree(ctx context.Context, root *os.File, size func(*unix.Stat_t) int64) (usage Usage, err error) {
	dir, err := safefs.OpenDir(root, "")
	if err != nil {
		return Usage{}, err
	}
	c := counter{ctx: ctx, size: size, linked: map[uint64]bool{}, deeper: []*safefs.Dir{dir}}
	defer func() { err = errors.Join(err, c.close()) }()
	st, err := dir.Stat("")
	if err != nil {
		return Usage{}, err
	}
	c.add(&st)
	for len(c.deeper) > 0 && err == nil {
		last := len(c.deeper) - 1
		dir, c.deeper = c.deeper[last], c.deeper[:last]
		err = errors.Join(c.content(dir, 1), dir.Close())
	}
	if err == nil && c.tooDeep {
		err = ErrTooDeep
	}
	return c.usage, err
}

type counter struct {
	ctx     context.Context
	size    func(*unix.Stat_t) int64
	linked  map[uint64]bool // inodes with several names that have been counted
	deeper  []*safefs.Dir   // directories whose content is still to be counted
	tooDeep bool            // and some that could not be kept for that
	usage   Usage
}

func (c *counter) close() (err error) {
	for _, dir := range c.deeper {
		err = errors.Join(err, dir.Close())
	}
	return err
}

// content counts what is in a directory. level is its depth below one of c.deeper.
func (c *counter) content(dir *safefs.Dir, level int) error {
	if err := c.ctx.Err(); err != nil {
		return err
	}
	return ignoreGone(dir.EachName(func(name string) error { return ignoreGone(c.entry(dir, name, level)) }))
}

func (c *counter) entry(dir *safefs.Dir, name string, level int) error {
	if err := c.ctx.Err(); err != nil {
		return err
	}
	st, err := dir.Stat(name)
	if err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		if !c.isAgain(&st) {
			c.add(&st)
		}
		return nil
	}
	c.add(&st)
	return c.directory(dir, name, level)
}

func (c *counter) directory(parent *safefs.Dir, name string, level int) error {
	if level == levels && len(c.deeper) == maxDeeper {
		c.tooDeep = true
		return nil
	}
	dir, err := parent.Open(name)
	if err != nil {
		return err
	}
	if level == levels {
		c.deeper = append(c.deeper, dir)
		return nil
	}
	return errors.Join(c.content(dir, level+1), dir.Close())
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

func (c *counter) add(st *unix.Stat_t) {
	c.usage.Inodes++
	c.usage.Bytes += uint64(c.size(st))
}

// ignoreGone drops the errors of what vanished, or became something else, meanwhile.
func ignoreGone(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return nil
	}
	return err
}
