package task

import (
	"cmp"
	"context"
	"log/slog"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Wait is something the daemon waits for, as verbose Status shows it.
type Wait struct {
	What   string        // what for: "turn to stop", "exit", "kill"
	Object string        // of which object: "pod 1234…", "container 1234…"
	Since  time.Time     // since when
	Limit  time.Duration // how long it should take at most; 0: as long as a client wants it
}

// Overdue tells whether it takes longer than it should.
func (w Wait) Overdue(now time.Time) bool { return w.Limit > 0 && now.Sub(w.Since) > w.Limit }

// Waits is the set of waits under way, in all parts of the daemon: for other processes, plugins,
// registries, disks, turns. That a wait ends is the affair of who waits, by a deadline of its own;
// its limit here says from when on somebody should look. The zero value is ready for use; nil
// notes nothing. The lock guards the set and is held for map operations only.
type Waits struct {
	mu   sync.Mutex
	now  map[*Wait]struct{}
	wake chan struct{} // of Watch; nil: nobody watches

	limit   atomic.Int64  // of waits that have none of their own; 0: usualLimit
	overdue atomic.Uint64 // waits that have passed their limits
	looked  atomic.Int64  // when Watch has looked last, unix nanoseconds
}

// usualLimit is that of waits which end in milliseconds on a node that is well.
const usualLimit = time.Minute

// SetLimit sets the limit of waits to come that have none of their own.
func (w *Waits) SetLimit(limit time.Duration) { w.limit.Store(int64(limit)) }

// Begin notes a wait; the caller calls end when it is over.
func (w *Waits) Begin(what, object string) (end func()) { return w.begin(what, object, 0, false) }

// BeginUpTo is Begin for a wait that may take as long as limit says, and somewhat longer.
func (w *Waits) BeginUpTo(limit time.Duration, what, object string) (end func()) {
	return w.begin(what, object, max(limit+slack, limit), false) // no more than there is
}

// slack is how much longer than its deadline a wait may take: to kill and to be scheduled.
const slack = 15 * time.Second

// BeginOpen is Begin for a wait that takes as long as a client wants it, and ends with the client.
func (w *Waits) BeginOpen(what, object string) (end func()) { return w.begin(what, object, 0, true) }

func (w *Waits) begin(what, object string, limit time.Duration, open bool) (end func()) {
	if w == nil {
		return func() {}
	}
	if limit == 0 && !open {
		limit = cmp.Or(time.Duration(w.limit.Load()), usualLimit)
	}
	entry := &Wait{What: what, Object: object, Since: time.Now(), Limit: limit}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.now == nil {
		w.now = map[*Wait]struct{}{}
	}
	w.now[entry] = struct{}{}
	if limit > 0 {
		w.wakeWatch()
	}
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.now, entry)
	}
}

// wakeWatch is called with the lock held.
func (w *Waits) wakeWatch() {
	select {
	case w.wake <- struct{}{}:
	default: // nobody watches, or looks soon anyway
	}
}

// List returns the waits under way, oldest first.
func (w *Waits) List() []Wait {
	var all []Wait
	for _, entry := range w.entries() {
		all = append(all, *entry)
	}
	return all
}

func (w *Waits) entries() []*Wait {
	if w == nil {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	all := make([]*Wait, 0, len(w.now))
	for entry := range w.now {
		all = append(all, entry)
	}
	slices.SortFunc(all, func(a, b *Wait) int { return a.Since.Compare(b.Since) })
	return all
}

// PassedLimit counts the waits that Watch has seen to pass their limits.
func (w *Waits) PassedLimit() uint64 { return w.overdue.Load() }

// Looked is when Watch has looked last.
func (w *Waits) Looked() time.Time { return time.Unix(0, w.looked.Load()) }

// LookSoon has Watch look within WatchPeriod, whether there is something to be seen or not.
func (w *Waits) LookSoon() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.wakeWatch()
}

// limited tells whether there are waits that have a limit.
func (w *Waits) limited() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for entry := range w.now {
		if entry.Limit > 0 {
			return true
		}
	}
	return false
}

// WatchPeriod is how often Watch looks while there are waits with a limit.
const WatchPeriod = time.Second

const (
	// maxStacks bounds what is logged of all goroutines' stacks: some three hundred of them.
	maxStacks = 256 << 10
	// stacksPeriod is the least time between two logs of them: one cause makes many waits.
	stacksPeriod = time.Minute
)

// Watch logs each wait that passes its limit, once, with the stacks of all goroutines, until ctx ends. There is one at
// a time. While nothing has a limit it sleeps.
func (w *Waits) Watch(ctx context.Context, log *slog.Logger) {
	wake := make(chan struct{}, 1)
	w.mu.Lock()
	w.wake = wake
	w.mu.Unlock()
	known := map[*Wait]bool{}
	var last time.Time
	for {
		w.looked.Store(time.Now().UnixNano())
		last = w.look(known, last, log)
		if !sleep(ctx, time.After(WatchPeriod)) || !w.limited() && !sleep(ctx, wake) {
			return
		}
	}
}

// sleep returns false when ctx has ended before there was something to receive.
func sleep[T any](ctx context.Context, c <-chan T) bool {
	select {
	case <-ctx.Done():
		return false
	case <-c:
		return true
	}
}

// look logs what is overdue and not yet known, and returns when stacks were logged last.
func (w *Waits) look(known map[*Wait]bool, last time.Time, log *slog.Logger) time.Time {
	now := time.Now()
	under := w.entries()
	for entry := range known {
		if !slices.Contains(under, entry) {
			delete(known, entry)
		}
	}
	for _, entry := range under {
		if known[entry] || !entry.Overdue(now) {
			continue
		}
		known[entry] = true
		w.overdue.Add(1)
		attributes := []any{"what", entry.What, "object", entry.Object, "age", now.Sub(entry.Since).Round(time.Millisecond), "limit", entry.Limit}
		if now.Sub(last) >= stacksPeriod {
			last = now
			attributes = append(attributes, "stacks", allStacks())
		}
		log.Error("a wait has passed its limit", attributes...)
	}
	return last
}

// allStacks returns the stacks of all goroutines, cut off at maxStacks.
func allStacks() string {
	buf := make([]byte, maxStacks)
	return string(buf[:runtime.Stack(buf, true)])
}

// Waits returns what operations are waiting for at the moment, oldest first.
func (r *Runner) Waits() []Wait { return r.waits.List() }

// Begin notes a wait; the caller calls end when it is over.
func (r *Runner) Begin(what, object string) (end func()) { return r.waits.Begin(what, object) }

// BeginUpTo is Begin for a wait that may take as long as limit says, see Waits.
func (r *Runner) BeginUpTo(limit time.Duration, what, object string) (end func()) {
	return r.waits.BeginUpTo(limit, what, object)
}

// BeginOpen is Begin for a wait that ends with the client who wants it, see Waits.
func (r *Runner) BeginOpen(what, object string) (end func()) { return r.waits.BeginOpen(what, object) }
