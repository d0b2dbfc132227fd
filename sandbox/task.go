package sandbox

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"berth/internal/errdefs"
)

// opLimit bounds one operation on a pod or container, whoever asked for it.
// kubelet gives RunPodSandbox four minutes and everything else two.
const opLimit = 4 * time.Minute

// lifetime is a kind of goroutine: all of a kind get the same context and end
// with it. The lock guards closed against spawn and is held for nothing else.
type lifetime struct {
	ctx    context.Context
	cancel context.CancelFunc
	group  sync.WaitGroup
	mu     sync.Mutex
	closed bool
}

func newLifetime() *lifetime {
	l := &lifetime{}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	return l
}

// spawn returns false, and starts nothing, after close.
func (l *lifetime) spawn(f func()) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	l.group.Go(f)
	return true
}

// close lets nothing new start.
func (l *lifetime) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
}

// wait returns when all goroutines have ended, or ctx has.
func (l *lifetime) wait(ctx context.Context) error {
	done := make(chan struct{})
	go func() { l.group.Wait(); close(done) }() // ends with the goroutines it waits for
	select {
	case <-done:
		return nil
	case <-ctx.Done():
	}
	select {
	case <-done: // both: what matters is that they have ended
		return nil
	default:
		return ctx.Err()
	}
}

// waitFor is wait with a limit.
func (l *lifetime) waitFor(limit time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	return l.wait(ctx)
}

// detach runs op to its end in a goroutine of the manager, so that a caller that
// goes away does not leave half of it done. It returns when op has ended or the
// caller's context has. Limit bounds op.
func (m *Manager) detach(ctx context.Context, limit time.Duration, what, object string, op func(context.Context) error) error {
	done := make(chan error, 1)
	if !m.operations.spawn(func() {
		ctx, cancel := context.WithTimeout(m.operations.ctx, limit)
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

// withTurn runs op while it is the one writer of an object.
func (m *Manager) withTurn(ctx context.Context, t turn, what, object string, op func() error) error {
	pass, err := m.take(ctx, t, what, object)
	if err != nil {
		return err
	}
	defer pass()
	return op()
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

// together runs steps side by side and joins their errors.
func (m *Manager) together(what, object string, steps ...func() error) error {
	errs := make([]error, len(steps))
	var group errgroup.Group
	for i, step := range steps {
		group.Go(func() error { errs[i] = m.guard(what, object, step); return nil })
	}
	_ = group.Wait() // the errors are in errs, all of them
	return errors.Join(errs...)
}

// inBackground does something now, and repeats it until it succeeds or the
// daemon stops; the object's record makes the next daemon go on with it.
func (m *Manager) inBackground(what, object string, do func(context.Context) error) {
	m.background.spawn(func() {
		for delay := time.Second; ; delay = min(2*delay, time.Minute) {
			ctx, cancel := context.WithTimeout(m.background.ctx, opLimit)
			err := m.guard(what, object, func() error { return do(ctx) })
			cancel()
			if err == nil || m.background.ctx.Err() != nil {
				return
			}
			m.log.Warn("will be tried again", "operation", what, "object", object, "error", err)
			if !m.sleep(m.background.ctx, delay, "another try to "+what, object) {
				return
			}
		}
	})
}

// sleep waits, visibly, and returns false if ctx ended meanwhile.
func (m *Manager) sleep(ctx context.Context, d time.Duration, what, object string) bool {
	defer m.waits.begin(what, object)()
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}
