// Package task runs the work of a daemon that owns objects. Every goroutine has an owner that waits
// for it. Every object has one writer at a time. Every wait has a name that operators can see.
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

// Timeout bounds one operation on a pod or container. kubelet's own deadline is four minutes for
// RunPodSandbox, and two minutes for all other calls.
const Timeout = 4 * time.Minute

// Runner starts operations and records their waits.
type Runner struct {
	Operations *Lifetime // requests of clients
	Background *Lifetime // rollback and removal
	Watchers   *Lifetime // waits for outside events, such as the exit of a process
	Log        *slog.Logger

	waits *Waits
}

// NewRunner returns a runner that records its waits in waits. No goroutine runs yet.
func NewRunner(log *slog.Logger, waits *Waits) *Runner {
	return &Runner{waits: waits, Operations: NewLifetime(), Background: NewLifetime(), Watchers: NewLifetime(), Log: log}
}

// Detach runs op in a goroutine of Operations, so that op completes even if its caller stops
// waiting. Detach returns when op or ctx has ended. timeout bounds op. Waits lists op while it
// runs.
func (r *Runner) Detach(ctx context.Context, timeout time.Duration, what, object string,
	op func(context.Context) error) error {
	return r.detach(ctx, r.Operations, timeout, what, object, op)
}

// DetachStep is Detach for a step of an operation that may hang in the kernel and cannot be
// interrupted. It also starts the step while berth stops, so that operations in progress can
// complete. A hanging step delays the stop no longer than a watcher does.
func (r *Runner) DetachStep(ctx context.Context, timeout time.Duration, what, object string, op func() error) error {
	return r.detach(ctx, r.Watchers, timeout, what, object, func(context.Context) error { return op() })
}

// DetachWait is Detach for an operation that mostly waits, and that the client repeats. It ends
// when berth stops.
func (r *Runner) DetachWait(ctx context.Context, timeout time.Duration, what, object string,
	op func(context.Context) error) error {
	return r.detach(ctx, r.Background, timeout, what, object, op)
}

func (r *Runner) detach(ctx context.Context, in *Lifetime, timeout time.Duration, what, object string,
	op func(context.Context) error) error {
	done := make(chan error, 1)
	carried, release := trace.Carry(in.ctx, ctx)
	if !in.Spawn(func() {
		defer release()
		ctx, cancel := context.WithTimeout(carried, timeout)
		defer cancel()
		end := r.BeginUpTo(timeout, what, object)
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
		return fmt.Errorf("%s %s: continues without its caller: %w", what, object, ctx.Err())
	}
}

// WithLock runs op as the only writer of an object.
func (r *Runner) WithLock(ctx context.Context, l Lock, what, object string, op func() error) error {
	release, err := r.Acquire(ctx, l, what, object)
	if err != nil {
		return err
	}
	defer release()
	return op()
}

// Guard is the function Guard with the runner's log.
func (r *Runner) Guard(what, object string, op func() error) error {
	return Guard(r.Log, what, object, op)
}

// Guard converts a panic of op to an Internal error and logs the stack. The daemon must continue to
// serve other pods. Goroutines that op starts need a separate guard.
func Guard(log *slog.Logger, what, object string, op func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			log.Error("panic", "operation", what, "object", object, "panic", p, "stack", string(debug.Stack()))
			err = errdefs.Internal("%s %s: internal error: %v", what, object, p)
		}
	}()
	return op()
}

// Parallel runs steps concurrently and joins their errors.
func (r *Runner) Parallel(what, object string, steps ...func() error) error {
	errs := make([]error, len(steps))
	var group errgroup.Group
	for i, step := range steps {
		group.Go(func() error { errs[i] = r.Guard(what, object, step); return nil })
	}
	_ = group.Wait() // errs has all errors
	return errors.Join(errs...)
}

// RetryInBackground runs do until it succeeds or the daemon stops. The next daemon continues from
// the object's record.
func (r *Runner) RetryInBackground(what, object string, do func(context.Context) error) {
	r.Background.Spawn(func() {
		for delay := time.Second; ; delay = min(2*delay, time.Minute) {
			err := r.Once(r.Background.ctx, what, object, do)
			if err == nil || r.Background.ctx.Err() != nil {
				return
			}
			if !r.Sleep(r.Background.ctx, delay, "retry: "+what, object) {
				return
			}
		}
	})
}

// Once runs do once, within Timeout. It logs a failure, because the caller will try again.
func (r *Runner) Once(ctx context.Context, what, object string, do func(context.Context) error) error {
	trying, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	end := r.BeginUpTo(Timeout, what, object)
	err := r.Guard(what, object, func() error { return do(trying) })
	end()
	if err != nil && ctx.Err() == nil {
		r.Log.Warn("will be tried again", "operation", what, "object", object, "error", err)
	}
	return err
}

// Sleep waits for d and lists the wait in Waits. It returns false if ctx ended first.
func (r *Runner) Sleep(ctx context.Context, d time.Duration, what, object string) bool {
	defer r.BeginUpTo(d, what, object)()
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}
