package layer

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"berth/internal/safefs"
)

// blockSize returns the block size of the filesystem dir is on.
func blockSize(dir *os.File) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(dir.Fd()), &st); err != nil {
		return 0, fmt.Errorf("statfs %s: %w", dir.Name(), err)
	}
	if st.Bsize <= 0 || st.Bsize > 1<<20 { // a FUSE filesystem may say anything
		return 4096, nil
	}
	return int64(st.Bsize), nil
}

// countTree counts a tree as unpacker.count does while it is made.
func countTree(root *os.File, block int64) (Usage, error) {
	dir, err := safefs.OpenDir(root, "")
	if err != nil {
		return Usage{}, err
	}
	defer dir.Close()
	c := counter{block: block, linked: map[uint64]bool{}}
	if err := c.directory(dir); err != nil {
		return Usage{}, err
	}
	return c.usage, nil
}

type counter struct {
	block  int64
	linked map[uint64]bool // inodes with several names that have been counted
	usage  Usage
}

func (c *counter) directory(dir *safefs.Dir) error {
	c.add(c.block)
	names, err := dir.Names()
	if err != nil {
		return err
	}
	for _, name := range names {
		if err := c.entry(dir, name); err != nil {
			return err
		}
	}
	return nil
}

func (c *counter) entry(dir *safefs.Dir, name string) error {
	st, err := dir.Stat(name)
	if err != nil {
		return err
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		sub, err := dir.Open(name)
		if err != nil {
			return err
		}
		return errors.Join(c.directory(sub), sub.Close())
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
	c.linked[st.Ino] = true
	return again
}

func (c *counter) add(bytes int64) {
	c.usage.Inodes++
	c.usage.Bytes += uint64(bytes)
}
