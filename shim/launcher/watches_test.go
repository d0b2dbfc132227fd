package launcher

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"berth/internal/safefs"
)

// The kernel's own description of watches leads to the paths of the watched files, the deepest
// first.
func TestFindWatches(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, name := range []string{"a/below", "b/c"} {
		if err := os.MkdirAll(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	watched := []string{"/a", "/b/c", "/b/file"}
	if err := os.WriteFile(filepath.Join(dir, "b/file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	for _, name := range watched {
		if _, err := unix.InotifyAddWatch(fd, dir+name, unix.IN_CREATE); err != nil {
			t.Fatal(err)
		}
	}
	info, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", fd))
	if err != nil {
		t.Fatal(err)
	}
	wanted := map[inode]bool{}
	parseWatches(string(info), wanted)
	if len(wanted) != len(watched) {
		t.Fatalf("watches %v of\n%s", wanted, info)
	}
	root, err := safefs.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	paths, err := findInodes(root, wanted)
	if want := []string{"/b/file", "/b/c", "/a"}; err != nil || !slices.Equal(paths, want) {
		t.Errorf("%q, %v, want %q", paths, err, want)
	}
}
