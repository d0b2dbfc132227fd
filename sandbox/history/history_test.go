package history

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"berth/internal/testutil"
	"berth/internal/trace"
)

// operation returns a trace with parts.
func operation(t *testing.T, name string, failure error, parts ...string) *trace.Trace {
	ctx, op := trace.Start(t.Context(), name, nil)
	for _, part := range parts {
		trace.Begin(ctx, part).End()
	}
	if failure != nil {
		op.Fail(failure.Error())
	}
	op.End()
	return op
}

// describe lists the operations of a start.
func describe(operations []trace.Operation) string {
	var all []string
	for _, o := range operations {
		text := o.Name()
		if o.Object != "" {
			text += fmt.Sprintf(" %s/%d", o.Object, o.Attempt)
		}
		if o.Image != "" {
			text += " " + o.Image
		}
		all = append(all, text)
	}
	return strings.Join(all, ", ")
}

func check(t *testing.T, h *History, id, want string) {
	t.Helper()
	s, err := h.Find(id)
	testutil.Must(t, err)
	if got := describe(s.Operations); got != want || s.ID != id {
		t.Errorf("start of %s: %s, want %s", s.ID, got, want)
	}
}

// The newest attempt of each container and the newest pull of each image are kept.
func TestStartHasNewestAttempts(t *testing.T) {
	t.Parallel()
	h := new(History)
	r := h.Record(Pod{ID: "p", Namespace: "default", Name: "web"})
	if all := h.List(); all == nil || len(all) != 0 {
		t.Errorf("starts without operations: %+v", all)
	}
	r.AddPod(operation(t, "RunPodSandbox", nil))
	r.AddPull(operation(t, "PullImage", nil, "resolve"), "web")
	r.AddContainer(operation(t, "CreateContainer", nil), "web", 0)
	r.AddContainer(operation(t, "StartContainer", nil), "web", 0)
	check(t, h, "p", "RunPodSandbox, PullImage web, CreateContainer web/0, StartContainer web/0")
	r.AddPull(operation(t, "PullImage", nil), "web")
	r.AddContainer(operation(t, "CreateContainer", nil), "web", 1)
	check(t, h, "p", "RunPodSandbox, PullImage web, CreateContainer web/1")
}

// berth run pulls before the pod exists. Its pulls wait for that pod.
func TestPullsWaitForTheirPod(t *testing.T) {
	t.Parallel()
	h := new(History)
	pod := Pod{Namespace: "default", Name: "web", UID: "u"}
	other := pod
	other.UID = "v"
	h.AddPull(pod, "web", operation(t, "PullImage", nil))
	h.AddPull(other, "other", operation(t, "PullImage", nil))
	pod.ID = "p"
	h.Record(pod).AddPod(operation(t, "RunPodSandbox", nil))
	check(t, h, "p", "PullImage web, RunPodSandbox")
	for range 2 * maxWaiting {
		h.AddPull(other, "other", operation(t, "PullImage", nil))
	}
	if len(h.waiting) != maxWaiting {
		t.Errorf("%d pulls wait", len(h.waiting))
	}
}

func TestPullsAreBounded(t *testing.T) {
	t.Parallel()
	h := new(History)
	r := h.Record(Pod{ID: "p"})
	r.AddPod(operation(t, "RunPodSandbox", nil))
	for i := range maxPulls + 3 {
		r.AddPull(operation(t, "PullImage", nil), fmt.Sprint("image", i))
	}
	if all := r.Operations(); len(all) != maxPulls+1 || all[1].Image != "image3" {
		t.Errorf("%s", describe(all))
	}
}

func TestSummary(t *testing.T) {
	t.Parallel()
	h := new(History)
	for i, failure := range []error{nil, errors.New("no")} {
		r := h.Record(Pod{ID: fmt.Sprint("p", i), Namespace: "default", Name: "web"})
		r.AddPod(operation(t, "RunPodSandbox", nil))
		r.AddPull(operation(t, "PullImage", nil), "web")
		r.AddContainer(operation(t, "CreateContainer", failure), "web", 0)
	}
	all := h.List()
	if len(all) != 2 || all[0].ID != "p1" || !all[0].Failed || all[1].Failed {
		t.Fatalf("%+v", all)
	}
	if s := all[1]; s.Containers != 1 || s.Pull <= 0 || s.Took <= s.Pull || s.Began.IsZero() {
		t.Errorf("%+v", s)
	}
}

// The starts without operations for the longest time are dropped.
func TestLastStartsAreKept(t *testing.T) {
	t.Parallel()
	h := new(History)
	first := h.Record(Pod{ID: "first"})
	first.AddPod(operation(t, "RunPodSandbox", nil))
	for i := range Kept {
		if i == Kept-1 {
			first.AddContainer(operation(t, "CreateContainer", nil), "web", 0)
		}
		h.Record(Pod{ID: fmt.Sprint("p", i)}).AddPod(operation(t, "RunPodSandbox", nil))
	}
	if n := len(h.List()); n != Kept {
		t.Fatalf("%d starts", n)
	}
	_, err := h.Find("p0")
	testutil.WantError(t, err, codes.NotFound, "last 200 of this daemon")
	check(t, h, "first", "RunPodSandbox, CreateContainer web/0")
	check(t, h, "p1", "RunPodSandbox")
}

// A pod with thousands of containers keeps the newest.
func TestContainersAreBounded(t *testing.T) {
	t.Parallel()
	r := new(History).Record(Pod{ID: "p"})
	r.AddPod(operation(t, "RunPodSandbox", nil))
	for i := range 2 * maxContainerOperations {
		r.AddContainer(operation(t, "CreateContainer", nil), fmt.Sprint("c", i), 0)
	}
	all := r.Operations()
	last := len(all) - 1
	if last != maxContainerOperations || all[0].Object != "" || all[last].Object != fmt.Sprint("c", 2*maxContainerOperations-1) {
		t.Errorf("%d operations: %s", last+1, describe(all))
	}
}

// Pods of tests have no recording.
func TestNilRecording(t *testing.T) {
	var r *Recording
	r.AddPod(operation(t, "RunPodSandbox", nil))
	if r.Operations() != nil {
		t.Error("operations without a recording")
	}
}

func BenchmarkAdd(b *testing.B) {
	h := new(History)
	_, op := trace.Start(b.Context(), "StartContainer", nil)
	op.End()
	r := h.Record(Pod{ID: "p"})
	b.ReportAllocs()
	for b.Loop() {
		r.AddContainer(op, "web", 0)
	}
}
