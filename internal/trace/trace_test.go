package trace

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

// names formats the spans of an operation with their depths.
func names(o Operation) string {
	var all []string
	for _, s := range o.Spans {
		all = append(all, strings.Repeat(".", s.Depth)+s.Name)
	}
	return strings.Join(all, " ")
}

func TestSpansNest(t *testing.T) {
	var told *Trace
	ctx, tr := Start(t.Context(), "run", func(t *Trace) { told = t })
	Begin(ctx, "plan").End()
	inner, pause := Nest(ctx, "pause")
	began := Now()
	Begin(inner, "order").End()
	Add(inner, []Step{{Name: "create", Began: began, Ended: Now()}, {Name: "hostile", Began: -5, Ended: 1<<63 - 1}})
	pause.End()
	open := Begin(ctx, "left open")
	if told != nil {
		t.Error("done was called before the end")
	}
	live := tr.Operation("web", 3)
	tr.End()
	open.End() // too late to be recorded
	Begin(ctx, "late").End()
	o := tr.Operation("web", 3)
	const want = "run .plan .pause ..hostile ..create ..order .left open"
	if told != tr || names(live) != want && names(live) != "run .plan .pause ..hostile ..order ..create .left open" || names(live) != names(o) {
		t.Errorf("live %s, packed %s", names(live), names(o))
	}
	if o.Object != "web" || o.Attempt != 3 || o.Missing != 0 {
		t.Errorf("%+v", o)
	}
	total := o.Spans[0].Took
	for _, s := range o.Spans {
		if s.From < 0 || s.Took < 0 || s.Name != "left open" && s.From+s.Took > total {
			t.Errorf("%+v is outside of the operation's %d ns", s, total)
		}
		if s.Open != (s.Name == "left open") {
			t.Errorf("%+v", s)
		}
	}
	if age := time.Since(o.Began); age < 0 || age > time.Minute {
		t.Errorf("began %v ago", age)
	}
}

func TestNothingIsRecordedWithoutTrace(t *testing.T) {
	ctx := t.Context()
	inner, s := Nest(ctx, "x")
	s.End()
	Begin(ctx, "y").Begin("z").End()
	Add(ctx, []Step{{Name: "s"}})
	carried, release := Carry(ctx, ctx)
	release()
	var none *Trace
	none.End()
	if inner != ctx || carried != ctx || s != nil || Of(ctx) != nil {
		t.Error("there is a trace")
	}
}

func TestCarriedTraceOutlivesCaller(t *testing.T) {
	done := make(chan *Trace, 1)
	ctx, tr := Start(t.Context(), "run", func(t *Trace) { done <- t })
	carried, release := Carry(context.Background(), ctx)
	tr.End() // as after the caller's deadline
	select {
	case <-done:
		t.Fatal("the trace was packed while work went on")
	default:
	}
	Begin(carried, "work").End()
	release()
	if got := names((<-done).Operation("", 0)); got != "run .work" {
		t.Error(got)
	}
	again, release := Carry(context.Background(), ctx) // a goroutine that remains
	Begin(again, "late").End()
	release()
	if got := names(tr.Operation("", 0)); got != "run .work" {
		t.Error(got)
	}
}

func TestSpansBeyondLimitAreCounted(t *testing.T) {
	ctx, tr := Start(t.Context(), "run", nil)
	for i := range MaxSpans + 10 {
		Begin(ctx, fmt.Sprint("step ", i)).End()
	}
	Begin(ctx, strings.Repeat("x", 300)).End()
	tr.End()
	o := tr.Operation("", 0)
	if len(o.Spans) != MaxSpans || o.Missing != 12 {
		t.Errorf("%d spans, %d missing", len(o.Spans), o.Missing)
	}
}

// Readers, writers and End run concurrently. The race detector checks them.
func TestConcurrentReadersAndWriters(t *testing.T) {
	for range 50 {
		ctx, tr := Start(t.Context(), "run", nil)
		var group sync.WaitGroup
		for range 8 {
			carried, release := Carry(context.Background(), ctx)
			group.Go(func() {
				inner, s := Nest(carried, "outer")
				Begin(inner, "inner").End()
				release()
				s.End()
				Begin(inner, "after").End()
			})
			group.Go(func() { tr.Operation("", 0) })
		}
		tr.End()
		group.Wait()
		o := tr.Operation("", 0)
		for i, s := range o.Spans[1:] {
			if s.Depth > o.Spans[i].Depth+1 {
				t.Fatalf("depths: %s", names(o))
			}
		}
	}
}

func TestPackedTraceIsSmall(t *testing.T) {
	ctx, tr := Start(t.Context(), "StartContainer", nil)
	for i := range 30 {
		Begin(ctx, fmt.Sprintf("mount filesystem %d", i)).End()
	}
	tr.End()
	if n := len(*tr.packed.Load()); n > 1024 {
		t.Errorf("%d bytes for 31 spans", n)
	}
}

func TestOperationAsJSON(t *testing.T) {
	_, tr := Start(t.Context(), "run", nil)
	tr.Fail("no such \xff image")
	tr.End()
	data, err := json.Marshal(tr.Operation("web", 0))
	testutil.Must(t, err)
	var again Operation
	if err := json.Unmarshal(data, &again); err != nil || names(again) != "run" || !strings.HasPrefix(again.Failure, "no such ") {
		t.Errorf("%s: %v", data, err)
	}
}

// Launchers are other processes, so Now must be the kernel's clock.
func TestNowIsKernelsMonotonicClock(t *testing.T) {
	kernel := func() int64 {
		var ts unix.Timespec
		testutil.Must(t, unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts))
		return ts.Nano()
	}
	const slack = int64(time.Millisecond) // maximum error of the alignment
	before, now, after := kernel(), Now(), kernel()
	if now < before-slack || now > after+slack {
		t.Errorf("%d is not between %d and %d", now, before, after)
	}
}

func TestParseRemote(t *testing.T) {
	const good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	r := ParseRemote(good)
	if !r.Valid() || !r.Sampled || r.TraceID[0] != 0x0a || r.SpanID[7] != 0x31 {
		t.Errorf("%+v", r)
	}
	if r := ParseRemote(strings.TrimSuffix(good, "1") + "0"); !r.Valid() || r.Sampled {
		t.Errorf("not sampled: %+v", r)
	}
	if r := ParseRemote("01" + good[2:] + "-later"); !r.Valid() {
		t.Error("a later version is refused")
	}
	for _, bad := range []string{"", "-", good[:54], good + "0", good + "-x", "ff" + good[2:], strings.ToUpper(good), "0g" + good[2:],
		"00-00000000000000000000000000000000-b7ad6b7169203331-01", "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01"} {
		if r := ParseRemote(bad); r != (Remote{}) {
			t.Errorf("%q: %+v", bad, r)
		}
	}
}

func FuzzParseRemote(f *testing.F) {
	f.Add("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
	f.Add("01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-x-")
	f.Fuzz(func(t *testing.T, header string) {
		if r := ParseRemote(header); r != (Remote{}) && !r.Valid() {
			t.Errorf("%q: %+v", header, r)
		}
	})
}

// BenchmarkSpan measures one span: a context lookup, a slot and two clock readings.
func BenchmarkSpan(b *testing.B) {
	ctx, tr := Start(b.Context(), "run", nil)
	ctx, cancel := context.WithTimeout(ctx, time.Hour) // as deep as a launch's context
	defer cancel()
	b.ReportAllocs()
	for b.Loop() {
		Begin(ctx, "record").End()
		if all := tr.slab.Load(); all.taken.Load() >= MaxSpans {
			all.taken.Store(1)
		}
	}
}

// BenchmarkOff measures a span without a trace.
func BenchmarkOff(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		Begin(b.Context(), "record").End()
	}
}

// BenchmarkPodStart measures recording the start of a pod with one container: three operations with
// their spans.
func BenchmarkPodStart(b *testing.B) {
	steps := make([]Step, 10)
	b.ReportAllocs()
	for b.Loop() {
		for _, spans := range []int{12, 8, 10} {
			ctx, tr := Start(b.Context(), "run", nil)
			inner, s := Nest(ctx, "launcher")
			for range spans {
				Begin(inner, "mount filesystem").End()
			}
			Add(inner, steps)
			s.End()
			tr.End()
		}
	}
}
