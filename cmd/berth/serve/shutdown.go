package serve

import (
	"context"
	"fmt"
	"sync"
	"time"
)

const (
	// stopLimit is what the daemon takes to end at most, from the signal on. systemd kills it after TimeoutStopSec.
	stopLimit = 35 * time.Second
	// lateLimit is what a step of the end has that comes when that time is over, or heeds it and needs a moment.
	lateLimit = time.Second
)

// ending is the time that the daemon has to end: one for all its parts, each of which would be granted more than systemd
// grants to all. It begins with the first call of deadline.
type ending struct{ deadline func() time.Time }

func newEnding(limit time.Duration) ending {
	return ending{sync.OnceValue(func() time.Time { return time.Now().Add(limit) })}
}

// within bounds a step of the end. One that does not end when its context does is left behind: the process is about to end.
func (e ending) within(step func(context.Context) error) func() error {
	return func() error {
		ctx, cancel := context.WithDeadline(context.Background(), e.deadline())
		defer cancel()
		done := make(chan error, 1)
		go func() { done <- step(ctx) }()
		late := time.NewTimer(max(time.Until(e.deadline()), 0) + lateLimit)
		defer late.Stop()
		select {
		case err := <-done:
			return err
		case <-late.C:
			return fmt.Errorf("it does not end, and is left behind: %w", context.DeadlineExceeded)
		}
	}
}

// closer is within for what takes no context.
func (e ending) closer(step func() error) func() error {
	return e.within(func(context.Context) error { return step() })
}
