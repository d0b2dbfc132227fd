package diskusage

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func count(t *testing.T, ctx context.Context, path string) (Usage, error) {
	t.Helper()
	root, err := os.Open(path)
	must(t, err)
	defer root.Close()
	return Tree(ctx, root, 4096)
}

func TestTree(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	must(t, os.WriteFile(filepath.Join(outside, "big"), make([]byte, 1<<20), 0o600))
	must(t, os.MkdirAll(filepath.Join(dir, "a/b"), 0o700))
	must(t, os.WriteFile(filepath.Join(dir, "one"), make([]byte, 1), 0o600))
	must(t, os.WriteFile(filepath.Join(dir, "a/two"), make([]byte, 4097), 0o600))
	must(t, os.Link(filepath.Join(dir, "a/two"), filepath.Join(dir, "a/b/again")))
	must(t, os.Symlink(outside, filepath.Join(dir, "out")))
	must(t, unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600))
	must(t, os.WriteFile(filepath.Join(dir, "hole"), nil, 0o600))
	must(t, os.Truncate(filepath.Join(dir, "hole"), 1<<30))
	got, err := count(t, t.Context(), dir)
	must(t, err)
	// Three directories, files of one and two blocks, and what takes no data.
	if want := (Usage{Bytes: 6 * 4096, Inodes: 8}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

// A container can nest deeper than a path can say, and than there are descriptors.
func TestTreeOfManyDirectories(t *testing.T) {
	top := t.TempDir()
	fd, err := unix.Open(top, unix.O_PATH, 0)
	must(t, err)
	for range MaxDepth + 50 {
		must(t, unix.Mkdirat(fd, "d", 0o700))
		next, err := unix.Openat(fd, "d", unix.O_PATH, 0)
		must(t, err)
		must(t, unix.Close(fd))
		fd = next
	}
	must(t, unix.Close(fd))
	for i := range 1000 {
		must(t, os.WriteFile(filepath.Join(top, fmt.Sprint(i)), []byte(strings.Repeat("x", 1+i%2)), 0o600))
	}
	got, err := count(t, t.Context(), top)
	must(t, err)
	if got.Inodes != MaxDepth+1000 {
		t.Errorf("%d inodes", got.Inodes)
	}
}

func TestTreeIsInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := count(t, ctx, t.TempDir()); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

// What is counted changes all the time.
func TestTreeThatChanges(t *testing.T) {
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
		if _, err := count(t, t.Context(), dir); err != nil {
			t.Error(err)
		}
	}
	close(stop)
	must(t, <-stopped)
}
