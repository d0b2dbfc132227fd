package diskusage

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
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
	return Tree(ctx, root)
}

func TestNominal(t *testing.T) {
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
	root, err := os.Open(dir)
	must(t, err)
	defer root.Close()
	got, err := Nominal(t.Context(), root, 4096)
	must(t, err)
	// Three directories, files of one and two blocks, and what takes no data.
	if want := (Usage{Bytes: 6 * 4096, Inodes: 8}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

// What takes no data, and what is hidden from a look at sizes, takes blocks. du is what
// Tree is to agree with.
func TestTreeCountsWhatIsAllocated(t *testing.T) {
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "written"), make([]byte, 10_000), 0o600))
	must(t, os.Link(filepath.Join(dir, "written"), filepath.Join(dir, "again")))
	must(t, os.Symlink(strings.Repeat("long/", 500), filepath.Join(dir, "link")))
	must(t, unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600))
	must(t, os.WriteFile(filepath.Join(dir, "hole"), nil, 0o600))
	must(t, os.Truncate(filepath.Join(dir, "hole"), 1<<30))
	must(t, os.Mkdir(filepath.Join(dir, "large"), 0o700))
	for i := range 2000 {
		must(t, os.WriteFile(filepath.Join(dir, "large", fmt.Sprintf("%0200d", i)), nil, 0o600))
	}
	f, err := os.Create(filepath.Join(dir, "beyond its end"))
	must(t, err)
	defer f.Close()
	const reserved = 64 << 20
	err = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, 0, reserved)
	if errors.Is(err, unix.EOPNOTSUPP) {
		t.Skip("a filesystem without fallocate")
	}
	must(t, err)
	must(t, f.Sync())
	got, err := count(t, t.Context(), dir)
	must(t, err)
	du, err := exec.Command("du", "-s", "-B1", dir).Output()
	must(t, err)
	want, err := strconv.ParseUint(strings.Fields(string(du))[0], 10, 64)
	must(t, err)
	if got.Bytes != want || got.Bytes < reserved || got.Inodes != 2007 {
		t.Errorf("got %+v, du %d", got, want)
	}
}

// nest makes directories d in each other below fd, which it closes.
func nest(t *testing.T, fd, depth int) {
	t.Helper()
	for range depth {
		must(t, unix.Mkdirat(fd, "d", 0o700))
		next, err := unix.Openat(fd, "d", unix.O_PATH, 0)
		must(t, err)
		must(t, unix.Close(fd))
		fd = next
	}
	must(t, unix.Close(fd))
}

// A container can nest deeper than a path can say, and than there are descriptors.
func TestTreeThatIsDeep(t *testing.T) {
	top := t.TempDir()
	fd, err := unix.Open(top, unix.O_PATH, 0)
	must(t, err)
	nest(t, fd, 10*levels)
	for i := range 1000 {
		must(t, os.WriteFile(filepath.Join(top, fmt.Sprint(i)), []byte(strings.Repeat("x", 1+i%2)), 0o600))
	}
	got, err := count(t, t.Context(), top)
	must(t, err)
	if got.Inodes != 1+10*levels+1000 {
		t.Errorf("%d inodes", got.Inodes)
	}
}

// A small number would be a lie.
func TestTreeThatIsTooDeep(t *testing.T) {
	top := t.TempDir()
	deep := top + strings.Repeat("/d", levels-1)
	must(t, os.MkdirAll(deep, 0o700))
	const beyond = 10
	for i := range maxDeeper + beyond {
		must(t, os.Mkdir(filepath.Join(deep, fmt.Sprint(i)), 0o700))
		must(t, os.Mkdir(filepath.Join(deep, fmt.Sprint(i), "sub"), 0o700))
	}
	got, err := count(t, t.Context(), top)
	if !errors.Is(err, ErrTooDeep) || got.Inodes != levels+2*maxDeeper+beyond {
		t.Errorf("%d inodes, %v", got.Inodes, err)
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
