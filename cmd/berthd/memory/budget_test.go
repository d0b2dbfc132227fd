package memory

import (
	"fmt"
	"testing"

	"berth/image/unpack"
	"berth/image/unpack/worker"
)

func TestRangeRequestsStayWithinTheirShare(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		limit  int
		budget Budget
		want   int
	}{{16, 0, 16}, {0, 0, 0}, {0, 1 << 30, 0}, {16, 16 << 20, 0}, {16, 64 << 20, 2}, {16, 512 << 20, 16}, {4, 1 << 40, 4}, {1000, 1 << 30, 32}} {
		t.Run(fmt.Sprintf("%d of %d MiB", c.limit, c.budget>>20), func(t *testing.T) {
			if got := c.budget.RangeRequests(c.limit); got != c.want {
				t.Errorf("got %d, want %d", got, c.want)
			}
		})
	}
}

func TestBudgetIsShareOfNodeOrCgroupLimit(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ limit, node, want int64 }{ // MiB
		{0, 1 << 10, 256}, {0, 4 << 10, 1 << 10}, {0, 64 << 10, 2 << 10}, {512, 64 << 10, 512}, {8 << 10, 64 << 10, 2 << 10}, {8 << 10, 4 << 10, 1 << 10},
	} {
		t.Run(fmt.Sprintf("limit %d of %d MiB", c.limit, c.node), func(t *testing.T) {
			if got := budgetFor(c.limit<<20, c.node<<20); got != Budget(c.want<<20) {
				t.Errorf("got %d MiB, want %d", got>>20, c.want)
			}
		})
	}
}

func TestMergeAndWorkMemoryStayWithinTheirShares(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ budget, merge, work int64 }{{0, 0, 0}, {96, 12, 16}, {384, 48, 64}, {768, 64, 128}, {6144, 64, 1024}} {
		t.Run(fmt.Sprintf("%d MiB", c.budget), func(t *testing.T) {
			b := Budget(c.budget << 20)
			if merge, work := b.MergeMemory(), b.WorkMemory(); merge != c.merge<<20 || work != c.work<<20 {
				t.Errorf("got %d and %d bytes, want %d and %d MiB", merge, work, c.merge, c.work)
			}
		})
	}
}

// A berth-unpack that the OOM killer ends cannot report that its layer is too large. So the heaps
// of all of them must fit into their half of the budget.
func TestHeapsOfUnpackersFitIntoBudget(t *testing.T) {
	t.Parallel()
	for _, mib := range []int64{64, 100, 256, 512, 1000, 1 << 10, 2 << 10} {
		t.Run(fmt.Sprintf("%d MiB", mib), func(t *testing.T) {
			b := Budget(mib << 20)
			n := int64(b.Unpackers())
			share := b.WorkMemory() / n // heaps grow linearly with their shares, so equal shares suffice
			if sum := n * worker.HeapFor(unpack.Job{Limits: unpack.Limits{Memory: share, Window: 8 << 20}}, true); sum > int64(b)/2 {
				t.Errorf("%d processes take %d MiB", n, sum>>20)
			}
		})
	}
}
