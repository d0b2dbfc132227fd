package task

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"
)

func TestEndCancelsOperationsThenWatchers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := NewRunner(slog.New(slog.DiscardHandler), nil)
		left := false
		r.Operations.Spawn(func() {
			<-r.Operations.Context().Done()
			if r.Background.Context().Err() == nil || r.Watchers.Context().Err() != nil {
				t.Error("the operation was cancelled before rollbacks, or after watchers")
			}
		})
		r.Watchers.Spawn(func() { <-r.Watchers.Context().Done() })
		begun := time.Now()
		idle, err := r.End(t.Context(), func() { left = true })
		if !idle || !left || !errors.Is(err, context.DeadlineExceeded) { // it was still in progress
			t.Errorf("idle %t, left %t: %v", idle, left, err)
		}
		if took := time.Since(begun); took != graceTimeout {
			t.Errorf("it took %v", took)
		}
	})
}

func TestEndLeavesHangingOperationsBehind(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := NewRunner(slog.New(slog.DiscardHandler), nil)
		release := make(chan struct{})
		r.Operations.Spawn(func() { <-release })
		begun := time.Now()
		idle, err := r.End(t.Context(), func() {})
		if idle || err == nil {
			t.Errorf("idle %t: %v", idle, err)
		}
		if took := time.Since(begun); took != graceTimeout+operationsTimeout {
			t.Errorf("it took %v", took)
		}
		close(release)
	})
}
