package runtime

import (
	"context"
	"errors"
	"sync/atomic"
)

// ErrStopped is why a launch was given up.
var ErrStopped = errors.New("it was stopped while it was being started")

// CancelSlot is a container's launch under way, or, while the container is made, what finds out
// whether one could be. There is one at a time; GiveUp may be called at any.
type CancelSlot struct {
	giveUp atomic.Pointer[context.CancelCauseFunc] // nil: none is under way
}

// Begin returns the context of a launch, and the function that ends the use of the slot.
func (u *CancelSlot) Begin(ctx context.Context) (launchCtx context.Context, end func()) {
	launchCtx, cancel := context.WithCancelCause(ctx)
	u.giveUp.Store(&cancel)
	return launchCtx, func() {
		u.giveUp.Store(nil)
		cancel(nil)
	}
}

// GiveUp has a launch that is under way taken back, if there is one: its launcher may hang.
// ErrStopped is the cause.
func (u *CancelSlot) GiveUp() {
	if cancel := u.giveUp.Load(); cancel != nil {
		(*cancel)(ErrStopped)
	}
}
