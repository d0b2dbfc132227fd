// Package task runs the work of a daemon that owns objects, so that every goroutine
// has an owner that waits for it, every object one writer at a time, and everything
// that is waited for a name that operators can see.
package task

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"time"

	"golang.org/x/sync/errgroup"

	"berth/internal/errdefs"
	"berth/internal/trace"
)

// Limit bounds one operation on a pod or container, whoever asked for it.
// kubelet gives RunPodSandbox four minutes and everything else two.
const Limit = 4 * time.Minute

// Runner starts operations and knows what they wait for.
type Runner struct {
	Operations *Lifetime // what clients asked for
	Background *Lifetime // undoing and clearing away
	Watchers   *Lifetime // waiting for events outside, such as the end of a process
	Log        *slog.Logger

	waits *Waits
}

// NewRunner returns a runner without goroutines, whose waits are noted in waits.
func NewRunner(log *slog.Logger, waits *Waits) *Runner {
	return &Runner{waits: waits, Operations: NewLifetime(), Background: NewLifetime(), Watchers: NewLifetime(), Log: log}
}

// Detach runs op to its end in a goroutine of Operations, so that a caller that
// goes away does not leave half of it done. It returns when op has ended or the
// caller's context has. Limit bounds op, which is among the waits as long as it lasts.
func (r *Runner) Detach(ctx context.Context, limit time.Duration, what, object string, op func(context.Context) error) error {
	return r.detach(ctx, r.Operations, limit, what, object, op)
}

// Aside is Detach for a step of an operation that may hang in the kernel, where nothing ends it. It begins also when no
// operation does any more because berth is stopping: those under way are to end well. What hangs then is waited for no longer than watchers are.
func (r *Runner) Aside(ctx context.Context, limit time.Duration, what, object string, op func() error) error {
	return r.detach(ctx, r.Watchers, limit, what, object, func(context.Context) error { return op() })
}

func (r *Runner) detach(ctx context.Context, in *Lifetime, limit time.Duration, what, object string, op func(context.Context) error) error {
	done := make(chan error, 1)
	carried, release := trace.Carry(in.ctx, ctx)
	if !in.Spawn(func() {
		defer release()
		ctx, cancel := context.WithTimeout(carried, limit)
		defer cancel()
		end := r.BeginUpTo(limit, what, object)
		err := r.Guard(what, object, func() error { return op(ctx) })
		end()
		done <- err
	}) {
		release()
		return errdefs.Unavailable("%s %s: berth is stopping", what, object)
	}
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("%s %s: goes on without its caller: %w", what, object, ctx.Err())
	}
}

// WithTurn runs op while it is the one writer of an object.
func (r *Runner) WithTurn(ctx context.Context, t Turn, what, object string, op func() error) error {
	pass, err := r.Take(ctx, t, what, object)
	if err != nil {
		return err
	}
	defer pass()
	return op()
}

// Guard is the function of that name with the runner's log.
func (r *Runner) Guard(what, object string, op func() error) error {
	return Guard(r.Log, what, object, op)
}

// Guard turns a panic of op into an Internal error with the stack in the log: the
// daemon has other pods to serve. A panic of a goroutine that op starts is that goroutine's to guard.
func Guard(log *slog.Logger, what, object string, op func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			log.Error("panic", "operation", what, "object", object, "panic", p, "stack", string(debug.Stack()))
			err = errdefs.Internal("%s %s: internal error: %v", what, object, p)
		}
	}()
	return op()
}

// Together runs steps side by side and joins their errors.
func (r *Runner) Together(what, object string, steps ...func() error) error {
	errs := make([]error, len(steps))
	var group errgroup.Group
	for i, step := range steps {
		group.Go(func() error { errs[i] = r.Guard(what, object, step); return nil })
	}
	_ = group.Wait() // the errors are in errs, all of them
	return errors.Join(errs...)
}

// InBackground does something now, and repeats it until it succeeds or the
// daemon stops; the object's record makes the next daemon go on with it.
func (r *Runner) InBackground(what, object string, do func(context.Context) error) {
	r.Background.Spawn(func() {
		for delay := time.Second; ; delay = min(2*delay, time.Minute) {
			ctx, cancel := context.WithTimeout(r.Background.ctx, Limit)
			end := r.BeginUpTo(Limit, what, object)
			err := r.Guard(what, object, func() error { return do(ctx) })
			end()
			cancel()
			if err == nil || r.Background.ctx.Err() != nil {
				return
			}
			r.Log.Warn("will be tried again", "operation", what, "object", object, "error", err)
			if !r.Sleep(r.Background.ctx, delay, "another try to "+what, object) {
				return
			}
		}
	})
}

// Sleep waits, visibly, and returns false if ctx ended meanwhile.
func (r *Runner) Sleep(ctx context.Context, d time.Duration, what, object string) bool {
	defer r.BeginUpTo(d, what, object)()
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}
