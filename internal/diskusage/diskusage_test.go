package diskusage

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"berth/internal/safefs"
	"berth/internal/testutil"
)

func count(t *testing.T, ctx context.Context, path string) (Usage, error) {
	t.Helper()
	root, err := os.Open(path)
	testutil.Must(t, err)
	defer root.Close()
	return Tree(ctx, root)
}

func TestNominalCountsWholeBlocks(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	testutil.Must(t, os.WriteFile(filepath.Join(outside, "big"), make([]byte, 1<<20), 0o600))
	testutil.Must(t, os.MkdirAll(filepath.Join(dir, "a/b"), 0o700))
	testutil.Must(t, os.WriteFile(filepath.Join(dir, "one"), make([]byte, 1), 0o600))
	testutil.Must(t, os.WriteFile(filepath.Join(dir, "a/two"), make([]byte, 4097), 0o600))
	testutil.Must(t, os.Link(filepath.Join(dir, "a/two"), filepath.Join(dir, "a/b/again")))
	testutil.Must(t, os.Symlink(outside, filepath.Join(dir, "out")))
	testutil.Must(t, unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600))
	testutil.Must(t, os.WriteFile(filepath.Join(dir, "hole"), nil, 0o600))
	testutil.Must(t, os.Truncate(filepath.Join(dir, "hole"), 1<<30))
	root, err := os.Open(dir)
	testutil.Must(t, err)
	defer root.Close()
	got, err := Nominal(t.Context(), root, 4096)
	testutil.Must(t, err)
	// Three directories, files of one and two blocks, and entries without data.
	if want := (Usage{Bytes: 6 * 4096, Inodes: 8}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

// Tree agrees with du about files with blocks but without data, and about blocks that a file's size
// does not show.
func TestTreeCountsAllocatedBlocks(t *testing.T) {
	dir := t.TempDir()
	testutil.Must(t, os.WriteFile(filepath.Join(dir, "written"), make([]byte, 10_000), 0o600))
	testutil.Must(t, os.Link(filepath.Join(dir, "written"), filepath.Join(dir, "again")))
	testutil.Must(t, os.Symlink(strings.Repeat("long/", 500), filepath.Join(dir, "link")))
	testutil.Must(t, unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600))
	testutil.Must(t, os.WriteFile(filepath.Join(dir, "hole"), nil, 0o600))
	testutil.Must(t, os.Truncate(filepath.Join(dir, "hole"), 1<<30))
	testutil.Must(t, os.Mkdir(filepath.Join(dir, "large"), 0o700))
	for i := range 2000 {
		testutil.Must(t, os.WriteFile(filepath.Join(dir, "large", fmt.Sprintf("%0200d", i)), nil, 0o600))
	}
	f, err := os.Create(filepath.Join(dir, "beyond its end"))
	testutil.Must(t, err)
	defer f.Close()
	const reserved = 64 << 20
	err = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, 0, reserved)
	if errors.Is(err, unix.EOPNOTSUPP) {
		t.Skip("a filesystem without fallocate")
	}
	testutil.Must(t, err)
	testutil.Must(t, f.Sync())
	got, err := count(t, t.Context(), dir)
	if !errors.Is(err, ErrChanged) { // a new directory looks like a changed one
		testutil.Must(t, err)
	}
	du, err := exec.Command("du", "-s", "-B1", dir).Output()
	testutil.Must(t, err)
	want, err := strconv.ParseUint(strings.Fields(string(du))[0], 10, 64)
	testutil.Must(t, err)
	if got.Bytes != want || got.Bytes < reserved || got.Inodes != 2007 {
		t.Errorf("got %+v, du %d", got, want)
	}
}

// nest creates depth nested directories named d below fd, which it closes.
func nest(t *testing.T, fd, depth int) {
	t.Helper()
	for range depth {
		testutil.Must(t, unix.Mkdirat(fd, "d", 0o700))
		next, err := unix.Openat(fd, "d", unix.O_PATH, 0)
		testutil.Must(t, err)
		testutil.Must(t, unix.Close(fd))
		fd = next
	}
	testutil.Must(t, unix.Close(fd))
}

// removeTree removes a tree that is too deep for t.TempDir's cleanup.
func removeTree(t *testing.T, path string) {
	t.Cleanup(func() { testutil.Must(t, safefs.RemoveAll(context.WithoutCancel(t.Context()), path)) })
}

// A container can nest directories deeper than the longest path and the number of descriptors.
func TestTreeCountsDeepTree(t *testing.T) {
	top := t.TempDir()
	removeTree(t, filepath.Join(top, "d"))
	fd, err := unix.Open(top, unix.O_PATH, 0)
	testutil.Must(t, err)
	const levels = 5000
	nest(t, fd, levels)
	for i := range 1000 {
		testutil.Must(t, os.WriteFile(filepath.Join(top, fmt.Sprint(i)), []byte(strings.Repeat("x", 1+i%2)), 0o600))
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	got, err := count(t, t.Context(), top)
	runtime.ReadMemStats(&after)
	if made, limit := after.TotalAlloc-before.TotalAlloc, uint64(levels*2<<10); made > limit {
		t.Errorf("%d bytes of memory were allocated for %d levels, want at most %d", made, levels, limit)
	}
	if err != nil && !errors.Is(err, ErrChanged) {
		t.Fatal(err)
	}
	if got.Inodes != 1+levels+1000 {
		t.Errorf("%d inodes", got.Inodes)
	}
}

// Directories that are thousands of levels deep count like others, with their content.
func TestTreeCountsDeepAndWideTree(t *testing.T) {
	top := t.TempDir()
	const levels, wide, size = 255, 2000, 8192
	deep := top + strings.Repeat("/d", levels)
	testutil.Must(t, os.MkdirAll(deep, 0o700))
	for i := range wide {
		dir := filepath.Join(deep, fmt.Sprint(i))
		testutil.Must(t, os.Mkdir(dir, 0o700))
		testutil.Must(t, os.WriteFile(filepath.Join(dir, "file"), make([]byte, size), 0o600))
	}
	got, err := count(t, t.Context(), top)
	if err != nil && !errors.Is(err, ErrChanged) {
		t.Fatal(err)
	}
	if got.Inodes != 1+levels+2*wide || got.Bytes < wide*size {
		t.Errorf("%+v, want %d inodes and at least %d bytes", got, 1+levels+2*wide, wide*size)
	}
}

// A file that is moved during the walk counts once, and the result says that it may be incomplete.
func TestTreeCountsMovedFilesOnce(t *testing.T) {
	for name, isDir := range map[string]bool{"file": false, "directory": true} {
		t.Run(name, func(t *testing.T) {
			top := t.TempDir()
			for _, dir := range []string{"a", "b"} {
				testutil.Must(t, os.Mkdir(filepath.Join(top, dir), 0o700))
				for i := range 5 {
					testutil.Must(t, os.WriteFile(filepath.Join(top, dir, fmt.Sprint(i)), make([]byte, 1), 0o600))
				}
			}
			moved, large := filepath.Join(top, "a/moved"), filepath.Join(top, "a/moved")
			if isDir {
				testutil.Must(t, os.Mkdir(moved, 0o700))
				large = filepath.Join(moved, "large")
			}
			testutil.Must(t, os.WriteFile(large, make([]byte, 2*largeFile), 0o600))
			root, err := os.Open(top)
			testutil.Must(t, err)
			defer root.Close()
			from := "a"
			usage, err := tree(t.Context(), root, func(st *unix.Stat_t) int64 {
				to := map[string]string{"a": "b", "b": "a"}[from]
				if err := os.Rename(filepath.Join(top, from, "moved"), filepath.Join(top, to, "moved")); err == nil {
					from = to
				}
				return st.Size
			})
			if !errors.Is(err, ErrChanged) || usage.Bytes >= 4*largeFile {
				t.Errorf("%+v, %v", usage, err)
			}
		})
	}
}

// If there are more files with several names than the walk remembers, each name counts as a
// fraction.
func TestForgottenNamesCountAsFractions(t *testing.T) {
	c := counter{size: func(st *unix.Stat_t) int64 { return st.Size }, seen: map[uint64]struct{}{}}
	for i := range uint64(maxSeen) {
		c.seen[i] = struct{}{}
	}
	for range 3 {
		c.add(&unix.Stat_t{Ino: maxSeen + 7, Nlink: 3, Size: 9000, Mode: unix.S_IFREG})
	}
	if got, want := c.usage(), (Usage{Bytes: 9000, Inodes: 1}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestTreeEndsWithContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := count(t, ctx, t.TempDir()); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

// The tree changes during the count.
func TestTreeSurvivesChanges(t *testing.T) {
	dir := t.TempDir()
	stop, stopped := make(chan struct{}), make(chan error, 1)
	go func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				stopped <- nil
				return
			default:
			}
			path := filepath.Join(dir, fmt.Sprint(i%50))
			if err := errors.Join(os.RemoveAll(path), os.MkdirAll(filepath.Join(path, "sub"), 0o700)); err != nil {
				stopped <- err
				return
			}
		}
	}()
	for range 200 {
		if _, err := count(t, t.Context(), dir); err != nil && !errors.Is(err, ErrChanged) {
			t.Error(err)
		}
	}
	close(stop)
	testutil.Must(t, <-stopped)
}
