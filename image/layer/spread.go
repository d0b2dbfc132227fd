package layer

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// topDir is FS_TOPDIR_FL (linux/fs.h), chattr's T.
const topDir = 0x00020000

// spreadOverDisk marks dir, so that ext4 puts each subdirectory into its own block group. Each
// layer is a subdirectory. Without the mark, layers that are written concurrently share a block
// group and its lock. Besides, ext4 without a journal skips recently deleted inodes of the group
// one by one for each new file (recently_deleted, fs/ext4/ialloc.c). After the removal of an image
// with 24,000 files, the next pull took three times the CPU time. Other filesystems return an
// error.
func spreadOverDisk(dir string) (err error) {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close() // read only
	flags, err := unix.IoctlGetInt(int(f.Fd()), unix.FS_IOC_GETFLAGS)
	if err != nil {
		return fmt.Errorf("get attributes of %s: %w", dir, err)
	}
	if flags&topDir != 0 {
		return nil
	}
	if err := unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, flags|topDir); err != nil {
		return fmt.Errorf("set top directory attribute of %s: %w", dir, err)
	}
	return nil
}
