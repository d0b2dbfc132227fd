package daemon

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// All steps of the shutdown share one time limit, and a hanging step is left behind.
func TestStepsShareShutdownLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		hangs := func() error { <-release; return nil }
		heeds := func(ctx context.Context) error { <-ctx.Done(); return nil }
		failed := errors.New("no")

		e := newShutdown(10 * time.Second)
		time.Sleep(time.Hour) // the limit has not started
		begin := time.Now()
		if err := e.closer(func() error { return failed })(); err != failed || time.Since(begin) != 0 {
			t.Errorf("a step that ends at once: %v after %v", err, time.Since(begin))
		}
		if err := e.within(heeds)(); err != nil || time.Since(begin) != 10*time.Second {
			t.Errorf("a step that heeds its context: %v after %v", err, time.Since(begin))
		}
		if err := e.closer(hangs)(); !errors.Is(err, context.DeadlineExceeded) || time.Since(begin) != 10*time.Second+lateTimeout {
			t.Errorf("a step that hangs: %v after %v", err, time.Since(begin))
		}
		if err := e.closer(func() error { return failed })(); err != failed {
			t.Errorf("a step that comes late is not run to its end: %v", err)
		}
		close(release)
	})
}
