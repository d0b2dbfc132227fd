package safefs

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

// newWalk starts a walk of a directory and closes it when the test ends.
func newWalk(t *testing.T, path string) *Walk {
	t.Helper()
	root, err := os.Open(path)
	testutil.Must(t, err)
	defer root.Close()
	w, err := NewWalk(root, true)
	testutil.Must(t, err)
	t.Cleanup(func() {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	})
	return w
}

// finish completes the walk and returns how often it returned each name.
func finish(t *testing.T, w *Walk) map[string]int {
	t.Helper()
	names := map[string]int{}
	for {
		e, err := w.Next()
		if err == io.EOF {
			return names
		}
		testutil.Must(t, err)
		names[e.Name]++
	}
}

func write(t *testing.T, path string) {
	t.Helper()
	testutil.Must(t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, nil, 0o600)))
}

func TestWalk(t *testing.T) {
	top, outside := t.TempDir(), t.TempDir()
	write(t, outside+"/not reached")
	want := map[string]int{"out": 1, "sub": 1, "fifo": 1}
	for i := range 1000 { // more names than one read returns
		name := fmt.Sprintf("%0100d", i)
		write(t, filepath.Join(top, "sub", name))
		want[name]++
	}
	testutil.Must(t, errors.Join(os.Symlink(outside, top+"/out"), unix.Mkfifo(top+"/fifo", 0o600)))
	w := newWalk(t, top)
	if got := finish(t, w); !maps.Equal(got, want) {
		t.Errorf("%d names, want %d", len(got), len(want))
	}
	if err := w.Incomplete(); err != nil {
		t.Error(err)
	}
}

// The walk continues closed directories at the same place, with and without handles.
func TestWalkReopensClosedDirectories(t *testing.T) {
	for name, mount := range map[string]int{"by handle": 0, "by dot dot": -1} {
		t.Run(name, func(t *testing.T) {
			top, want := t.TempDir(), map[string]int{}
			for i, dir := 0, top; i < 5*walkOpen; i++ {
				for j := range 8 {
					name := fmt.Sprintf("%0*d-%d", 1+200*(i%2), i, j)
					write(t, filepath.Join(dir, name))
					want[name]++
				}
				dir = filepath.Join(dir, "d")
				want["d"]++
				write(t, filepath.Join(dir, "last"))
				want["last"]++
			}
			w := newWalk(t, top)
			if mount < 0 {
				w.mount = mount
			}
			if got := finish(t, w); !maps.Equal(got, want) {
				t.Errorf("got %d names, want %d", len(got), len(want))
			}
			if len(w.spare) > walkOpen+1 || w.Incomplete() != nil {
				t.Errorf("%d directories were open, %v", len(w.spare), w.Incomplete())
			}
		})
	}
}

// If an ancestor of the walk's current directory is moved, the walk still finds its content or
// reports that it may be incomplete.
func TestWalkBelowMovedDirectory(t *testing.T) {
	testutil.NeedRoot(t)
	for name, byHandle := range map[string]bool{"by handle": true, "by dot dot": false} {
		t.Run(name, func(t *testing.T) {
			top := t.TempDir()
			// At the bottom of the first chain, the walk has closed the directory that contains the
			// other chains.
			const all = 200
			for i := range all {
				write(t, filepath.Join(top, "a/moved", fmt.Sprintf("%0200d", i), strings.Repeat("d/", 2*walkOpen), "bottom"))
			}
			w := newWalk(t, top)
			if !byHandle {
				w.mount = -1
			}
			bottoms, elsewhere := 0, t.TempDir()
			var first string
			for e, err := w.Next(); err != io.EOF; e, err = w.Next() {
				testutil.Must(t, err)
				if len(e.Name) == 200 && first == "" {
					first = e.Name
				}
				if e.Name != "bottom" {
					continue
				}
				if bottoms++; bottoms == 1 {
					testutil.Must(t, errors.Join(os.Mkdir(elsewhere+"/x", 0o700), os.Rename(filepath.Join(top, "a/moved", first, "d"), elsewhere+"/x/d")))
				}
			}
			if bottoms == all != byHandle {
				t.Errorf("%d of %d bottoms were found", bottoms, all)
			}
			if err := w.Incomplete(); errors.Is(err, ErrMoved) == byHandle || !w.Changed() {
				t.Errorf("incomplete: %v, changed %v", err, w.Changed())
			}
		})
	}
}

func TestWalkReportsTooDeepTree(t *testing.T) {
	top := t.TempDir()
	write(t, top+"/a/b/c/file")
	write(t, top+"/other")
	w := newWalk(t, top)
	w.levels = 3
	got := slices.Sorted(maps.Keys(finish(t, w)))
	if want := []string{"a", "b", "c", "other"}; !slices.Equal(got, want) || !errors.Is(w.Incomplete(), ErrTooDeep) {
		t.Errorf("got %v, %v", got, w.Incomplete())
	}
}

// A directory that becomes a symlink after its name was read is not followed.
func TestWalkDoesNotFollowSwappedDirectory(t *testing.T) {
	top, outside := t.TempDir(), t.TempDir()
	write(t, outside+"/not reached")
	write(t, top+"/dir/file")
	w := newWalk(t, top)
	if e, err := w.Next(); err != nil || e.Name != "dir" || !e.Dir {
		t.Fatalf("%+v, %v", e, err)
	}
	testutil.Must(t, errors.Join(os.Rename(top+"/dir", top+"/other"), os.Symlink(outside, top+"/dir")))
	if got := finish(t, w); got["not reached"] != 0 || !w.Changed() {
		t.Errorf("got %v, changed %v", got, w.Changed())
	}
}
