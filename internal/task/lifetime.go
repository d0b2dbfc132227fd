package task

import (
	"context"
	"sync"
	"time"
)

// Lifetime is a group of goroutines that share a context and end with it. The lock also
// guards the counter of group.
type Lifetime struct {
	ctx    context.Context
	cancel context.CancelFunc
	group  sync.WaitGroup
	mu     sync.Mutex
	// +checklocks:mu
	closed bool
}

// NewLifetime returns a lifetime without goroutines.
func NewLifetime() *Lifetime {
	l := &Lifetime{}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	return l
}

// Context returns the context of the goroutines, which ends with Cancel.
func (l *Lifetime) Context() context.Context { return l.ctx }

// Cancel cancels the context of all goroutines.
func (l *Lifetime) Cancel() { l.cancel() }

// Spawn starts a goroutine. It returns false, and starts nothing, after Close.
func (l *Lifetime) Spawn(f func()) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	l.group.Go(f)
	return true
}

// Enter counts a goroutine of another owner, such as a server's handler, in the group until leave.
// It returns false after Close.
func (l *Lifetime) Enter() (leave func(), ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, false
	}
	l.group.Add(1)
	return l.group.Done, true
}

// Close makes Spawn start no further goroutines.
func (l *Lifetime) Close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
}

// Wait returns nil when all goroutines have ended, or ctx's error.
func (l *Lifetime) Wait(ctx context.Context) error {
	done := make(chan struct{})
	go func() { l.group.Wait(); close(done) }() // ends with the goroutines that it waits for
	select {
	case <-done:
		return nil
	case <-ctx.Done():
	}
	select {
	case <-done: // both happened: report that the goroutines have ended
		return nil
	default:
		return ctx.Err()
	}
}

// WaitFor is Wait with a timeout.
func (l *Lifetime) WaitFor(timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return l.Wait(ctx)
}
