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

// Wait is one wait of the daemon, as verbose Status shows it.
type Wait struct {
	What   string // for example "exit", "kill", "lock to stop"
	Object string // for example "pod 1234…", "container 1234…"
	Since  time.Time
	Limit  time.Duration // expected maximum; 0: the client decides
}

// Overdue reports whether the wait exceeds its limit.
func (w Wait) Overdue(now time.Time) bool { return w.Limit > 0 && now.Sub(w.Since) > w.Limit }

// Waits is the set of current waits in all parts of the daemon. The daemon may wait for other
// processes, plugins, registries, disks or locks. Each waiter has a separate deadline. The limit
// here only determines when the daemon reports a wait. The zero value is ready for use. A nil Waits
// records no waits. The lock is held for map operations only.
type Waits struct {
	mu sync.Mutex
	// +checklocks:mu
	now map[*Wait]struct{}
	// +checklocks:mu
	wake chan struct{} // wakes Watch; nil: Watch does not run

	limit   atomic.Int64  // limit of waits that Begin records; 0: usualLimit
	overdue atomic.Uint64 // number of waits that have passed their limits
	checked atomic.Int64  // time of Watch's last check, in Unix nanoseconds
}

// usualLimit is the limit of waits that take milliseconds on a healthy node.
const usualLimit = time.Minute

// SetLimit sets the limit of future waits that Begin records.
func (w *Waits) SetLimit(limit time.Duration) { w.limit.Store(int64(limit)) }

// Begin records a wait. The caller calls end when the wait is over.
func (w *Waits) Begin(what, object string) (end func()) { return w.begin(what, object, 0, false) }

// BeginUpTo is Begin for a wait with a deadline. The limit of the wait is its deadline plus slack.
func (w *Waits) BeginUpTo(timeout time.Duration, what, object string) (end func()) {
	return w.begin(what, object, max(timeout+slack, timeout), false) // max avoids an overflow
}

// slack is how much longer than its deadline a wait may take, for killing and scheduling.
const slack = 15 * time.Second

// BeginOpen is Begin for a wait that the client bounds.
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

// wakeWatch wakes Watch.
//
// +checklocks:w.mu
func (w *Waits) wakeWatch() {
	select {
	case w.wake <- struct{}{}:
	default: // Watch does not run, or will check soon
	}
}

// List returns the current waits, oldest first.
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

// PassedLimit returns how many waits Watch has seen exceed their limits.
func (w *Waits) PassedLimit() uint64 { return w.overdue.Load() }

// LastCheck returns the time of Watch's last check.
func (w *Waits) LastCheck() time.Time { return time.Unix(0, w.checked.Load()) }

// CheckSoon makes Watch check within WatchPeriod, even if there are no waits.
func (w *Waits) CheckSoon() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.wakeWatch()
}

// limited reports whether a wait has a limit.
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

// WatchPeriod is the time between two checks of Watch while waits with a limit exist.
const WatchPeriod = time.Second

const (
	// maxStacks bounds the logged stacks, in bytes: about three hundred goroutines.
	maxStacks = 256 << 10
	// stacksPeriod is the minimum time between two logs of stacks. One cause may delay many waits.
	stacksPeriod = time.Minute
)

// Watch logs each wait once when it exceeds its limit, with the stacks of all goroutines, until ctx
// ends. Only one Watch may run at a time. It sleeps while no wait has a limit.
func (w *Waits) Watch(ctx context.Context, log *slog.Logger) {
	wake := make(chan struct{}, 1)
	w.mu.Lock()
	w.wake = wake
	w.mu.Unlock()
	known := map[*Wait]bool{}
	var last time.Time
	for {
		w.checked.Store(time.Now().UnixNano())
		last = w.check(known, last, log)
		if !sleep(ctx, time.After(WatchPeriod)) || !w.limited() && !sleep(ctx, wake) {
			return
		}
	}
}

// sleep waits for a value from c. It returns false if ctx ended first.
func sleep[T any](ctx context.Context, c <-chan T) bool {
	select {
	case <-ctx.Done():
		return false
	case <-c:
		return true
	}
}

// check logs overdue waits that are not yet in known, and returns when stacks were last logged.
func (w *Waits) check(known map[*Wait]bool, last time.Time, log *slog.Logger) time.Time {
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
		attributes := []any{
			"what",
			entry.What,
			"object",
			entry.Object,
			"age",
			now.Sub(entry.Since).Round(time.Millisecond),
			"limit",
			entry.Limit,
		}
		if now.Sub(last) >= stacksPeriod {
			last = now
			attributes = append(attributes, "stacks", allStacks())
		}
		log.Error("a wait has passed its limit", attributes...)
	}
	return last
}

// allStacks returns the stacks of all goroutines, truncated to maxStacks.
func allStacks() string {
	buf := make([]byte, maxStacks)
	return string(buf[:runtime.Stack(buf, true)])
}

// Waits returns the current waits of operations, oldest first.
func (r *Runner) Waits() []Wait { return r.waits.List() }

// Begin is Waits.Begin.
func (r *Runner) Begin(what, object string) (end func()) { return r.waits.Begin(what, object) }

// BeginUpTo is Waits.BeginUpTo.
func (r *Runner) BeginUpTo(timeout time.Duration, what, object string) (end func()) {
	return r.waits.BeginUpTo(timeout, what, object)
}

// BeginOpen is Waits.BeginOpen.
func (r *Runner) BeginOpen(what, object string) (end func()) { return r.waits.BeginOpen(what, object) }
