package sandbox

import (
	"context"
	"slices"
	"sync"
	"time"

	"berth/internal/task"
)

const (
	// retryFirst is the time before the first retry of an item.
	retryFirst = time.Second
	// retryPause is the least time between a failed retry and the next retry of any item.
	retryPause = 5 * time.Second
	// retryMost is the longest time between two retries of one item.
	retryMost = time.Minute
)

// retryLoop repeats failed work that runs CNI plugins, until it succeeds or the daemon stops. It
// repeats one item at a time, with a pause after each failure. So the number of plugin runs in a
// minute is bounded, even if there are many items. A success shows that plugins work again, so the
// next items follow at once. The lock guards items and running.
type retryLoop struct {
	tasks *task.Runner
	wake  chan struct{} // capacity 1
	mu    sync.Mutex
	// +checklocks:mu
	items []*retry // the item that failed last comes last
	// +checklocks:mu
	running bool
}

// retry is work that failed.
type retry struct {
	what, object string
	do           func(context.Context) error
	delay        time.Duration // after the next failure
	due          time.Time
}

func newRetryLoop(tasks *task.Runner) *retryLoop {
	return &retryLoop{tasks: tasks, wake: make(chan struct{}, 1)}
}

// Add adds work that has failed. The loop runs while there is work.
func (l *retryLoop) Add(what, object string, do func(context.Context) error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.items = append(l.items, &retry{what, object, do, retryPause, time.Now().Add(retryFirst)})
	if !l.running {
		l.running = l.tasks.Background.Spawn(l.run)
	}
	l.signal()
}

// Hasten makes all items due, because the cause of their failures may be gone.
func (l *retryLoop) Hasten() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.hasten()
	l.signal()
}

// hasten is Hasten for a caller that holds the lock.
//
// +checklocks:l.mu
func (l *retryLoop) hasten() {
	now := time.Now()
	for _, item := range l.items {
		item.due = now
	}
}

func (l *retryLoop) signal() {
	select {
	case l.wake <- struct{}{}:
	default: // a signal is pending
	}
}

func (l *retryLoop) run() {
	var resume time.Time // after the pause of the last failure
	for {
		item, due := l.next()
		if item == nil {
			return
		}
		if due.Before(resume) {
			due = resume
		}
		if wait := time.Until(due); wait > 0 {
			if !l.sleep(wait, item) {
				return
			}
			continue // items may have changed
		}
		err := l.tasks.Once(l.tasks.Background.Context(), item.what, item.object, item.do)
		if l.tasks.Background.Context().Err() != nil {
			return
		}
		if err != nil {
			resume = time.Now().Add(retryPause)
		}
		l.tried(item, err)
	}
}

// next returns the item that is due first. If there is no item, it returns nil and ends the loop.
func (l *retryLoop) next() (first *retry, due time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, item := range l.items {
		if first == nil || item.due.Before(first.due) {
			first = item
		}
	}
	if first == nil {
		l.running = false
		return nil, due
	}
	return first, first.due
}

// sleep waits for at most d. It returns early if items have changed, and false if the daemon stops.
func (l *retryLoop) sleep(d time.Duration, item *retry) bool {
	defer l.tasks.BeginUpTo(d, "retry: "+item.what, item.object)()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-l.tasks.Background.Context().Done():
		return false
	case <-l.wake:
	case <-timer.C:
	}
	return true
}

// tried records the end of a try. If several items are due, an item that always fails comes last.
// Otherwise its failure and a pause would follow each success of another item.
func (l *retryLoop) tried(item *retry, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.items = slices.DeleteFunc(l.items, func(other *retry) bool { return other == item })
	if err == nil {
		l.hasten()
		return
	}
	item.due, item.delay = time.Now().Add(item.delay), min(2*item.delay, retryMost)
	l.items = append(l.items, item)
}
