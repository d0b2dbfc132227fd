package main

import (
	"testing"

	"berth/image/unpack"
	"berth/image/unpack/worker"
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

// So do trees of layers, in the daemon, there never more than without a limit, and in all the processes that pack them.
func TestTreeMemoryFor(t *testing.T) {
	for _, c := range []struct{ limit, merge, trees int64 }{{0, 0, 0}, {64, 8, 16}, {256, 32, 64}, {512, 64, 128}, {4096, 64, 1024}} {
		if merge, trees := mergeMemoryFor(c.limit<<20), treeMemoryFor(c.limit<<20); merge != c.merge<<20 || trees != c.trees<<20 {
			t.Errorf("with %d MiB: %d and %d bytes, not %d and %d MiB", c.limit, merge, trees, c.merge, c.trees)
		}
	}
}

// However many layers are packed at a time, and whatever shares of the memory for trees they have, their heaps take what the daemon leaves to
// others, and no more: a process that the OOM killer ends cannot say that its layer is too much.
func TestPackersKeepToTheLimit(t *testing.T) {
	for _, mib := range []int64{64, 100, 256, 512, 1000, 1 << 10, 4 << 10, 64 << 10} {
		limit := mib << 20
		n := int64(unpackersFor(limit))
		share := treeMemoryFor(limit) / n // a heap grows with its share: it does not matter whose part is larger
		if sum := n * worker.HeapFor(unpack.Job{Limits: unpack.Limits{Memory: share}}, true); sum > limit/2 {
			t.Errorf("with %d MiB %d processes take %d MiB", mib, n, sum>>20)
		}
	}
}
