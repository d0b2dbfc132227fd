package sandbox

import (
	"context"
	"fmt"
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
func (m *Manager) Waits() []Wait { return m.waits.list() }

// turn is held by the one writer of an object. It is not a mutex: it is awaited
// with a deadline and shows in Waits.
type turn chan struct{}

func newTurn() turn { return make(chan struct{}, 1) }

// take waits for the object's turn and returns the function that passes it on.
func (m *Manager) take(ctx context.Context, t turn, what, object string) (pass func(), err error) {
	pass = func() { <-t }
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("%s %s: %w", what, object, err)
	}
	select {
	case t <- struct{}{}:
		return pass, nil
	default:
	}
	defer m.waits.begin("its turn to "+what, object)()
	select {
	case t <- struct{}{}:
		return pass, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("%s %s: waiting for an operation on it to end: %w", what, object, ctx.Err())
	}
}
