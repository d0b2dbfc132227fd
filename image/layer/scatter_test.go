package layer

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// A store on ext4 has its layers spread; elsewhere, where nothing can be told of a directory, it is opened all the same.
func TestScatter(t *testing.T) {
	dir := t.TempDir()
	for range 2 { // the second time it is so
		openStore(t, dir)
		f, err := os.Open(filepath.Join(dir, tmpDir))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		flags, err := unix.IoctlGetInt(int(f.Fd()), unix.FS_IOC_GETFLAGS)
		var fs unix.Statfs_t
		if e := unix.Fstatfs(int(f.Fd()), &fs); e != nil {
			t.Fatal(e)
		}
		if fs.Type == unix.EXT4_SUPER_MAGIC && (err != nil || flags&topDir == 0) {
			t.Errorf("attributes %#x, %v", flags, err)
		}
	}
	if err := scatter(filepath.Join(dir, "nothing")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no directory: %v", err)
	}
}
