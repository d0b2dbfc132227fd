package userns

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"berth/internal/testutil"
)

func TestCheckPassable(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	deep := filepath.Join(dir, "a", "b")
	testutil.Must(t, os.MkdirAll(deep, 0o711))
	for _, d := range []string{filepath.Dir(dir), dir, filepath.Dir(deep), deep} { // Mkdir applies the umask
		testutil.Must(t, os.Chmod(d, 0o711))
	}
	if err := CheckPassable(deep); err != nil {
		t.Error(err)
	}
	testutil.Must(t, os.Chmod(filepath.Dir(deep), 0o710))
	if err := CheckPassable(deep); err == nil {
		t.Error("no error for a directory that only root can search")
	}
	if err := CheckPassable(dir + "/no"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}
