package peers

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

// by is a node with a certificate of its own.
func by(address string) identity { return identity{address, "certificate of " + address} }

func TestTracker(t *testing.T) {
	t.Parallel()
	k := testKey("layer")
	now := time.Now()
	clock := func() time.Time { return now }
	fetch := found{Fetch: true}
	for name, run := range map[string]func(t *testing.T, tr *tracker, want func(got, want found)){
		"the first fetches, others wait": func(_ *testing.T, tr *tracker, want func(got, want found)) {
			want(tr.find(k, by("a"), nil), fetch)
			want(tr.find(k, by("b"), nil), found{Fetching: "a"})
			want(tr.find(k, by("a"), nil), fetch) // it asks again, after a restart
		},
		"holders": func(_ *testing.T, tr *tracker, want func(got, want found)) {
			want(tr.find(k, by("a"), nil), fetch)
			tr.hold(k, by("a"))
			want(tr.find(k, by("b"), nil), found{Holders: []string{"a"}})
			want(tr.find(testKey("other"), by("b"), nil), fetch)
		},
		"a holder does not get its own address": func(_ *testing.T, tr *tracker, want func(got, want found)) {
			tr.hold(k, by("a"))
			want(tr.find(k, by("a"), nil), fetch)
		},
		"a failed fetch frees the lease": func(_ *testing.T, tr *tracker, want func(got, want found)) {
			want(tr.find(k, by("a"), nil), fetch)
			tr.release(k, by("b")) // not its lease
			want(tr.find(k, by("b"), nil), found{Fetching: "a"})
			tr.release(k, by("a"))
			want(tr.find(k, by("b"), nil), fetch)
		},
		"a lease belongs to a certificate": func(_ *testing.T, tr *tracker, want func(got, want found)) {
			other := identity{"a", "certificate of b"} // it names the address of another node
			want(tr.find(k, by("a"), nil), fetch)
			want(tr.find(k, other, nil), found{Fetching: "a"})
			tr.note(announcement{From: "a", Keys: []Key{k}, Failed: true}, other.certificate)
			want(tr.find(k, by("c"), nil), found{Fetching: "a"})
			tr.note(announcement{From: "a", Keys: []Key{k}, Failed: true}, by("a").certificate)
			want(tr.find(k, by("c"), nil), fetch)
		},
		"nodes with one certificate": func(_ *testing.T, tr *tracker, want func(got, want found)) {
			want(tr.find(k, identity{"a", "shared"}, nil), fetch)
			want(tr.find(k, identity{"b", "shared"}, nil), found{Fetching: "a"})
		},
		"a lost fetcher is reported": func(_ *testing.T, tr *tracker, want func(got, want found)) {
			want(tr.find(k, by("a"), nil), fetch)
			want(tr.find(k, by("b"), []string{"a"}), fetch)
			want(tr.find(k, by("c"), []string{"a"}), found{Fetching: "b"})
		},
		"a lost holder is reported": func(_ *testing.T, tr *tracker, want func(got, want found)) {
			tr.hold(k, by("a"))
			want(tr.find(k, by("b"), []string{"a"}), fetch)
		},
		"leases end": func(_ *testing.T, tr *tracker, want func(got, want found)) {
			want(tr.find(k, by("a"), nil), fetch)
			tr.now = func() time.Time { return now.Add(leaseTime) }
			want(tr.find(k, by("b"), nil), fetch)
		},
		"holders are forgotten": func(_ *testing.T, tr *tracker, want func(got, want found)) {
			tr.hold(k, by("a"))
			tr.now = func() time.Time { return now.Add(holderTime + 1) }
			want(tr.find(k, by("b"), nil), fetch)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run(t, newTracker(clock), func(got, want found) {
				t.Helper()
				if !slices.Equal(got.Holders, want.Holders) || got.Fetching != want.Fetching || got.Fetch != want.Fetch {
					t.Errorf("got %+v, want %+v", got, want)
				}
			})
		})
	}
}

func TestTrackerForgets(t *testing.T) {
	t.Parallel()
	now := time.Now()
	k := testKey("layer")
	for name, c := range map[string]struct {
		run  func(tr *tracker)
		left int // layers that are known afterwards
	}{
		"a failed fetch": {func(tr *tracker) { tr.find(k, by("a"), nil); tr.release(k, by("a")) }, 0},
		"a failed fetch beside a holder": {func(tr *tracker) {
			tr.find(k, by("a"), nil)
			tr.hold(k, by("b"))
			tr.release(k, by("a"))
		}, 1},
		"nothing that is current": {func(tr *tracker) {
			tr.find(k, by("a"), nil)
			tr.hold(testKey("other"), by("b"))
			tr.sweep()
		}, 2},
		"an old lease": {func(tr *tracker) {
			tr.find(k, by("a"), nil)
			now = now.Add(leaseTime)
			tr.sweep()
		}, 0},
		"old holders": {func(tr *tracker) {
			tr.hold(k, by("a"))
			now = now.Add(holderTime + 1)
			tr.sweep()
		}, 0},
		"old holders beside a new one": {func(tr *tracker) {
			tr.hold(k, by("a"))
			now = now.Add(holderTime + 1)
			tr.hold(k, by("b"))
			tr.sweep()
		}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			tr := newTracker(func() time.Time { return now })
			c.run(tr)
			if n := len(tr.layers); n != c.left {
				t.Errorf("%d layers are known, want %d", n, c.left)
			}
		})
	}
}

// A new holder replaces another one, because the first ones have the most receivers.
func TestNewHoldersAreRemembered(t *testing.T) {
	t.Parallel()
	tr := newTracker(time.Now)
	k := testKey("layer")
	for i := range 3 * maxHolders {
		tr.hold(k, by(fmt.Sprint(i)))
		if _, ok := tr.layers[k].holders[fmt.Sprint(i)]; !ok {
			t.Errorf("holder %d is not remembered", i)
		}
	}
}

func TestTrackerIsBounded(t *testing.T) {
	t.Parallel()
	tr := newTracker(time.Now)
	k := testKey("layer")
	for i := range 3 * maxHolders {
		tr.hold(k, by(fmt.Sprint(i)))
	}
	if n := len(tr.layers[k].holders); n != maxHolders {
		t.Errorf("%d holders of a layer", n)
	}
	if n := len(tr.find(k, by("a"), nil).Holders); n != maxOffered {
		t.Errorf("%d holders in an answer", n)
	}
	for i := range maxTracked + 10 {
		tr.hold(Key{Registry: fmt.Sprint(i)}, by("a"))
	}
	if n := len(tr.layers); n != maxTracked {
		t.Errorf("%d layers", n)
	}
}
