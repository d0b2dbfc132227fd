package cni

import (
	"context"
	"os"
	"path/filepath"
	"testing"
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
