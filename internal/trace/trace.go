// Package trace records where the time of an operation goes: as spans, each with a name, a beginning and an end, one within the other.
//
// # Contract
//
// Recording is always on, so it is cheap: a span is a place in a slab that its operation has allocated, and two looks at the clock. Nothing is
// locked, and nothing is allocated, but for a context where spans nest. An operation has room for MaxSpans; more are
// counted and not kept.
//
// A context carries the span that spans which begin under it are part of. Without one, nothing is recorded: every function here does
// nothing then, and every method of a nil *Span. Work that goes on without its caller takes the trace along (Carry).
//
// When all who hold a trace have let go, it is packed: some fifteen bytes a span, in one piece. What is written afterwards, by
// somebody who was left behind, is lost and does no harm.
//
// Times are CLOCK_MONOTONIC in nanoseconds, which all processes of a node share: what another process has measured can be added.
package trace

import (
	"context"
	"sync/atomic"
	"time"
)

// MaxSpans is how many spans an operation may have: a start of a container with its launcher's has some 30.
const MaxSpans = 64

// maxFailure bounds what is kept of an error's text, in bytes.
const maxFailure = 512

// Trace is the spans of one operation. The first is the operation itself.
type Trace struct {
	wall    int64 // when it began, in Unix nanoseconds
	zero    int64 // the same, by Now
	done    func(*Trace)
	holders atomic.Int32
	slab    atomic.Pointer[slab]   // nil when it is packed
	packed  atomic.Pointer[string] // nil until then

	// What an exporter wants to know. These belong to who started the trace until it ends it, and to done afterwards.
	Remote     Remote
	Attributes []Attribute

	failure atomic.Pointer[string] // nil: it has not failed
}

// Fail says why the operation failed, in what its client is told.
func (t *Trace) Fail(message string) {
	message = message[:min(len(message), maxFailure)]
	t.failure.Store(&message)
}

// Failure is why the operation failed; ok is false if it did not.
func (t *Trace) Failure() (message string, ok bool) {
	if m := t.failure.Load(); m != nil {
		return *m, true
	}
	return "", false
}

// Exported tells whether there is somebody who wants the trace when it is complete.
func (t *Trace) Exported() bool { return t.done != nil }

// Attribute says something of an operation.
type Attribute struct{ Key, Value string }

type slab struct {
	taken atomic.Int32 // more than MaxSpans if there was no room
	spans [MaxSpans]Span
}

// Span is a part of an operation. It is begun and ended once, by whichever goroutine.
type Span struct {
	trace  *Trace
	name   string
	index  int32
	parent int32        // -1: none
	began  atomic.Int64 // by Now; 0 until the fields above are written
	ended  atomic.Int64 // by Now; 0: it has not
}

type key struct{}

// Start begins a trace of an operation, and its first span. The trace is the caller's until it calls End. done, if not nil, is called once, when
// nobody records any more; it must not block.
func Start(ctx context.Context, name string, done func(*Trace)) (context.Context, *Trace) {
	t := &Trace{wall: time.Now().UnixNano(), zero: Now(), done: done}
	t.holders.Store(1)
	t.slab.Store(new(slab))
	own := t.begin(name, -1)
	own.began.Store(t.zero)
	return context.WithValue(ctx, key{}, own), t
}

// End ends the operation's own span and lets go of the trace. Without a trace it does nothing.
func (t *Trace) End() {
	if t == nil {
		return
	}
	if s := t.slab.Load(); s != nil {
		s.spans[0].End()
	}
	t.release()
}

// Of is the trace that the context carries, or nil.
func Of(ctx context.Context) *Trace {
	if s := from(ctx); s != nil {
		return s.trace
	}
	return nil
}

func from(ctx context.Context) *Span {
	s, _ := ctx.Value(key{}).(*Span)
	return s
}

// Carry gives to, which ends for other reasons than caller, the trace of caller. Who works under it calls release at the end.
func Carry(to, caller context.Context) (ctx context.Context, release func()) {
	s := from(caller)
	if s == nil {
		return to, func() {}
	}
	s.trace.holders.Add(1)
	return context.WithValue(to, key{}, s), s.trace.release
}

func (t *Trace) release() {
	if t.holders.Add(-1) > 0 {
		return
	}
	s := t.slab.Load()
	if s == nil {
		return // it was held again, by somebody left behind
	}
	packed := pack(s, t.zero)
	if !t.packed.CompareAndSwap(nil, &packed) {
		return
	}
	t.slab.Store(nil) // last: a reader finds the one or the other
	if t.done != nil {
		t.done(t)
	}
}

// Begin begins a span under the context's: defer trace.Begin(ctx, "record").End().
func Begin(ctx context.Context, name string) *Span { return from(ctx).Begin(name) }

// Nest is Begin with a context for what is part of the new span.
func Nest(ctx context.Context, name string) (context.Context, *Span) {
	s := Begin(ctx, name)
	if s == nil {
		return ctx, nil
	}
	return context.WithValue(ctx, key{}, s), s
}

// Begin begins a span that is part of s.
func (s *Span) Begin(name string) *Span {
	if s == nil {
		return nil
	}
	return s.trace.begin(name, s.index)
}

// begin returns nil where there is no room, or nobody to read it any more.
func (t *Trace) begin(name string, parent int32) *Span {
	all := t.slab.Load()
	if all == nil {
		return nil
	}
	i := all.taken.Add(1) - 1
	if i >= MaxSpans {
		return nil
	}
	s := &all.spans[i]
	s.trace, s.name, s.index, s.parent = t, name, i, parent
	s.began.Store(Now())
	return s
}

// End ends the span; the first call counts.
func (s *Span) End() {
	if s != nil {
		s.ended.CompareAndSwap(0, Now())
	}
}

// Step is a span that another process has measured.
type Step struct {
	Name  string `json:"name"`
	Began int64  `json:"began"` // by Now
	Ended int64  `json:"ended"`
}

// Add adds what another process has measured to the context's span. It is not believed that it took place before the operation, or takes
// place after now.
func Add(ctx context.Context, steps []Step) {
	parent := from(ctx)
	if parent == nil {
		return
	}
	now := Now()
	for _, step := range steps {
		s := parent.Begin(step.Name)
		if s == nil {
			return
		}
		began := min(max(step.Began, s.trace.zero), now)
		s.began.Store(began)
		s.ended.Store(min(max(step.Ended, began), now))
	}
}
