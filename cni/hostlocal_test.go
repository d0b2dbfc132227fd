package cni

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// What a power cut leaves of host-local's files: GC gives the address back that names nobody, and no other.
func TestGCReleasesTornReservations(t *testing.T) {
	b := newRealBed(t, "cnitorn0", 96)
	kept, lost := b.pod("kept"), b.pod("lost")
	b.add(kept)
	att := b.add(lost)
	before := b.allocated()
	for _, name := range before {
		path := filepath.Join(b.ipam, "real", name)
		content, err := os.ReadFile(path)
		must(t, err)
		if string(content) == "lost\r\neth0" {
			must(t, os.WriteFile(path, make([]byte, len(name)%2*8), 0o600)) // empty, or zeros
		}
	}
	must(t, b.n.Del(context.Background(), att, lost))
	if got := len(b.allocated()); got != 4 {
		t.Fatalf("DEL found the torn files: %d addresses are left; this test tests nothing", got)
	}
	must(t, b.n.GC(context.Background(), []Pod{kept}))
	after := b.allocated()
	if len(after) != 2 {
		t.Errorf("addresses after GC: %q, before: %q", after, before)
	}
	for _, name := range after {
		content, err := os.ReadFile(filepath.Join(b.ipam, "real", name))
		must(t, err)
		if string(content) != "kept\r\neth0" {
			t.Errorf("%s is kept for %q", name, content)
		}
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
	n := &Network{log: testLog(t)}
	if err := n.releaseTornIn(ctx, dir); err == nil {
		t.Error("the lock was not waited for")
	}
	must(t, os.WriteFile(path, []byte("pod\r\neth0"), 0o600))
	must(t, lock.Close())
	must(t, n.releaseTornIn(context.Background(), dir))
	if _, err := os.Stat(path); err != nil {
		t.Errorf("a reservation is gone: %v", err)
	}
	must(t, os.WriteFile(path, nil, 0o600))
	must(t, n.releaseTornIn(context.Background(), dir))
	if _, err := os.Stat(path); err == nil {
		t.Error("an empty reservation is still there")
	}
}
