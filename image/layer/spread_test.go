package layer

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// On ext4 the directory gets the attribute, also on a second call. Other filesystems refuse it.
func TestSpreadOverDisk(t *testing.T) {
	dir := t.TempDir()
	for range 2 { // the second time it is so
		told := spreadOverDisk(dir)
		f, err := os.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		flags, err := unix.IoctlGetInt(int(f.Fd()), unix.FS_IOC_GETFLAGS)
		var fs unix.Statfs_t
		if e := unix.Fstatfs(int(f.Fd()), &fs); e != nil {
			t.Fatal(e)
		}
		if fs.Type == unix.EXT4_SUPER_MAGIC && (told != nil || err != nil || flags&topDir == 0) {
			t.Errorf("attributes %#x, %v, %v", flags, err, told)
		}
	}
	if err := spreadOverDisk(filepath.Join(dir, "nothing")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no directory: %v", err)
	}
}
