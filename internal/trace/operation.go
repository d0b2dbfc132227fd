package trace

import (
	"cmp"
	"slices"
	"time"
)

// Operation is a trace in the form that berth trace shows, and verbose PodSandboxStatus as JSON.
type Operation struct {
	Object    string    `json:"object,omitempty"` // the container's name; empty: the pod
	Image     string    `json:"image,omitempty"`  // the pulled image, as requested
	Attempt   uint32    `json:"attempt,omitempty"`
	Began     time.Time `json:"began"`
	Monotonic int64     `json:"monotonic"`         // the same on CLOCK_MONOTONIC, to compare operations
	Spans     []Shown   `json:"spans"`             // the operation, then its parts in depth-first order
	Failure   string    `json:"failure,omitempty"` // the error that the client received, if any
	Missing   int       `json:"missing,omitempty"` // number of spans beyond the limit
}

// Name returns the operation's name.
func (o Operation) Name() string {
	if len(o.Spans) == 0 {
		return ""
	}
	return o.Spans[0].Name
}

// Took returns the operation's duration. ok is false while the operation runs.
func (o Operation) Took() (took time.Duration, ok bool) {
	if len(o.Spans) == 0 {
		return 0, true
	}
	return time.Duration(o.Spans[0].Took), !o.Spans[0].Open
}

// Busy returns the time in which at least one of the operations ran.
func Busy(operations []Operation) (sum time.Duration) {
	sorted := slices.Clone(operations)
	slices.SortFunc(sorted, func(a, b Operation) int { return cmp.Compare(a.Monotonic, b.Monotonic) })
	var until int64
	for _, o := range sorted {
		took, _ := o.Took()
		end := o.Monotonic + int64(took)
		sum += time.Duration(max(end-max(until, o.Monotonic), 0))
		until = max(until, end)
	}
	return sum
}

// Shown is a span of an Operation.
type Shown struct {
	Name  string `json:"name"`
	Depth int    `json:"depth"` // 0: the operation
	From  int64  `json:"from"`  // nanoseconds since the operation started
	Took  int64  `json:"took"`  // nanoseconds
	Open  bool   `json:"open,omitempty"`
}

// Operation converts the trace. object and attempt name the container.
func (t *Trace) Operation(object string, attempt uint32) Operation {
	parts, missing := t.Parts()
	o := Operation{Object: object, Attempt: attempt, Began: t.Began(), Monotonic: t.zero, Missing: missing}
	o.Failure, _ = t.Failure()
	within := make([][]int, len(parts)+1) // indexes of the children of each part, by the part's index plus one
	for i, p := range parts {
		within[p.Parent+1] = append(within[p.Parent+1], i)
	}
	var show func(i, depth int)
	show = func(i, depth int) {
		p := parts[i]
		o.Spans = append(o.Spans, Shown{Name: p.Name, Depth: depth, From: p.Began, Took: p.Ended - p.Began, Open: p.Open})
		inside := within[i+1]
		slices.SortStableFunc(inside, func(a, b int) int { return cmp.Compare(parts[a].Began, parts[b].Began) })
		for _, j := range inside {
			show(j, depth+1)
		}
	}
	for _, i := range within[0] {
		show(i, 0)
	}
	return o
}
