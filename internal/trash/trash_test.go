package trash

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"berth/internal/diskusage"
	"berth/internal/task"
	"berth/internal/testutil"
)

// made returns the path of a new directory with a file in it.
func made(t *testing.T, parent, name string) string {
	t.Helper()
	path := filepath.Join(parent, name)
	testutil.Must(t, os.Mkdir(path, 0o700))
	testutil.Must(t, os.WriteFile(filepath.Join(path, "f"), nil, 0o600))
	return path
}

// opened runs a trash in dir. began receives the path of each deletion that starts. A deletion
// fails with the error of fails.
func opened(t *testing.T, dir string, fails func(path string) error) (_ *Trash, began <-chan string) {
	t.Helper()
	paths := make(chan string)
	remove := func(ctx context.Context, path string) error {
		select {
		case paths <- path:
		case <-ctx.Done():
			return ctx.Err()
		}
		if err := fails(path); err != nil {
			return err
		}
		return os.RemoveAll(path)
	}
	bin := New(dir, remove, new(task.Waits), slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(t.Context())
	var run sync.WaitGroup
	run.Go(func() { bin.Run(ctx) })
	t.Cleanup(func() { cancel(); run.Wait() })
	return bin, paths
}

func nothing(string) error { return nil }

// awaitUsage waits until the usage of the trash is want bytes.
func awaitUsage(t *testing.T, bin *Trash, want uint64) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); bin.Usage().Bytes != want; {
		if time.Now().After(deadline) {
			t.Fatalf("%+v is in the trash, want %d bytes", bin.Usage(), want)
		}
	}
}

func exists(t *testing.T, path string) bool {
	t.Helper()
	_, err := os.Lstat(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	return err == nil
}

func TestTakeCountsUntilDeleted(t *testing.T) {
	t.Parallel()
	dir, from := t.TempDir(), t.TempDir()
	bin, began := opened(t, dir, nothing)
	path := made(t, from, "a")
	testutil.Must(t, bin.Take(path, diskusage.Usage{Bytes: 7, Inodes: 2}))
	if exists(t, path) || bin.Usage() != (diskusage.Usage{Bytes: 7, Inodes: 2}) {
		t.Errorf("the path exists: %v; usage %+v", exists(t, path), bin.Usage())
	}
	deleted := <-began
	awaitUsage(t, bin, 0)
	if exists(t, deleted) {
		t.Error("the tree is still in the trash")
	}
	if err := bin.Take(path, diskusage.Usage{Bytes: 7}); !errors.Is(err, os.ErrNotExist) || bin.Usage() != (diskusage.Usage{}) {
		t.Errorf("a missing path: %v, usage %+v", err, bin.Usage())
	}
}

func TestFailedDeletionDelaysNothingElse(t *testing.T) {
	t.Parallel()
	dir, from := t.TempDir(), t.TempDir()
	var stuck string
	fails := func(path string) error { // called in the goroutine of Run only
		if stuck == "" {
			stuck = path
		}
		if path == stuck {
			return errors.New("device or resource busy")
		}
		return nil
	}
	bin, began := opened(t, dir, fails)
	testutil.Must(t, bin.Take(made(t, from, "stuck"), diskusage.Usage{Bytes: 1}))
	first := <-began
	testutil.Must(t, bin.Take(made(t, from, "other"), diskusage.Usage{Bytes: 2}))
	for <-began == first { // the failed one again, and then the other
	}
	awaitUsage(t, bin, 1)
	if !exists(t, first) {
		t.Error("the tree that cannot be deleted is gone")
	}
}

func TestRunDeletesWhatEarlierProcessLeft(t *testing.T) {
	t.Parallel()
	dir, from := t.TempDir(), t.TempDir()
	earlier := New(dir, nil, new(task.Waits), slog.New(slog.DiscardHandler)) // never runs
	for _, name := range []string{"a", "b"} {
		testutil.Must(t, earlier.Take(made(t, from, name), diskusage.Usage{}))
	}
	_, began := opened(t, dir, nothing)
	if a, b := <-began, <-began; a == b || filepath.Dir(a) != dir || filepath.Dir(b) != dir {
		t.Errorf("deleted %s and %s", a, b)
	}
}

func TestRunEndsDuringDeletion(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := made(t, dir, "a")
	ctx, cancel := context.WithCancel(t.Context())
	bin := New(dir, func(ctx context.Context, _ string) error {
		cancel()
		<-ctx.Done()
		return ctx.Err()
	}, new(task.Waits), slog.New(slog.DiscardHandler))
	bin.Run(ctx)
	if !exists(t, path) {
		t.Error("the interrupted deletion removed the tree")
	}
}

func TestDiscard(t *testing.T) {
	t.Parallel()
	dir, from := t.TempDir(), t.TempDir()
	bin := New(dir, nil, new(task.Waits), slog.New(slog.DiscardHandler))
	path := made(t, from, "a")
	for range 2 { // the second time the path does not exist
		testutil.Must(t, bin.Discard(path))
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 || exists(t, path) {
		t.Errorf("trash has %v, %v", entries, err)
	}
	if err := bin.Discard(filepath.Join(path, "\x00")); err == nil {
		t.Error("an invalid path was discarded")
	}
}

// A caller waits for the trees that were moved since, until the first attempt to delete them.
func TestSinceWaitsForDeletion(t *testing.T) {
	t.Parallel()
	dir, from := t.TempDir(), t.TempDir()
	var busy atomic.Bool
	bin, began := opened(t, dir, func(string) error {
		if busy.Load() {
			return errors.New("device or resource busy")
		}
		return nil
	})
	start := func(wait func(context.Context), ctx context.Context) <-chan struct{} {
		done := make(chan struct{})
		go func() { wait(ctx); close(done) }()
		return done
	}
	bin.Since()(t.Context()) // nothing to wait for

	wait := bin.Since()
	testutil.Must(t, bin.Take(made(t, from, "a"), diskusage.Usage{}))
	bin.Since()(t.Context()) // the tree was taken before
	done := start(wait, t.Context())
	select {
	case <-done:
		t.Error("did not wait for the deletion")
	case path := <-began:
		<-done
		if exists(t, path) {
			t.Errorf("%s exists after the wait", path)
		}
	}

	wait = bin.Since()
	testutil.Must(t, bin.Take(made(t, from, "b"), diskusage.Usage{}))
	cut, cancel := context.WithCancel(t.Context())
	cancel()
	wait(cut) // a client that is gone

	busy.Store(true)
	done = start(wait, t.Context())
	<-began
	<-done // a failed deletion is tried again later
	busy.Store(false)
	<-began
}
