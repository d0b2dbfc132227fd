package history

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/testutil"
	"berth/internal/trace"
)

// run returns a history whose goroutine runs until the test or stop ends it.
func run(t *testing.T, dir string) (h *History, stop func()) {
	h = New(dir, slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); h.Run(ctx) }()
	stop = func() { cancel(); <-ended }
	t.Cleanup(stop)
	return h, stop
}

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
	s, err := h.Find(t.Context(), id)
	testutil.Must(t, err)
	if got := describe(s.Operations); got != want || s.ID != id {
		t.Errorf("start of %s: %s, want %s", s.ID, got, want)
	}
}

// The newest attempt of each container and the newest pull of each image are kept, also across
// daemons.
func TestStartHasNewestAttempts(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	h, stop := run(t, dir)
	pod := Pod{ID: "p", Namespace: "default", Name: "web"}
	r := h.Record(pod)
	r.AddPod(operation(t, "RunPodSandbox", nil))
	r.AddPull(operation(t, "PullImage", nil, "resolve"), "web")
	r.AddContainer(operation(t, "CreateContainer", nil), "web", 0)
	r.AddContainer(operation(t, "StartContainer", nil), "web", 0)
	check(t, h, "p", "RunPodSandbox, PullImage web, CreateContainer web/0, StartContainer web/0")
	r.AddPull(operation(t, "PullImage", nil), "web")
	r.AddContainer(operation(t, "CreateContainer", nil), "web", 1)
	check(t, h, "p", "RunPodSandbox, PullImage web, CreateContainer web/1")
	stop()

	h, stop = run(t, dir)
	check(t, h, "p", "RunPodSandbox, PullImage web, CreateContainer web/1")
	r = h.Adopt(pod)
	r.AddContainer(operation(t, "StartContainer", nil), "web", 1)
	check(t, h, "p", "RunPodSandbox, PullImage web, CreateContainer web/1, StartContainer web/1")
	r.AddContainer(operation(t, "CreateContainer", nil), "web", 2)
	stop() // writes the rest
	h, _ = run(t, dir)
	check(t, h, "p", "RunPodSandbox, PullImage web, CreateContainer web/2")
}

// berth run pulls before the pod exists. Its pulls wait for that pod.
func TestPullsWaitForTheirPod(t *testing.T) {
	t.Parallel()
	h, _ := run(t, t.TempDir())
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
	h, _ := run(t, t.TempDir())
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
	h, _ := run(t, t.TempDir())
	for i, failure := range []error{nil, errors.New("no")} {
		r := h.Record(Pod{ID: fmt.Sprint("p", i), Namespace: "default", Name: "web"})
		r.AddPod(operation(t, "RunPodSandbox", nil))
		r.AddPull(operation(t, "PullImage", nil), "web")
		r.AddContainer(operation(t, "CreateContainer", failure), "web", 0)
	}
	all, err := h.List(t.Context())
	testutil.Must(t, err)
	if len(all) != 2 || all[0].ID != "p1" || !all[0].Failed || all[1].Failed {
		t.Fatalf("%+v", all)
	}
	if s := all[1]; s.Containers != 1 || s.Pull <= 0 || s.Took <= s.Pull || s.Began.IsZero() {
		t.Errorf("%+v", s)
	}
}

// The oldest files are deleted.
func TestLastStartsAreKept(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	h, _ := run(t, dir)
	for i := range Kept + trimEvery {
		id := fmt.Sprintf("p%03d", i)
		h.Record(Pod{ID: id}).AddPod(operation(t, "RunPodSandbox", nil))
		testutil.Must(t, h.flush(t.Context()))
		at := time.Unix(int64(i), 0)
		testutil.Must(t, os.Chtimes(h.path(id), at, at))
	}
	all, err := h.List(t.Context())
	testutil.Must(t, err)
	if len(all) != Kept {
		t.Fatalf("%d starts", len(all))
	}
	ids, err := h.names()
	testutil.Must(t, err)
	if len(ids) >= Kept+trimEvery {
		t.Errorf("%d files", len(ids))
	}
	if _, err := h.Find(t.Context(), "p000"); errdefs.Code(err) != codes.NotFound {
		t.Errorf("the oldest start: %v", err)
	}
	check(t, h, fmt.Sprintf("p%03d", trimEvery), "RunPodSandbox")
}

// Damaged files and the rest of an interrupted write are deleted, and harm no other start.
func TestDamagedFilesAreDeleted(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	h, stop := run(t, dir)
	for _, id := range []string{"good", "empty", "cut", "flipped", "renamed"} {
		h.Record(Pod{ID: id}).AddPod(operation(t, "RunPodSandbox", nil))
	}
	stop()
	write := func(name string, data []byte) { testutil.Must(t, os.WriteFile(filepath.Join(dir, name), data, 0o600)) }
	content, err := os.ReadFile(h.path("flipped"))
	testutil.Must(t, err)
	content[len(content)-5] ^= 1
	write("flipped"+suffix, content)
	write("cut"+suffix, content[:len(content)/2])
	write("empty"+suffix, nil)
	write("large"+suffix, make([]byte, maxFile+1))
	write(tmpName, content)
	testutil.Must(t, os.Rename(h.path("renamed"), h.path("other")))

	h, stop = run(t, dir)
	all, err := h.List(t.Context())
	testutil.Must(t, err)
	if len(all) != 1 || all[0].ID != "good" {
		t.Errorf("%+v", all)
	}
	h.Record(Pod{ID: "new"}).AddPod(operation(t, "RunPodSandbox", nil))
	stop()
	entries, err := os.ReadDir(dir)
	testutil.Must(t, err)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if !slices.Equal(names, []string{"good.record", "new.record"}) {
		t.Errorf("left: %q", names)
	}
}

// A start is written when its operations have ended, without a request.
func TestCompleteStartIsWritten(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		h, _ := run(t, dir)
		exists := func() bool { _, err := os.Lstat(h.path("p")); return err == nil }
		_, running := trace.Start(t.Context(), "RunPodSandbox", nil)
		h.Record(Pod{ID: "p"}).AddPod(running)
		time.Sleep(10 * delay)
		synctest.Wait()
		if exists() {
			t.Error("a running operation was written")
		}
		running.End()
		time.Sleep(2 * delay)
		synctest.Wait()
		if !exists() {
			t.Error("the start was not written")
		}
	})
}

// Starts with very many spans fit, without the parts of the longest operations.
func TestLargeStartIsShortened(t *testing.T) {
	t.Parallel()
	h, _ := run(t, t.TempDir())
	r := h.Record(Pod{ID: "p"})
	r.AddPod(operation(t, "RunPodSandbox", nil, "plan"))
	parts := slices.Repeat([]string{strings.Repeat("x", 60)}, trace.MaxSpans-1)
	for i := range 60 {
		r.AddContainer(operation(t, "CreateContainer", nil, parts...), fmt.Sprint("c", i), 0)
	}
	s, err := h.Find(t.Context(), "p")
	testutil.Must(t, err)
	if len(s.Operations) != 61 || len(s.Operations[0].Spans) != 2 {
		t.Fatalf("%d operations, the first with %d spans", len(s.Operations), len(s.Operations[0].Spans))
	}
	missing := 0
	for _, o := range s.Operations {
		missing += o.Missing
		if len(o.Spans)+o.Missing != len(parts)+1 && o.Object != "" {
			t.Errorf("%d spans, %d missing", len(o.Spans), o.Missing)
		}
	}
	if missing == 0 {
		t.Error("nothing is missing")
	}
}

// A pod with thousands of containers keeps the newest, and its file is written in a few steps.
func TestContainersAreBounded(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	h, stop := run(t, dir)
	pod := Pod{ID: "p"}
	r := h.Record(pod)
	r.AddPod(operation(t, "RunPodSandbox", nil))
	create := func(from, to int) {
		for i := from; i < to; i++ {
			r.AddContainer(operation(t, "CreateContainer", nil), fmt.Sprint("c", i), 0)
		}
	}
	kept := func(want string) {
		t.Helper()
		s, err := h.Find(t.Context(), "p")
		testutil.Must(t, err)
		last := len(s.Operations) - 1
		if last != maxContainerOperations || s.Operations[0].Object != "" || s.Operations[last].Object != want {
			t.Errorf("%d operations: %s", last+1, describe(s.Operations))
		}
	}
	create(0, 2*maxContainerOperations)
	kept(fmt.Sprint("c", 2*maxContainerOperations-1))
	stop()

	h, _ = run(t, dir)
	r = h.Adopt(pod)
	create(2*maxContainerOperations, 2*maxContainerOperations+2)
	kept(fmt.Sprint("c", 2*maxContainerOperations+1))
}

// However many operations a start has, it is encoded few times.
func TestShorteningIsLogarithmic(t *testing.T) {
	t.Parallel()
	var s Start
	for range 1000 {
		s.Operations = append(s.Operations, trace.Operation{Spans: make([]trace.Shown, 2)})
	}
	whole := s
	steps := 0
	for n := 1; shorten(&s, n); n *= 2 {
		steps++
	}
	for _, o := range s.Operations {
		if len(o.Spans) != 1 || o.Missing != 1 {
			t.Fatalf("%d spans, %d missing after %d steps", len(o.Spans), o.Missing, steps)
		}
	}
	if steps > 11 || len(whole.Operations[0].Spans) != 2 {
		t.Errorf("%d steps; the caller's start has operations with %d spans", steps, len(whole.Operations[0].Spans))
	}
}

// Without a disk, starts are lost, and nothing else.
func TestUnwritableHistory(t *testing.T) {
	t.Parallel()
	h, _ := run(t, filepath.Join(t.TempDir(), "missing"))
	h.Record(Pod{ID: "p"}).AddPod(operation(t, "RunPodSandbox", nil))
	if _, err := h.List(t.Context()); err == nil {
		t.Error("a list without a folder")
	}
	var none *History
	r := none.Adopt(Pod{ID: "p"})
	r.AddPod(operation(t, "RunPodSandbox", nil))
	if r.Operations() != nil {
		t.Error("operations without a history")
	}
}

func BenchmarkAdd(b *testing.B) {
	h := New(b.TempDir(), slog.New(slog.DiscardHandler))
	_, op := trace.Start(b.Context(), "StartContainer", nil)
	op.End()
	r := h.Record(Pod{ID: "p"})
	b.ReportAllocs()
	for b.Loop() {
		r.AddContainer(op, "web", 0)
	}
}

func BenchmarkWrite(b *testing.B) {
	h := New(b.TempDir(), slog.New(slog.DiscardHandler))
	var operations []*trace.Trace
	for _, name := range []string{"RunPodSandbox", "CreateContainer", "StartContainer"} {
		ctx, op := trace.Start(b.Context(), name, nil)
		for range 20 {
			trace.Begin(ctx, "root filesystem").End()
		}
		op.End()
		operations = append(operations, op)
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		r := h.Record(Pod{ID: fmt.Sprint("p", i)})
		r.AddPod(operations[0])
		r.AddContainer(operations[1], "web", 0)
		r.AddContainer(operations[2], "web", 0)
		h.write(true)
	}
}
