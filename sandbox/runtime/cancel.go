package runtime

import (
	"context"
	"errors"
	"sync/atomic"
)

// ErrStopped is the cause of a launch that Cancel cancelled.
var ErrStopped = errors.New("stopped during its start")

// CancelSlot cancels the current launch of a container, or the validation during its creation. One
// of them runs at a time. Cancel may be called at any time.
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

// Busy reports whether something runs that Cancel would cancel.
func (u *CancelSlot) Busy() bool { return u.cancel.Load() != nil }

// Cancel cancels a current launch with the cause ErrStopped, because its launcher may hang.
func (u *CancelSlot) Cancel() {
	if cancel := u.cancel.Load(); cancel != nil {
		(*cancel)(ErrStopped)
	}
}
