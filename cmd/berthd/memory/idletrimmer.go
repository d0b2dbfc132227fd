package memory

import (
	"log/slog"
	"sync"
	"time"
)

// IdleTrimmer releases memory after the daemon's start and after changes, once nothing has changed
// for a while. No timer runs while nothing changes.
type IdleTrimmer struct {
	changed chan struct{} // capacity 1: a change has begun or ended since run's last check
	stop    chan struct{}
	stopped chan struct{}

	mu sync.Mutex
	// +checklocks:mu
	active map[*change]struct{}
}

// change is an operation in progress.
type change struct{ began time.Time }

// maxChange is how long a change in progress delays a release. A longer change mostly waits for a
// grace period, which can take an hour, or for a registry.
const maxChange = 30 * time.Second

// NewIdleTrimmer returns a trimmer. It calls release when no change has begun or ended for the
// duration rest, and no change younger than maxChange is in progress. Its start counts as a change.
// Close stops it.
func NewIdleTrimmer(rest time.Duration, release func() error, log *slog.Logger) *IdleTrimmer {
	t := &IdleTrimmer{
		changed: make(chan struct{}, 1),
		stop:    make(chan struct{}),
		stopped: make(chan struct{}),
		active:  map[*change]struct{}{},
	}
	go t.run(rest, release, log)
	return t
}

// Changing records that a change begins; the caller calls done when it has ended. Neither call
// waits for a release in progress.
func (t *IdleTrimmer) Changing() (done func()) {
	c := &change{time.Now()}
	t.mu.Lock()
	t.active[c] = struct{}{}
	t.mu.Unlock()
	t.restart()
	return func() {
		t.mu.Lock()
		delete(t.active, c)
		t.mu.Unlock()
		t.restart()
	}
}

// restart starts the idle time again.
func (t *IdleTrimmer) restart() {
	select {
	case t.changed <- struct{}{}:
	default: // run has not seen the previous change yet
	}
}

// busy returns for how long changes in progress still delay a release.
func (t *IdleTrimmer) busy() (rest time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for c := range t.active {
		rest = max(rest, maxChange-time.Since(c.began))
	}
	return rest
}

// Close stops the trimmer and waits for a release in progress.
func (t *IdleTrimmer) Close() error {
	close(t.stop)
	<-t.stopped
	return nil
}

func (t *IdleTrimmer) run(rest time.Duration, release func() error, log *slog.Logger) {
	defer close(t.stopped)
	resting := time.After(rest) // nil: released, and nothing has changed since
	for {
		select {
		case <-t.stop:
			return
		case <-t.changed:
			resting = time.After(rest)
		case <-resting:
			if busy := t.busy(); busy > 0 {
				resting = time.After(busy)
				continue
			}
			resting = nil
			if err := release(); err != nil {
				log.Warn("release unused memory", "error", err)
			}
		}
	}
}
