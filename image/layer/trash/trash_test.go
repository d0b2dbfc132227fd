package trash

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"berth/image/unpack"
)

// made returns the path of a new directory with a file in it.
func made(t *testing.T, parent, name string) string {
	t.Helper()
	path := filepath.Join(parent, name)
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(path, "f"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// opened returns a trash in dir, which tells of each deletion that it begins. What fails returns an error for stays.
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
	bin := New(dir, remove, slog.New(slog.DiscardHandler))
	bin.Start()
	t.Cleanup(bin.Stop)
	return bin, paths
}

func nothing(string) error { return nil }

// awaitUsage waits until things of so many bytes are in the trash.
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

// What is taken is gone from its place at once, and counts until it is deleted.
func TestTake(t *testing.T) {
	dir, from := t.TempDir(), t.TempDir()
	bin, began := opened(t, dir, nothing)
	path := made(t, from, "a")
	if err := bin.Take(path, unpack.Usage{Bytes: 7, Inodes: 2}); err != nil {
		t.Fatal(err)
	}
	if exists(t, path) || bin.Usage() != (unpack.Usage{Bytes: 7, Inodes: 2}) {
		t.Errorf("in its place: %v; usage %+v", exists(t, path), bin.Usage())
	}
	deleted := <-began
	awaitUsage(t, bin, 0)
	if exists(t, deleted) {
		t.Error("it is still in the trash")
	}
	if err := bin.Take(path, unpack.Usage{Bytes: 7}); !errors.Is(err, os.ErrNotExist) || bin.Usage() != (unpack.Usage{}) {
		t.Errorf("what is not there: %v, usage %+v", err, bin.Usage())
	}
}

// What can't be deleted keeps nothing else, counts on, and is tried again with the next.
func TestWhatCannotBeDeleted(t *testing.T) {
	dir, from := t.TempDir(), t.TempDir()
	var stuck string
	fails := func(path string) error { // in the one goroutine of the trash
		if stuck == "" {
			stuck = path
		}
		if path == stuck {
			return errors.New("device or resource busy")
		}
		return nil
	}
	bin, began := opened(t, dir, fails)
	if err := bin.Take(made(t, from, "stuck"), unpack.Usage{Bytes: 1}); err != nil {
		t.Fatal(err)
	}
	first := <-began
	if err := bin.Take(made(t, from, "other"), unpack.Usage{Bytes: 2}); err != nil {
		t.Fatal(err)
	}
	for <-began == first { // once more, and then the other
	}
	awaitUsage(t, bin, 1)
	if !exists(t, first) {
		t.Error("what can't be deleted is gone")
	}
}

// What an earlier process left is deleted by the next, though nobody puts anything there.
func TestLeftByAnEarlierProcess(t *testing.T) {
	dir, from := t.TempDir(), t.TempDir()
	earlier := New(dir, nil, slog.New(slog.DiscardHandler)) // which comes to delete nothing
	for _, name := range []string{"a", "b"} {
		if err := earlier.Take(made(t, from, name), unpack.Usage{}); err != nil {
			t.Fatal(err)
		}
	}
	_, began := opened(t, dir, nothing)
	if a, b := <-began, <-began; a == b || filepath.Dir(a) != dir || filepath.Dir(b) != dir {
		t.Errorf("deleted were %s and %s", a, b)
	}
}

// The end interrupts a deletion; what it was at is for the next.
func TestStop(t *testing.T) {
	dir := t.TempDir()
	path := made(t, dir, "a")
	begun := make(chan struct{})
	bin := New(dir, func(ctx context.Context, _ string) error {
		close(begun)
		<-ctx.Done()
		return ctx.Err()
	}, slog.New(slog.DiscardHandler))
	bin.Start()
	<-begun
	bin.Stop()
	if !exists(t, path) {
		t.Error("it is gone")
	}
}
