package governor

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// node simulates a node: a pull that receives bytes at a rate, and pods that wait for the disk.
type node struct {
	t      *testing.T
	waited time.Duration // of the pods
	recent float64
	limits []int64 // as Changed reported them
	g      *Governor
}

func newNode(t *testing.T, cfg Config) *node {
	n := &node{t: t}
	cfg.Pressure = func() map[string]Pressure { return map[string]Pressure{"io": {Waited: n.waited, Recent: n.recent}} }
	cfg.Changed = func(limit int64) { n.limits = append(n.limits, limit) }
	n.g = New(cfg)
	return n
}

// run lets time pass. The pull offers rate bytes a second, in reads of 64 KiB; share returns the
// share of time that pods wait at the rate that the pull gets.
func (n *node) run(took time.Duration, rate int, share func(got float64) float64) (received int64) {
	n.t.Helper()
	const chunk = 64 << 10
	began := time.Now()
	for time.Since(began) < took {
		step := time.Now()
		time.Sleep(time.Duration(float64(chunk) / float64(rate) * float64(time.Second)))
		before := time.Since(step)
		n.waited += time.Duration(share(chunk/before.Seconds()) * float64(before))
		if _, err := n.g.Wait(n.t.Context(), chunk); err != nil {
			n.t.Fatal(err)
		}
		slept := time.Since(step) - before
		n.waited += time.Duration(share(chunk/time.Since(step).Seconds()) * float64(slept))
		received += chunk
	}
	return received
}

func always(share float64) func(float64) float64 { return func(float64) float64 { return share } }

func TestBandwidth(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, Config{Bandwidth: 4 << 20})
		defer n.g.Begin()()
		if got := n.run(20*time.Second, 100<<20, always(0)); got < 78<<20 || got > 82<<20 {
			t.Errorf("%d MiB in 20 s at 4 MiB a second", got>>20)
		}
	})
}

func TestBandwidthIsNotBelowSlowest(t *testing.T) {
	t.Parallel()
	if got := New(Config{Bandwidth: 1}).Limit(); got != Slowest {
		t.Errorf("limit %d", got)
	}
	if got := New(Config{}).Limit(); got != 0 {
		t.Errorf("limit %d without a bandwidth", got)
	}
}

func TestPullsThatHurtPodsSlowDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, Config{Rise: 0.2})
		defer n.g.Begin()()
		// Pods wait half of the time while pulls receive more than 10 MiB a second.
		hurts := func(got float64) float64 {
			if got > 10<<20 {
				return 0.5
			}
			return 0.05
		}
		n.run(3*time.Second, 100<<20, hurts)
		if n.g.Limit() == 0 {
			t.Fatal("no limit after three seconds of pressure")
		}
		before := n.waited
		received := n.run(60*time.Second, 100<<20, hurts)
		if share := (n.waited - before).Seconds() / 60; share > 0.3 {
			t.Errorf("pods wait %.0f %% of the time", 100*share)
		}
		if rate := received / 60; rate < 2<<20 {
			t.Errorf("the pull receives %d KiB a second only", rate>>10)
		}
	})
}

func TestPressureOfPodsThemselves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, Config{Rise: 0.2})
		defer n.g.Begin()()
		n.run(90*time.Second, 20<<20, always(0.8)) // whatever the pull does
		if limit := n.g.Limit(); limit != 0 {
			t.Errorf("still limited to %d bytes a second", limit)
		}
		if len(n.limits) < 3 {
			t.Errorf("limits %v: pulls were never slowed down", n.limits)
		}
	})
}

func TestUsualPressureDoesNotCount(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, Config{Rise: 0.2})
		n.recent = 0.6
		time.Sleep(settleTime)
		defer n.g.Begin()()
		n.run(20*time.Second, 20<<20, always(0.6))
		if len(n.limits) > 0 {
			t.Errorf("limits %v", n.limits)
		}
	})
}

func TestLimitEndsWithThePulls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, Config{Rise: 0.1})
		first, second := n.g.Begin(), n.g.Begin()
		n.run(5*time.Second, 50<<20, always(0.9))
		first()
		if n.g.Limit() == 0 {
			t.Error("the limit ended with one of two pulls")
		}
		second()
		if n.g.Limit() != 0 {
			t.Error("the limit outlives the pulls")
		}
		if last := n.limits[len(n.limits)-1]; last != 0 {
			t.Errorf("limits %v: the end was not reported", n.limits)
		}
	})
}

func TestRiseOfZeroIgnoresPressure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, Config{})
		defer n.g.Begin()()
		n.run(20*time.Second, 20<<20, always(1))
		if len(n.limits) > 0 {
			t.Errorf("limits %v", n.limits)
		}
	})
}

func TestWaitEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := New(Config{Bandwidth: Slowest})
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, errCancelled)
		defer cancel()
		began := time.Now()
		if _, err := g.Wait(ctx, 10*Slowest); !errors.Is(err, errCancelled) || time.Since(began) > 2*time.Second {
			t.Errorf("%v after %v", err, time.Since(began))
		}
	})
}

var errCancelled = errors.New("cancelled")

func TestShareOfNewCgroup(t *testing.T) {
	t.Parallel()
	from := map[string]Pressure{"a": {Waited: time.Minute}, "b": {Waited: time.Second}}
	to := map[string]Pressure{"a": {Waited: time.Second}, "b": {Waited: 3 * time.Second}, "c": {Waited: time.Hour}}
	if got := waitedShare(from, to, 10); got != 0.2 {
		t.Errorf("share %v, want that of b", got)
	}
}
