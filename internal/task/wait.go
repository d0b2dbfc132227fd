package task

import (
	"slices"
	"sync"
	"time"
)

// Wait is something the daemon waits for, as verbose Status shows it.
type Wait struct {
	What   string    // what for: "turn to stop", "exit", "kill"
	Object string    // of which object: "pod 1234…", "container 1234…"
	Since  time.Time // since when
}

// waits is the set of waits under way. Its lock guards the set and is held for
// map operations only.
type waits struct {
	mu  sync.Mutex
	now map[*Wait]struct{}
}

// begin notes a wait; the caller calls end when it is over.
func (w *waits) begin(what, object string) (end func()) {
	entry := &Wait{What: what, Object: object, Since: time.Now()}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.now == nil {
		w.now = map[*Wait]struct{}{}
	}
	w.now[entry] = struct{}{}
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.now, entry)
	}
}

// list returns the waits under way, oldest first.
func (w *waits) list() []Wait {
	w.mu.Lock()
	defer w.mu.Unlock()
	all := make([]Wait, 0, len(w.now))
	for entry := range w.now {
		all = append(all, *entry)
	}
	slices.SortFunc(all, func(a, b Wait) int { return a.Since.Compare(b.Since) })
	return all
}

// Waits returns what operations are waiting for at the moment, oldest first.
func (r *Runner) Waits() []Wait { return r.waits.list() }

// Begin notes a wait; the caller calls end when it is over.
func (r *Runner) Begin(what, object string) (end func()) { return r.waits.begin(what, object) }
