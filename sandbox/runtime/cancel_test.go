package runtime

import (
	"context"
	"errors"
	"testing"
)

// GiveUp cancels the current launch and no earlier or later one.
func TestCancelSlot(t *testing.T) {
	var u CancelSlot
	u.GiveUp()
	first, end := u.Begin(t.Context())
	if first.Err() != nil {
		t.Errorf("it was given up before it began: %v", context.Cause(first))
	}
	end()
	u.GiveUp()
	if errors.Is(context.Cause(first), ErrStopped) {
		t.Error("it was given up after its end")
	}
	second, end := u.Begin(t.Context())
	defer end()
	if second.Err() != nil {
		t.Errorf("it was given up for the one before: %v", context.Cause(second))
	}
	u.GiveUp()
	if !errors.Is(context.Cause(second), ErrStopped) {
		t.Errorf("it was not given up: %v", context.Cause(second))
	}
}
