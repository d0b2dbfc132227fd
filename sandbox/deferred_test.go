package sandbox

import (
	"context"
	"log/slog"
	"sync/atomic"
	"testing"

	"berth/internal/task"
	"berth/internal/testutil"
)

// After a reboot all pods are taken down, a few at a time. Queued pods do not hold their locks, so
// client requests proceed.
func TestTakeDownsAreLimited(t *testing.T) {
	tasks := task.NewRunner(slog.New(slog.DiscardHandler), nil)
	w := newDeferredWork(tasks)
	pods := make([]task.Lock, 4*takeDownsAtOnce)
	var working, tooMany atomic.Int32
	started, proceed := make(chan task.Lock, len(pods)), make(chan struct{})
	for i := range pods {
		lock := task.NewLock()
		pods[i] = lock
		w.LaterInQueue("stop", "pod q", func(ctx context.Context) error {
			return tasks.WithLock(ctx, lock, "stop", "pod q", func() error {
				if working.Add(1) > takeDownsAtOnce {
					tooMany.Add(1)
				}
				defer working.Add(-1)
				started <- lock
				<-proceed
				return nil
			})
		})
	}
	w.Start()
	first := map[task.Lock]bool{}
	for range takeDownsAtOnce {
		first[<-started] = true
	}
	for _, lock := range pods {
		select {
		case lock <- struct{}{}:
			<-lock
			if first[lock] {
				t.Error("a pod is taken down without its lock")
			}
		default:
			if !first[lock] {
				t.Error("a pod in the queue holds its lock")
			}
		}
	}
	close(proceed)
	tasks.Background.Close()
	testutil.Must(t, tasks.Background.Wait(t.Context()))
	if tooMany.Load() > 0 || len(started) != len(pods)-takeDownsAtOnce {
		t.Errorf("%d take-downs exceeded the limit, %d queued take-downs ran", tooMany.Load(), len(started))
	}
}
