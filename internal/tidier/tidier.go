// Package tidier has what changes needed given back when nothing was being changed for a while.
package tidier

import (
	"log/slog"
	"sync/atomic"
	"time"
)

// Tidier gives memory back after starting, and after changes. While nothing is changed no timer runs.
type Tidier struct {
	underWay atomic.Int64  // changes
	changes  chan struct{} // one waits: that a change has ended, not how many
	stop     chan struct{}
	stopped  chan struct{}
}

// New starts a Tidier that calls release when nothing was being changed for rest; its own start is the first change. Close ends it.
func New(rest time.Duration, release func() error, log *slog.Logger) *Tidier {
	t := &Tidier{changes: make(chan struct{}, 1), stop: make(chan struct{}), stopped: make(chan struct{})}
	go t.run(rest, release, log)
	return t
}

// Changing notes that something is being changed, until changed is called. Neither blocks.
func (t *Tidier) Changing() (changed func()) {
	t.underWay.Add(1)
	return func() {
		t.underWay.Add(-1)
		select {
		case t.changes <- struct{}{}:
		default: // one waits already
		}
	}
}

// Close waits until nothing is given back any more.
func (t *Tidier) Close() error {
	close(t.stop)
	<-t.stopped
	return nil
}

func (t *Tidier) run(rest time.Duration, release func() error, log *slog.Logger) {
	defer close(t.stopped)
	resting := time.After(rest) // nil: all is given back
	for {
		select {
		case <-t.stop:
			return
		case <-t.changes:
			resting = time.After(rest)
		case <-resting:
			resting = nil
			if t.underWay.Load() > 0 {
				continue // its end comes
			}
			if err := release(); err != nil {
				log.Warn("memory that changes needed is kept", "error", err)
			}
		}
	}
}
