package sandbox

import (
	"context"
	"sync"

	"golang.org/x/sync/semaphore"

	"berth/internal/task"
)

// takeDownsAtOnce bounds how many recovered pods are taken down at a time. After a reboot all pods
// are taken down, and each take-down runs CNI plugins.
const takeDownsAtOnce = 8

// deferredWork collects unfinished work during recovery. Recovery starts no such work, because the
// work takes locks and may look up any other object. After Start each item runs in the background
// until it succeeds. The lock guards noted.
type deferredWork struct {
	tasks   *task.Runner
	queue   *semaphore.Weighted
	retries *retryLoop
	mu      sync.Mutex
	// +checklocks:mu
	noted []func()
}

func newDeferredWork(tasks *task.Runner) *deferredWork {
	return &deferredWork{tasks: tasks, queue: semaphore.NewWeighted(takeDownsAtOnce), retries: newRetryLoop(tasks)}
}

// Later adds work on an object.
func (w *deferredWork) Later(what, object string, do func(context.Context) error) {
	w.note(func() { w.tasks.RetryInBackground(what, object, do) })
}

// note adds a function that starts work.
func (w *deferredWork) note(start func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.noted = append(w.noted, start)
}

// LaterInQueue is Later for work that takes a pod down. Queued work does not hold the pod's lock,
// so client requests proceed. Failed work continues in the retry loop.
func (w *deferredWork) LaterInQueue(what, object string, do func(context.Context) error) {
	w.note(func() {
		w.tasks.Background.Spawn(func() {
			ctx := w.tasks.Background.Context()
			end := w.tasks.BeginOpen("take-down of other pods", object)
			err := w.queue.Acquire(ctx, 1)
			end()
			if err != nil { // the daemon stops
				return
			}
			err = w.tasks.Once(ctx, what, object, do)
			w.queue.Release(1)
			if err != nil {
				w.retries.Add(what, object, do)
			}
		})
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
		return m.control.lockPod(ctx, p, what, func(p lockedPod) error { return do(ctx, p) })
	})
}
