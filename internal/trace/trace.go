// Package trace records how long the parts of an operation take, as nested spans with a name, a
// start and an end.
//
// # Contract
//
// Recording is always on, so it must be cheap. A span is a slot in a slab that its operation has
// allocated, and two clock readings. Recording takes no lock, and allocates only a context for a
// span with parts. An operation has room for MaxSpans or MaxLargeSpans. Further spans are counted
// but not kept.
//
// A context carries the span that contains new spans. If the context has no span, nothing is
// recorded. Every function then does nothing, and so does every method of a nil *Span. Work that
// outlives its caller keeps the trace with Carry.
//
// When all holders have released a trace, it is packed into about fifteen bytes per span. Later
// writes of remaining goroutines are lost, which is harmless.
//
// Times are CLOCK_MONOTONIC in nanoseconds. All processes of a node share this clock, so spans that
// another process measured can be added.
package trace

import (
	"context"
	"sync/atomic"
	"time"
)

// MaxSpans is the maximum number of spans of an operation. The start of a container has about 30,
// including the launcher's.
const MaxSpans = 64

// MaxLargeSpans is the maximum number of spans of an operation with many parts. A pull has about
// four spans for each layer. The packed form limits it to 254.
const MaxLargeSpans = 240

// maxFailure bounds the kept text of an error, in bytes.
const maxFailure = 512

// Trace has the spans of one operation. The first is the operation itself.
type Trace struct {
	name    string
	wall    int64 // start, in Unix nanoseconds
	zero    int64 // the same from Now
	done    func(*Trace)
	holders atomic.Int32
	slab    atomic.Pointer[slab]   // nil once the trace is packed
	packed  atomic.Pointer[string] // nil until the trace is packed

	// Data for an exporter. The caller of Start may write it until End. After that, only done may
	// write it.
	Remote     Remote
	Attributes []Attribute

	failure atomic.Pointer[string] // nil: success
}

// Fail records the error that the operation's client receives.
func (t *Trace) Fail(message string) {
	message = message[:min(len(message), maxFailure)]
	t.failure.Store(&message)
}

// Failure returns the text of Fail. ok is false if Fail was not called.
func (t *Trace) Failure() (message string, ok bool) {
	if m := t.failure.Load(); m != nil {
		return *m, true
	}
	return "", false
}

// Name returns the operation's name.
func (t *Trace) Name() string { return t.name }

// Exported reports whether the complete trace goes to an exporter.
func (t *Trace) Exported() bool { return t.done != nil }

// Attribute is a property of an operation.
type Attribute struct{ Key, Value string }

type slab struct {
	taken atomic.Int32 // greater than len(spans) if spans did not fit
	spans []Span
}

// Span is a part of an operation. Any goroutine may begin it and end it, each once.
type Span struct {
	trace  *Trace
	name   string
	index  int32
	parent int32        // -1: none
	began  atomic.Int64 // from Now; 0 until the fields above are written
	ended  atomic.Int64 // from Now; 0: still running
}

type key struct{}

// Start begins the trace of an operation with its first span. The caller owns the trace until it
// calls End. done, if not nil, is called once when recording has ended, and must not block.
func Start(ctx context.Context, name string, done func(*Trace)) (context.Context, *Trace) {
	return start(ctx, name, MaxSpans, done)
}

// StartLarge is Start for an operation with up to MaxLargeSpans.
func StartLarge(ctx context.Context, name string, done func(*Trace)) (context.Context, *Trace) {
	return start(ctx, name, MaxLargeSpans, done)
}

func start(ctx context.Context, name string, room int, done func(*Trace)) (context.Context, *Trace) {
	t := &Trace{name: name, wall: time.Now().UnixNano(), zero: Now(), done: done}
	t.holders.Store(1)
	t.slab.Store(&slab{spans: make([]Span, room)})
	own := t.begin(name, -1)
	own.began.Store(t.zero)
	return context.WithValue(ctx, key{}, own), t
}

// End ends the operation's span and releases the trace. It does nothing for a nil Trace.
func (t *Trace) End() {
	if t == nil {
		return
	}
	if s := t.slab.Load(); s != nil {
		s.spans[0].End()
	}
	t.release()
}

// Of returns the trace of the context, or nil.
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

// Carry adds the caller's trace to a context with another lifetime. The user of ctx calls release
// when it is done.
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
		return // a remaining goroutine holds the trace again
	}
	packed := pack(s, t.zero)
	if !t.packed.CompareAndSwap(nil, &packed) {
		return
	}
	t.slab.Store(nil) // written last, so that a reader finds one of the two
	if t.done != nil {
		t.done(t)
	}
}

// Begin begins a span in the context's span: defer trace.Begin(ctx, "record").End().
func Begin(ctx context.Context, name string) *Span { return from(ctx).Begin(name) }

// Nest is Begin with a context for parts of the new span.
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

// begin returns nil if the slab is full or packed.
func (t *Trace) begin(name string, parent int32) *Span {
	all := t.slab.Load()
	if all == nil {
		return nil
	}
	i := all.taken.Add(1) - 1
	if int(i) >= len(all.spans) {
		return nil
	}
	s := &all.spans[i]
	s.trace, s.name, s.index, s.parent = t, name, i, parent
	s.began.Store(Now())
	return s
}

// End ends the span. Only the first call has an effect.
func (s *Span) End() {
	if s != nil {
		s.ended.CompareAndSwap(0, Now())
	}
}

// Step is a span that another process measured.
type Step struct {
	Name  string `json:"name"`
	Began int64  `json:"began"` // from Now
	Ended int64  `json:"ended"`
}

// Add adds the spans of another process to the context's span. It clips them to the time between
// the operation's start and now.
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
