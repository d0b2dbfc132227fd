package task

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/testutil"
)

func testRunner(t *testing.T) *Runner {
	r := NewRunner(slog.New(slog.DiscardHandler), new(Waits))
	t.Cleanup(func() {
		for _, l := range []*Lifetime{r.Operations, r.Background, r.Watchers} {
			l.Cancel()
			if err := l.Wait(context.Background()); err != nil {
				t.Error(err)
			}
		}
	})
	return r
}

func TestLockIsAwaitedAndNamed(t *testing.T) {
	t.Parallel()
	r, lock := testRunner(t), NewLock()
	pass, err := r.Acquire(context.Background(), lock, "start", "container 1")
	testutil.Must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	second := make(chan error, 1)
	go func() {
		_, err := r.Acquire(ctx, lock, "remove", "container 1")
		second <- err
	}()
	for len(r.Waits()) == 0 { // until the second waits
		select {
		case err := <-second:
			t.Fatalf("the second did not wait: %v", err)
		default:
		}
	}
	if w := r.Waits()[0]; w.What != "lock to remove" || w.Object != "container 1" || w.Since.IsZero() {
		t.Errorf("wait: %+v", w)
	}
	cancel()
	if err := <-second; !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "container 1") {
		t.Errorf("given up: %v", err)
	}
	if w := r.Waits(); len(w) != 0 {
		t.Errorf("waits left: %v", w)
	}
	pass()
	pass, err = r.Acquire(context.Background(), lock, "start", "container 1")
	testutil.Must(t, err)
	pass()
}

func TestDetachedOperationOutlivesCaller(t *testing.T) {
	t.Parallel()
	r := testRunner(t)
	gone, cancel := context.WithCancel(context.Background())
	entered, proceed, ended := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		<-entered
		cancel()
	}()
	err := r.Detach(gone, time.Minute, "stop", "pod 1", func(ctx context.Context) error {
		close(entered)
		<-proceed
		ended <- ctx.Err()
		return nil
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("the caller got %v", err)
	}
	if w := r.Waits(); len(w) != 1 || w[0].What != "stop" || w[0].Object != "pod 1" || w[0].Limit != time.Minute+slack {
		t.Errorf("after its caller gave up the waits are %+v", w)
	}
	close(proceed)
	if err := <-ended; err != nil {
		t.Errorf("the operation was cancelled with its caller: %v", err)
	}
	r.Operations.Close()
	if err := r.Operations.Wait(t.Context()); err != nil {
		t.Error(err)
	}
	if w := r.Waits(); len(w) != 0 {
		t.Errorf("waits left: %v", w)
	}
}

func TestDetachEndsItsWaitBeforeItReturns(t *testing.T) {
	t.Parallel()
	r := testRunner(t)
	for range 100 {
		testutil.Must(t, r.Detach(context.Background(), time.Minute, "stop", "pod 1", func(context.Context) error { return nil }))
		if w := r.Waits(); len(w) != 0 {
			t.Fatalf("waits: %v", w)
		}
	}
}

func TestPanicBecomesInternalError(t *testing.T) {
	t.Parallel()
	r := testRunner(t)
	err := r.Detach(context.Background(), time.Minute, "stop", "pod 1", func(context.Context) error { panic("oh") })
	if errdefs.Code(err) != codes.Internal || !strings.Contains(err.Error(), "oh") {
		t.Errorf("got %v", err)
	}
}

func TestBackgroundRetriesEndWithLifetime(t *testing.T) {
	t.Parallel()
	r := testRunner(t)
	failing := make(chan struct{}, 1)
	r.RetryInBackground("undo", "pod 1", func(context.Context) error {
		failing <- struct{}{}
		return errors.New("no")
	})
	<-failing
	r.Background.Cancel() // during the pause before the next attempt, or earlier
	if err := r.Background.Wait(context.Background()); err != nil {
		t.Error(err)
	}
}

func TestParallelJoinsErrorsAndPanics(t *testing.T) {
	t.Parallel()
	r := testRunner(t)
	no := errors.New("no")
	err := r.Parallel("take down", "pod 1", func() error { return no }, func() error { panic("oh") }, func() error { return nil })
	if !errors.Is(err, no) || !strings.Contains(err.Error(), "oh") {
		t.Errorf("got %v", err)
	}
}

func TestOperationsAreRefusedWhileClosing(t *testing.T) {
	t.Parallel()
	r := testRunner(t)
	r.Operations.Close()
	ran := false
	err := r.DetachStep(context.Background(), time.Minute, "look at", "/volume", func() error { ran = true; return nil })
	if err != nil || !ran { // an operation in progress needs the step to complete
		t.Errorf("DetachStep: %t, %v", ran, err)
	}
	err = r.Detach(context.Background(), time.Minute, "stop", "pod 1", func(context.Context) error { t.Error("ran"); return nil })
	if errdefs.Code(err) != codes.Unavailable {
		t.Errorf("got %v", err)
	}
}
