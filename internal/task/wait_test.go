package task

import (
	"context"
	"log/slog"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"berth/internal/testutil"
)

func TestNilWaitsRecordNothing(t *testing.T) {
	t.Parallel()
	var w *Waits
	w.Begin("x", "y")()
	if w.List() != nil {
		t.Error("a nil Waits lists waits")
	}
}

func TestLimitsOfWaits(t *testing.T) {
	t.Parallel()
	w := new(Waits)
	w.SetLimit(2 * time.Second)
	for what, begin := range map[string]func(what, object string) func(){
		"usual": w.Begin,
		"own":   func(what, object string) func() { return w.BeginUpTo(time.Hour, what, object) },
		"none":  func(what, object string) func() { return w.BeginUpTo(0, what, object) },
		"most":  func(what, object string) func() { return w.BeginUpTo(math.MaxInt64-1, what, object) },
		"open":  w.BeginOpen,
	} {
		defer begin(what, "object")()
	}
	want := map[string]time.Duration{"usual": 2 * time.Second, "own": time.Hour + slack, "none": slack, "most": math.MaxInt64 - 1, "open": 0}
	for _, wait := range w.List() {
		if wait.Limit != want[wait.What] {
			t.Errorf("%s: limit %v", wait.What, wait.Limit)
		}
		if late := wait.Since.Add(2 * time.Hour); wait.Overdue(late) != (wait.What != "open" && wait.What != "most") || wait.Overdue(wait.Since) {
			t.Errorf("%s: overdue", wait.What)
		}
	}
}

func TestWatchLogsEachOverdueWaitOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var out testutil.Buffer // the race detector does not accept synctest.Wait as synchronization
		w := new(Waits)
		w.SetLimit(10 * time.Second)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); w.Watch(ctx, slog.New(slog.NewTextHandler(&out, nil))) }()
		logged := func(d time.Duration) string {
			time.Sleep(d)
			synctest.Wait()
			return out.Take()
		}
		endFirst, endOther := w.Begin("a plugin", "pod 1"), w.Begin("a disk", "pod 2")
		w.Begin("something short", "pod 3")()
		w.BeginOpen("a client", "pod 4")
		if text := logged(9 * time.Second); text != "" {
			t.Errorf("before the limit: %s", text)
		}
		text := logged(5 * time.Second)
		for _, want := range []string{`what="a plugin" object="pod 1"`, `what="a disk" object="pod 2"`, "limit=10s", "TestWatch"} {
			if !strings.Contains(text, want) {
				t.Errorf("no %q in %.1000s", want, text)
			}
		}
		if n := strings.Count(text, "stacks="); n != 1 || w.PassedLimit() != 2 {
			t.Errorf("stacks %d times, %d waits counted", n, w.PassedLimit())
		}
		if text := logged(time.Minute); text != "" {
			t.Errorf("logged again: %.200s", text)
		}
		endFirst()
		w.Begin("another", "pod 5")
		if text := logged(12 * time.Second); strings.Count(text, "stacks=") != 1 || !strings.Contains(text, "pod 5") || strings.Contains(text, "pod 2") {
			t.Errorf("a minute later: %.200s", text)
		}
		if age := time.Since(w.LastCheck()); age > WatchPeriod {
			t.Errorf("the last check of Watch was %v ago", age)
		}
		endOther()
		cancel()
		<-ended
	})
}

func TestWatchSleepsWithoutLimitedWaits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var out testutil.Buffer
		w := new(Waits)
		w.SetLimit(10 * time.Second)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); w.Watch(ctx, slog.New(slog.NewTextHandler(&out, nil))) }()
		w.BeginOpen("a client", "pod 1")
		time.Sleep(time.Hour)
		if age := time.Since(w.LastCheck()); age < time.Hour-2*WatchPeriod {
			t.Errorf("the last check of Watch was %v ago", age)
		}
		w.CheckSoon()
		time.Sleep(WatchPeriod)
		if age := time.Since(w.LastCheck()); age > WatchPeriod {
			t.Errorf("after CheckSoon the last check of Watch was %v ago", age)
		}
		time.Sleep(time.Hour)
		w.Begin("a plugin", "pod 2")
		time.Sleep(12 * time.Second)
		synctest.Wait()
		if text := out.Take(); !strings.Contains(text, "a plugin") || w.PassedLimit() != 1 {
			t.Errorf("a wait that began after a pause is not watched: %.200s", text)
		}
		cancel()
		<-ended
	})
}
