package task

import (
	"context"
	"fmt"
	"time"

	"berth/internal/trace"
)

// Lock is held by the only writer of an object. Unlike a mutex it can be awaited with a deadline,
// and Waits shows who waits.
type Lock chan struct{}

// NewLock returns a lock that is free.
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
	defer r.BeginUpTo(Limit, "lock to "+what, object)()
	select {
	case l <- struct{}{}:
		return release, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("%s %s: wait for another operation on it: %w", what, object, ctx.Err())
	}
}

// Old names, until their callers change.
type Turn = Lock

// NewTurn is NewLock.
func NewTurn() Lock { return NewLock() }

// Take is Acquire.
func (r *Runner) Take(ctx context.Context, l Lock, what, object string) (release func(), err error) {
	return r.Acquire(ctx, l, what, object)
}

// WithTurn is WithLock.
func (r *Runner) WithTurn(ctx context.Context, l Lock, what, object string, op func() error) error {
	return r.WithLock(ctx, l, what, object, op)
}

// Aside is DetachStep.
func (r *Runner) Aside(ctx context.Context, limit time.Duration, what, object string, op func() error) error {
	return r.DetachStep(ctx, limit, what, object, op)
}

// Together is Parallel.
func (r *Runner) Together(what, object string, steps ...func() error) error {
	return r.Parallel(what, object, steps...)
}

// InBackground is RetryInBackground.
func (r *Runner) InBackground(what, object string, do func(context.Context) error) {
	r.RetryInBackground(what, object, do)
}
