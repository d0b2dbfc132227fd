package budget

import (
	"context"
	"errors"
	"slices"
	"testing"

	"berth/image/unpack"
	"berth/internal/testutil"
)

const mib = 1 << 20

// All layers together take no more than the budget, however many there are. The last one gets the
// reserved share. All memory is given back.
func TestWorkMemoryShares(t *testing.T) {
	for _, c := range []struct {
		name                string
		all, merging, limit int64 // MiB
		processes           int
		want                []int64 // MiB
	}{
		{"no limit", 0, 0, 384, 2, []int64{384, 384}},
		{"one", 16, 8, 384, 1, []int64{9}},
		{"little", 4, 2, 384, 2, []int64{2, 1}},
		{"half of what is free", 64, 32, 384, 4, []int64{30, 16, 9, 5}},
		{"no more than is of use", 256, 32, 384, 16, []int64{40, 40, 40, 40, 38}},
		{"a node of 8 GiB", 341, 64, 384, 32, []int64{80, 80, 62, 32, 17}},
		{"small layers", 1024, 64, 4, 64, []int64{4, 4, 4}},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := newMemory(c.all*mib, c.merging*mib, c.processes)
			for range 2 { // the released memory is available again
				var got []int64
				var back []func()
				sum := int64(0)
				for range c.processes {
					limits, release := m.share(unpack.Limits{Memory: c.limit * mib})
					got, back, sum = append(got, limits.Memory/mib), append(back, release), sum+limits.Memory
					if m != nil && limits.Memory < min(c.limit*mib, m.least) {
						t.Errorf("one gets %d", limits.Memory)
					}
				}
				if c.all > 0 && sum > c.all*mib {
					t.Errorf("together they get %d", sum)
				}
				if n := min(len(got), len(c.want)); !slices.Equal(got[:n], c.want[:n]) {
					t.Errorf("%d MiB each, want %d", got, c.want)
				}
				for _, release := range back {
					release()
				}
			}
		})
	}
}

// A layer that needs more than its share gets the maximum when that is free. Small layers do not
// wait for it.
func TestLayerWaitsForWorkMemory(t *testing.T) {
	m := newMemory(341*mib, 64*mib, 32)
	usual := unpack.DefaultLimits
	var more Shortage
	grow := func(had unpack.Limits, err error) (grows bool) {
		more, grows = (&Budget{memory: m}).Grow(more, had, err)
		return grows
	}
	for _, code := range []unpack.Code{unpack.MoreWindow, unpack.MoreMemory} {
		if !grow(unpack.Limits{Memory: 30 * mib}, &unpack.Error{Code: code, Err: errors.New("too little")}) {
			t.Fatalf("code %d: no more", code)
		}
		if grow(unpack.Limits{Memory: 80 * mib}, &unpack.Error{Code: code, Err: errors.New("too little")}) {
			t.Errorf("code %d: more and more", code)
		}
	}
	first, giveFirst := m.share(usual)
	type answer struct {
		limits  unpack.Limits
		release func()
		err     error
	}
	large := make(chan answer)
	for range 2 {
		go func() {
			limits, release, err := m.wait(t.Context(), usual, more)
			large <- answer{limits, release, err}
		}()
	}
	one := <-large
	if one.err != nil || one.limits.Memory != 80*mib || one.limits.Window != 128*mib {
		t.Fatalf("%d MiB, a window of %d MiB, %v", one.limits.Memory/mib, one.limits.Window/mib, one.err)
	}
	testutil.Eventually(t, "the other waits", func() bool { m.mu.Lock(); defer m.mu.Unlock(); return m.waiting })
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := m.wait(ctx, usual, more); !errors.Is(err, context.Canceled) {
		t.Errorf("who gives up: %v", err)
	}
	for range 30 {
		small, release := m.share(usual)
		if small.Memory != m.least || small.Window != usualWindow {
			t.Errorf("beside one that waits: %d bytes, a window of %d", small.Memory, small.Window)
		}
		defer release()
	}
	giveFirst()
	one.release()
	two := <-large
	if two.err != nil || two.limits != one.limits {
		t.Errorf("the second gets %+v, %v; the first %+v", two.limits, two.err, first)
	}
	two.release()
	if m.free != m.rest || m.waiting {
		t.Errorf("%d of %d bytes are free, waiting: %t", m.free, m.rest, m.waiting)
	}
}
