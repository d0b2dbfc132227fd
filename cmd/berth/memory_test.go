package main

import (
	"testing"

	"berth/internal/pages"
)

// The program runs on when its pages were given back.
func TestRunsWithoutItsPages(t *testing.T) {
	if err := pages.ReleaseStartup(); err != nil {
		t.Fatal(err)
	}
	if _, err := run("config", "default"); err != nil {
		t.Error(err)
	}
}

// What is fetched ahead takes no more than its share of a memory limit.
func TestRangeRequestsFor(t *testing.T) {
	for _, c := range []struct {
		most  int
		limit int64
		want  int
	}{{16, 0, 16}, {0, 0, 0}, {0, 1 << 30, 0}, {16, 16 << 20, 0}, {16, 64 << 20, 2}, {16, 512 << 20, 16}, {4, 1 << 40, 4}, {1000, 1 << 30, 32}} {
		if got := rangeRequestsFor(c.most, c.limit); got != c.want {
			t.Errorf("%d with %d MiB: %d, not %d", c.most, c.limit>>20, got, c.want)
		}
	}
}

// So do trees of layers, in the daemon and in the processes that pack them, and none of them more than without a limit.
func TestTreeMemoryFor(t *testing.T) {
	for _, c := range []struct{ limit, merge, pack int64 }{{0, 0, 0}, {64, 8, 16}, {256, 32, 64}, {512, 64, 128}, {4096, 64, 384}} {
		if merge, pack := mergeMemoryFor(c.limit<<20), packMemoryFor(c.limit<<20); merge != c.merge<<20 || pack != c.pack<<20 {
			t.Errorf("with %d MiB: %d and %d bytes, not %d and %d MiB", c.limit, merge, pack, c.merge, c.pack)
		}
	}
}
