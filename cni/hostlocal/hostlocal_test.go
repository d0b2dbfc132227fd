package hostlocal

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// While host-local has its lock, an empty file may be one that it is about to write.
func TestTornReservationsAreLeftToWhoeverHasTheLock(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "10.1.2.3")
	must(t, os.WriteFile(path, nil, 0o600))
	lock, err := os.Create(filepath.Join(dir, "lock"))
	must(t, err)
	defer lock.Close()
	must(t, unix.Flock(int(lock.Fd()), unix.LOCK_EX))
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	log := slog.New(slog.DiscardHandler)
	if err := ReleaseTorn(ctx, dir, log); err == nil {
		t.Error("the lock was not waited for")
	}
	must(t, os.WriteFile(path, []byte("pod\r\neth0"), 0o600))
	must(t, lock.Close())
	must(t, ReleaseTorn(context.Background(), dir, log))
	if _, err := os.Stat(path); err != nil {
		t.Errorf("a reservation is gone: %v", err)
	}
	must(t, os.WriteFile(path, nil, 0o600))
	must(t, ReleaseTorn(context.Background(), dir, log))
	if _, err := os.Stat(path); err == nil {
		t.Error("an empty reservation is still there")
	}
}
