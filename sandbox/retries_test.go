package sandbox

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"berth/internal/task"
	"berth/internal/testutil"
)

// However many items fail, the loop tries one at a time with a pause. After a success it tries the
// others at once.
func TestRetryLoop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tasks := task.NewRunner(slog.New(slog.DiscardHandler), nil)
		loop := newRetryLoop(tasks)
		var works atomic.Bool
		var tries, done atomic.Int64
		const items = 50
		for range items {
			loop.Add("undo", "pod", func(context.Context) error {
				tries.Add(1)
				if !works.Load() {
					return errors.New("unauthorized")
				}
				done.Add(1)
				return nil
			})
		}
		for range 3 {
			before := tries.Load()
			time.Sleep(10 * time.Minute)
			synctest.Wait()
			if got, most := tries.Load()-before, int64(10*time.Minute/retryPause)+1; got > most || got < most/2 {
				t.Errorf("%d tries in ten minutes, want at most %d", got, most)
			}
			loop.Hasten() // does not shorten the pause
			synctest.Wait()
		}
		works.Store(true)
		time.Sleep(retryPause)
		synctest.Wait()
		if done.Load() != items {
			t.Errorf("%d items are done, want %d", done.Load(), items)
		}
		tries.Store(0)
		loop.Add("undo", "pod", func(context.Context) error { tries.Add(1); return nil }) // the loop runs again
		time.Sleep(retryFirst)
		synctest.Wait()
		if tries.Load() != 1 {
			t.Errorf("%d tries of new work", tries.Load())
		}
		tasks.Background.Close()
		testutil.Must(t, tasks.Background.Wait(t.Context()))
	})
}

// An item that always fails does not slow the others down, in whatever order they were added.
func TestRetryLoopWithOneFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tasks := task.NewRunner(slog.New(slog.DiscardHandler), nil)
		loop := newRetryLoop(tasks)
		var done atomic.Int64
		const items = 50
		loop.Add("undo", "broken pod", func(context.Context) error { return errors.New("unauthorized") })
		for range items {
			loop.Add("undo", "pod", func(context.Context) error { done.Add(1); return nil })
		}
		time.Sleep(retryFirst + 2*retryPause)
		synctest.Wait()
		if done.Load() != items {
			t.Errorf("%d of %d items are done", done.Load(), items)
		}
		tasks.Background.Cancel()
		tasks.Background.Close()
		testutil.Must(t, tasks.Background.Wait(t.Context()))
	})
}
