package userns

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

func TestCheckPassable(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	deep := filepath.Join(dir, "a", "b")
	if err := os.MkdirAll(deep, 0o711); err != nil {
		t.Fatal(err)
	}
	for _, d := range []string{filepath.Dir(dir), dir, filepath.Dir(deep), deep} { // Mkdir applies the umask
		if err := os.Chmod(d, 0o711); err != nil {
			t.Fatal(err)
		}
	}
	if err := CheckPassable(deep); err != nil {
		t.Error(err)
	}
	if err := os.Chmod(filepath.Dir(deep), 0o710); err != nil {
		t.Fatal(err)
	}
	if err := CheckPassable(deep); err == nil {
		t.Error("no error for a directory that only root can search")
	}
	if err := CheckPassable(dir + "/no"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}
