package launcher

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"berth/checkpoint/verify/verifytest"
	"berth/internal/testutil"
)

// Another container's images can be removed while this one is restored. Its own must be there.
func TestHighestPIDWithoutOthers(t *testing.T) {
	own, gone := verifytest.Images(t, verifytest.Versions[0]), filepath.Join(t.TempDir(), "gone")
	want, err := highestPID(own, []string{own})
	testutil.Must(t, err)
	got, err := highestPID(own, []string{gone, own})
	testutil.Must(t, err)
	if got != want || want == 0 {
		t.Errorf("%d, want %d", got, want)
	}
	if _, err := highestPID(gone, nil); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("its own are missing: %v", err)
	}
	broken := t.TempDir()
	testutil.Must(t, os.WriteFile(filepath.Join(broken, "pstree.img"), []byte("none"), 0o600))
	if _, err := highestPID(own, []string{broken}); err == nil {
		t.Error("broken images are no error")
	}
}
