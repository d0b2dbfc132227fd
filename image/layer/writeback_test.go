package layer

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"
)

// Callers that ask during a sync share the next one, because the current one may not include their
// data.
func TestSyncerSharesSync(t *testing.T) {
	const many = 50
	var syncs atomic.Int64
	began, goOn := make(chan struct{}), make(chan struct{})
	s := &syncer{running: make(chan struct{}, 1), sync: func() error {
		if syncs.Add(1) == 1 {
			close(began)
			<-goOn
		}
		return nil
	}}
	var all sync.WaitGroup
	all.Go(func() {
		if err := s.Wait(s.Begin()); err != nil {
			t.Error(err)
		}
	})
	<-began
	var entered sync.WaitGroup
	entered.Add(many)
	for range many {
		all.Go(func() {
			since := s.Begin()
			r, leads := s.enter()
			entered.Done()
			if err := s.waitFor(r, leads, since); err != nil {
				t.Error(err)
			}
			if syncs.Load() < 2 {
				t.Error("it was content with a sync that began before")
			}
		})
	}
	entered.Wait()
	close(goOn)
	all.Wait()
	if n := syncs.Load(); n != 2 {
		t.Errorf("%d syncs for %d", n, many+1)
	}
}

// A failed sync fails all callers whose data it may have lost, and no later ones.
func TestSyncFailureReachesAffectedWaiters(t *testing.T) {
	full := errors.New("input/output error")
	fails := true
	s := &syncer{running: make(chan struct{}, 1), sync: func() error {
		if fails {
			return full
		}
		return nil
	}}
	writing, waits := s.Begin(), s.Begin()
	if err := s.Wait(waits); !errors.Is(err, full) {
		t.Errorf("the first: %v", err)
	}
	fails = false
	if err := s.Wait(writing); !errors.Is(err, errNotWritten) {
		t.Errorf("who had begun to write: %v", err)
	}
	if err := s.Wait(s.Begin()); err != nil {
		t.Errorf("who comes later: %v", err)
	}
}
