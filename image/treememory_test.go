package image

import (
	"slices"
	"testing"
)

// However many trees there are, they take no more than there is together, the last as much as the first has kept for it; all comes back.
func TestTreeMemory(t *testing.T) {
	const mib = 1 << 20
	for _, c := range []struct {
		all, merging, limit int64 // MiB
		trees               int
		want                []int64 // MiB
	}{
		{0, 0, 384, 2, []int64{384, 384}},
		{16, 8, 384, 1, []int64{10}},
		{4, 2, 384, 2, []int64{2, 2}},
		{64, 32, 384, 4, []int64{24, 16, 12, 10}},
		{256, 0, 384, 16, []int64{72, 40, 24, 16, 12, 10, 9}},
		{256, 32, 384, 16, []int64{40, 40, 40, 24, 16, 12, 10, 9}},
		{1024, 64, 384, 64, []int64{80, 80, 80, 80, 80, 80, 48, 28}},
		{1024, 64, 4, 64, []int64{4, 4, 4}},
	} {
		m := newTreeMemory(c.all*mib, c.merging*mib, c.trees)
		for range 2 { // what was given back is there again
			var got []int64
			var back []func()
			sum := int64(0)
			for range c.trees {
				bytes, giveBack := m.share(c.limit * mib)
				got, back, sum = append(got, bytes/mib), append(back, giveBack), sum+bytes
				if m != nil && bytes < min(c.limit*mib, m.least) {
					t.Errorf("%d MiB for %d trees: one gets %d", c.all, c.trees, bytes)
				}
			}
			if c.all > 0 && sum > c.all*mib {
				t.Errorf("%d MiB for %d trees: together they get %d", c.all, c.trees, sum)
			}
			if n := min(len(got), len(c.want)); !slices.Equal(got[:n], c.want[:n]) {
				t.Errorf("%d MiB for %d trees: %d MiB each, want %d", c.all, c.trees, got, c.want)
			}
			for _, giveBack := range back {
				giveBack()
			}
		}
	}
}
