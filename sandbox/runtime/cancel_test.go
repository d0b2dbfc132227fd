package runtime

import (
	"context"
	"errors"
	"testing"
)

// Cancel cancels the current launch, and no earlier or later one.
func TestCancelSlot(t *testing.T) {
	var u CancelSlot
	u.Cancel()
	first, end := u.Begin(t.Context())
	if first.Err() != nil {
		t.Errorf("cancelled before its start: %v", context.Cause(first))
	}
	end()
	u.Cancel()
	if errors.Is(context.Cause(first), ErrStopped) {
		t.Error("cancelled after its end")
	}
	second, end := u.Begin(t.Context())
	defer end()
	if second.Err() != nil {
		t.Errorf("cancelled in place of the earlier launch: %v", context.Cause(second))
	}
	u.Cancel()
	if !errors.Is(context.Cause(second), ErrStopped) {
		t.Errorf("not cancelled: %v", context.Cause(second))
	}
}
