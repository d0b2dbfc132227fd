package task

import (
	"context"
	"fmt"

	"berth/internal/trace"
)

// Lock is held by the only writer of an object. Unlike a mutex, a caller can wait for it with a
// deadline, and Waits lists the waiting callers.
type Lock chan struct{}

// NewLock returns a free lock.
func NewLock() Lock { return make(chan struct{}, 1) }

// Acquire waits for the object's lock and returns the function that releases it.
func (r *Runner) Acquire(ctx context.Context, l Lock, what, object string) (release func(), err error) {
	release = func() { <-l }
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("%s %s: %w", what, object, err)
	}
	select {
	case l <- struct{}{}:
		return release, nil
	default:
	}
	defer trace.Begin(ctx, "lock").End()
	defer r.BeginUpTo(Timeout, "lock to "+what, object)()
	select {
	case l <- struct{}{}:
		return release, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("%s %s: wait for another operation on it: %w", what, object, ctx.Err())
	}
}
