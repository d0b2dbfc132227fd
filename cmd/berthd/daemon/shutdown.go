package daemon

import (
	"context"
	"fmt"
	"sync"
	"time"
)

const (
	// stopTimeout bounds the shutdown after the signal. systemd kills the daemon after
	// TimeoutStopSec.
	stopTimeout = 35 * time.Second
	// lateTimeout is how much longer a step may run past that timeout, to start or to react to the
	// end of its context.
	lateTimeout = time.Second
)

// shutdown is the time limit of the shutdown. All parts share one limit, because separate limits
// together would exceed systemd's. It starts with the first call of deadline.
type shutdown struct{ deadline func() time.Time }

func newShutdown(timeout time.Duration) shutdown {
	return shutdown{sync.OnceValue(func() time.Time { return time.Now().Add(timeout) })}
}

// within bounds a step of the shutdown. It does not wait longer for a step that ignores its
// context, because the process is about to exit.
func (s shutdown) within(step func(context.Context) error) func() error {
	return func() error {
		ctx, cancel := context.WithDeadline(context.Background(), s.deadline())
		defer cancel()
		done := make(chan error, 1)
		go func() { done <- step(ctx) }()
		late := time.NewTimer(max(time.Until(s.deadline()), 0) + lateTimeout)
		defer late.Stop()
		select {
		case err := <-done:
			return err
		case <-late.C:
			return fmt.Errorf("not finished, left behind: %w", context.DeadlineExceeded)
		}
	}
}

// closer does the same as within, for a step without a context.
func (s shutdown) closer(step func() error) func() error {
	return s.within(func(context.Context) error { return step() })
}
