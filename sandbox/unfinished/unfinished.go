// Package unfinished is what an earlier daemon left half done.
//
// # Contract
//
// Recovery notes what it finds, and begins nothing: what is done takes turns, and may look for any other object. Start is for when all
// objects are found. From then on everything is done in the background, side by side and again and again until it succeeds;
// the object's record makes the next daemon go on with it. What takes pods down runs plugins, so it is done for
// some pods at a time. Who waits in line for that has not got the pod's turn: a client who asks for the same is served at once.
package unfinished

import (
	"context"
	"fmt"
	"sync"

	"golang.org/x/sync/semaphore"

	"berth/internal/task"
)

// atOnce bounds how many pods are taken down at a time: after a reboot it is all of them, and each has plugins.
const atOnce = 8

// Work is what is to be done.
type Work struct {
	tasks  *task.Runner
	inLine *semaphore.Weighted
	mu     sync.Mutex // guards noted, and is held for no more
	noted  []func()
}

// New returns no work.
func New(tasks *task.Runner) *Work {
	return &Work{tasks: tasks, inLine: semaphore.NewWeighted(atOnce)}
}

// Later notes something to be done with an object.
func (w *Work) Later(what, object string, do func(context.Context) error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.noted = append(w.noted, func() { w.tasks.InBackground(what, object, do) })
}

// LaterWithPod is Later for what takes a pod down. It is done with the pod's turn, and waits in line without it.
func (w *Work) LaterWithPod(what, pod string, turn task.Turn, do func(context.Context) error) {
	w.Later(what, pod, func(ctx context.Context) error {
		end := w.tasks.BeginOpen("other pods of an earlier daemon to be taken down", pod)
		err := w.inLine.Acquire(ctx, 1)
		end()
		if err != nil {
			return fmt.Errorf("wait for other pods to be taken down: %w", err)
		}
		defer w.inLine.Release(1)
		return w.tasks.WithTurn(ctx, turn, what, pod, func() error { return do(ctx) })
	})
}

// Start begins with all of it.
func (w *Work) Start() {
	w.mu.Lock()
	noted := w.noted
	w.noted = nil
	w.mu.Unlock()
	for _, start := range noted {
		start()
	}
}
