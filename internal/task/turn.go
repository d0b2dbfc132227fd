package task

import (
	"context"
	"fmt"

	"berth/internal/trace"
)

// Turn is held by the one writer of an object. It is not a mutex: it is awaited
// with a deadline and shows in Waits.
type Turn chan struct{}

// NewTurn returns a turn that nobody has.
func NewTurn() Turn { return make(chan struct{}, 1) }

// Take waits for the object's turn and returns the function that passes it on.
func (r *Runner) Take(ctx context.Context, t Turn, what, object string) (pass func(), err error) {
	pass = func() { <-t }
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("%s %s: %w", what, object, err)
	}
	select {
	case t <- struct{}{}:
		return pass, nil
	default:
	}
	defer trace.Begin(ctx, "turn").End()
	defer r.BeginUpTo(Limit, "its turn to "+what, object)()
	select {
	case t <- struct{}{}:
		return pass, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("%s %s: waiting for an operation on it to end: %w", what, object, ctx.Err())
	}
}
