package errdefs

import (
	"errors"
	"os"
	"strings"
	"testing"
)

func TestIsBadPath(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.WriteFile(dir+"/file", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("loop", dir+"/loop"); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{dir + "/missing", dir + "/file/x", dir + "/loop", dir + "/" + strings.Repeat("x", 256), dir + strings.Repeat("/x", 4096)} {
		if _, err := os.Stat(path); !IsBadPath(err) {
			t.Errorf("%.100s: %v", path, err)
		}
	}
	for _, err := range []error{nil, os.ErrPermission, errors.New("no such file or directory")} {
		if IsBadPath(err) {
			t.Errorf("IsBadPath(%v) = true", err)
		}
	}
}
