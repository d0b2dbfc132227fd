package main

import (
	"testing"

	"berth/cmd/berth/serve/memory"
	"berth/image/unpack"
	"berth/image/unpack/worker"
)

// The program runs on when its pages were given back.
func TestRunsWithoutItsPages(t *testing.T) {
	if err := memory.Release(); err != nil {
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

// What pulls make berth take is a part of the node's memory, and less where its cgroup has a lower
// limit.
func TestBudgetFor(t *testing.T) {
	for _, c := range []struct{ limit, node, want int64 }{ // MiB
		{0, 1 << 10, 256}, {0, 4 << 10, 1 << 10}, {0, 64 << 10, 2 << 10}, {512, 64 << 10, 512}, {8 << 10, 64 << 10, 2 << 10}, {8 << 10, 4 << 10, 1 << 10},
	} {
		if got := budgetFor(c.limit<<20, c.node<<20); got != c.want<<20 {
			t.Errorf("of %d MiB, limited to %d: %d MiB, not %d", c.node, c.limit, got>>20, c.want)
		}
	}
}

// Trees of layers take no more than their share, in the daemon that merges them, and in the
// processes that pack them.
func TestWorkMemoryFor(t *testing.T) {
	for _, c := range []struct{ budget, merge, work int64 }{{0, 0, 0}, {96, 12, 16}, {384, 48, 64}, {768, 64, 128}, {6144, 64, 1024}} {
		if merge, work := mergeMemoryFor(c.budget<<20), workMemoryFor(c.budget<<20); merge != c.merge<<20 || work != c.work<<20 {
			t.Errorf("with %d MiB: %d and %d bytes, not %d and %d MiB", c.budget, merge, work, c.merge, c.work)
		}
	}
}

// However many layers are unpacked at a time, and whatever shares of the memory they have, their
// heaps take what the daemon leaves to others, and no more: a process that the OOM killer ends
// cannot say that its layer is too much.
func TestUnpackersKeepToTheBudget(t *testing.T) {
	for _, mib := range []int64{64, 100, 256, 512, 1000, 1 << 10, 2 << 10} {
		budget := mib << 20
		n := int64(unpackersFor(budget))
		share := workMemoryFor(budget) / n // a heap grows with its share: it does not matter whose part is larger
		if sum := n * worker.HeapFor(unpack.Job{Limits: unpack.Limits{Memory: share, Window: 8 << 20}}, true); sum > budget/2 {
			t.Errorf("with %d MiB %d processes take %d MiB", mib, n, sum>>20)
		}
	}
}
