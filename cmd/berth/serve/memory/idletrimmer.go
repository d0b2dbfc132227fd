// Package tidier has what changes needed given back when nothing was being changed for a while.
package memory

import (
	"log/slog"
	"sync"
	"time"
)

// IdleTrimmer gives memory back after starting, and after changes. While nothing is changed no timer runs.
type IdleTrimmer struct {
	changes chan struct{} // one waits: that a change has begun or ended, not how many
	stop    chan struct{}
	stopped chan struct{}

	mu       sync.Mutex // guards what follows
	underWay map[*change]struct{}
}

// change is one that is under way.
type change struct{ began time.Time }

// waits is how long after it has begun a change counts no more: what takes longer mostly waits, for a grace period, which can be an
// hour, or a registry.
const waits = 30 * time.Second

// NewIdleTrimmer starts a IdleTrimmer that calls release when for rest no change has begun or ended, and none is under way but what has been so for half a
// minute. Its own start is the first change. Close ends it.
func NewIdleTrimmer(rest time.Duration, release func() error, log *slog.Logger) *IdleTrimmer {
	t := &IdleTrimmer{changes: make(chan struct{}, 1), stop: make(chan struct{}), stopped: make(chan struct{}), underWay: map[*change]struct{}{}}
	go t.run(rest, release, log)
	return t
}

// Changing notes that something is being changed, until changed is called. Neither waits for memory that is given back.
func (t *IdleTrimmer) Changing() (changed func()) {
	c := &change{time.Now()}
	t.mu.Lock()
	t.underWay[c] = struct{}{}
	t.mu.Unlock()
	t.restAnew()
	return func() {
		t.mu.Lock()
		delete(t.underWay, c)
		t.mu.Unlock()
		t.restAnew()
	}
}

func (t *IdleTrimmer) restAnew() {
	select {
	case t.changes <- struct{}{}:
	default: // one waits already
	}
}

// busy returns for how long changes that are under way still count.
func (t *IdleTrimmer) busy() (rest time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for c := range t.underWay {
		rest = max(rest, waits-time.Since(c.began))
	}
	return rest
}

// Close waits until nothing is given back any more.
func (t *IdleTrimmer) Close() error {
	close(t.stop)
	<-t.stopped
	return nil
}

func (t *IdleTrimmer) run(rest time.Duration, release func() error, log *slog.Logger) {
	defer close(t.stopped)
	resting := time.After(rest) // nil: all is given back
	for {
		select {
		case <-t.stop:
			return
		case <-t.changes:
			resting = time.After(rest)
		case <-resting:
			if busy := t.busy(); busy > 0 {
				resting = time.After(busy)
				continue
			}
			resting = nil
			if err := release(); err != nil {
				log.Warn("memory that changes needed is kept", "error", err)
			}
		}
	}
}
