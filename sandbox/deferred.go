package sandbox

import (
	"context"
	"fmt"
	"sync"

	"golang.org/x/sync/semaphore"

	"berth/internal/task"
)

// takeDownsAtOnce bounds how many recovered pods are taken down at a time. After a reboot all pods
// are taken down, and each take-down runs CNI plugins.
const takeDownsAtOnce = 8

// deferredWork collects unfinished work during recovery. Recovery starts none of it, because the
// work takes locks and may look up any other object. After Start each item runs in the background
// until it succeeds. The lock guards noted.
type deferredWork struct {
	tasks *task.Runner
	queue *semaphore.Weighted
	mu    sync.Mutex
	noted []func()
}

func newDeferredWork(tasks *task.Runner) *deferredWork {
	return &deferredWork{tasks: tasks, queue: semaphore.NewWeighted(takeDownsAtOnce)}
}

// Later adds work on an object.
func (w *deferredWork) Later(what, object string, do func(context.Context) error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.noted = append(w.noted, func() { w.tasks.RetryInBackground(what, object, do) })
}

// LaterInQueue is Later for work that takes a pod down. Queued work does not hold the pod's lock,
// so client requests proceed.
func (w *deferredWork) LaterInQueue(what, object string, do func(context.Context) error) {
	w.Later(what, object, func(ctx context.Context) error {
		end := w.tasks.BeginOpen("take-down of other pods", object)
		err := w.queue.Acquire(ctx, 1)
		end()
		if err != nil {
			return fmt.Errorf("wait for other pods to be taken down: %w", err)
		}
		defer w.queue.Release(1)
		return do(ctx)
	})
}

// Start starts all collected work.
func (w *deferredWork) Start() {
	w.mu.Lock()
	noted := w.noted
	w.noted = nil
	w.mu.Unlock()
	for _, start := range noted {
		start()
	}
}

// deferWithPod adds work that takes a pod down and needs its lock.
func (m *Manager) deferWithPod(what string, p *pod, do func(context.Context, lockedPod) error) {
	m.unfinished.LaterInQueue(what, p.String(), func(ctx context.Context) error {
		return m.lockPod(ctx, p, what, func(p lockedPod) error { return do(ctx, p) })
	})
}
