package sandbox

import (
	"context"
	"fmt"
	"runtime/debug"
	"time"

	"berth/internal/errdefs"
)

// opLimit bounds one operation on a pod or container, whoever asked for it.
// kubelet gives RunPodSandbox four minutes and everything else two.
const opLimit = 4 * time.Minute

// detach runs op to its end in a goroutine of the manager, so that a caller that
// goes away does not leave half of it done. It returns when op has ended or the
// caller's context has.
func (m *Manager) detach(ctx context.Context, what, object string, op func(context.Context) error) error {
	done := make(chan error, 1)
	if !m.spawn(func() {
		ctx, cancel := context.WithTimeout(m.ctx, opLimit)
		defer cancel()
		done <- m.guard(what, object, func() error { return op(ctx) })
	}) {
		return errdefs.Unavailable("%s %s: berth is stopping", what, object)
	}
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("%s %s: goes on without its caller: %w", what, object, ctx.Err())
	}
}

// guard turns a panic of op into an Internal error with the stack in the log: the
// daemon has other pods to serve.
func (m *Manager) guard(what, object string, op func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			m.log.Error("panic", "operation", what, "object", object, "panic", p, "stack", string(debug.Stack()))
			err = errdefs.Internal("%s %s: internal error: %v", what, object, p)
		}
	}()
	return op()
}

// spawn starts a goroutine that Close waits for. It returns false, and starts
// nothing, when the manager is closing.
func (m *Manager) spawn(f func()) bool {
	m.closing.RLock()
	defer m.closing.RUnlock()
	if m.closed {
		return false
	}
	m.goroutines.Go(f)
	return true
}

// retry repeats an undo that failed until it succeeds or the daemon stops; the
// object's record makes the next daemon go on with it.
func (m *Manager) retry(what, object string, undo func(context.Context) error) {
	m.spawn(func() {
		defer m.waits.begin("another try to "+what, object)()
		for delay := time.Second; ; delay = min(2*delay, time.Minute) {
			select {
			case <-m.ctx.Done():
				return
			case <-time.After(delay):
			}
			ctx, cancel := context.WithTimeout(m.ctx, opLimit)
			err := m.guard(what, object, func() error { return undo(ctx) })
			cancel()
			if err == nil {
				m.log.Info("undo succeeded at last", "operation", what, "object", object)
				return
			}
			m.log.Warn("undo failed again", "operation", what, "object", object, "error", err)
		}
	})
}
