package runtime

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
)

// ErrStopped is the cause of a launch that Cancel cancelled.
var ErrStopped = errors.New("stopped during its start")

// CancelSlot cancels the current launch of a container, or the validation during its creation. Only
// one of the two runs at a time. Cancel may be called at any time.
type CancelSlot struct {
	cancel atomic.Pointer[context.CancelCauseFunc] // nil: nothing runs
}

// Begin returns the context of a launch. The caller calls end after the launch.
func (u *CancelSlot) Begin(ctx context.Context) (launchCtx context.Context, end func()) {
	launchCtx, cancel := context.WithCancelCause(ctx)
	u.cancel.Store(&cancel)
	return launchCtx, func() {
		u.cancel.Store(nil)
		cancel(nil)
	}
}

// Cancel cancels a current launch with the cause ErrStopped, because its launcher may hang.
func (u *CancelSlot) Cancel() {
	if cancel := u.cancel.Load(); cancel != nil {
		(*cancel)(ErrStopped)
	}
}

// StopGate cancels operations on a container that must not run while it is stopped. Any number of
// operations and stops can run at a time. The zero value is ready to use.
type StopGate struct {
	mu sync.Mutex
	// +checklocks:mu
	stops int
	// +checklocks:mu
	cancels map[*context.CancelCauseFunc]struct{} // of the operations
}

// Begin returns the context of an operation. A stop cancels it with the cause ErrStopped. If it
// begins during a stop, it is cancelled at once. The caller calls end after the operation.
func (g *StopGate) Begin(ctx context.Context) (operationCtx context.Context, end func()) {
	operationCtx, cancel := context.WithCancelCause(ctx)
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.stops > 0 {
		cancel(ErrStopped)
	}
	if g.cancels == nil {
		g.cancels = map[*context.CancelCauseFunc]struct{}{}
	}
	g.cancels[&cancel] = struct{}{}
	return operationCtx, func() {
		g.mu.Lock()
		delete(g.cancels, &cancel)
		g.mu.Unlock()
		cancel(nil)
	}
}

// Stop cancels all operations. Until end is called, it also cancels each new operation.
func (g *StopGate) Stop() (end func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.stops++
	for cancel := range g.cancels {
		(*cancel)(ErrStopped)
	}
	return sync.OnceFunc(func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.stops--
	})
}
