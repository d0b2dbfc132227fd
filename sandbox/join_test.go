package sandbox

import (
	"context"
	"errors"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
)

func TestJoinRunningCreation(t *testing.T) {
	var j joiner
	var made int
	release := make(chan struct{})
	entered := make(chan struct{})
	start := func(finish func(string, error)) bool {
		made++
		go func() { close(entered); <-release; finish("id-1", nil) }()
		return true
	}
	var callers sync.WaitGroup
	for range 8 {
		callers.Go(func() {
			id, err := j.create(context.Background(), "pod a", fingerprint{1}, maker{start: start})
			if id != "id-1" || err != nil {
				t.Errorf("create: %q, %v", id, err)
			}
		})
	}
	<-entered
	gone, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := j.create(gone, "pod a", fingerprint{1}, maker{start: start}); !errors.Is(err, context.Canceled) {
		t.Errorf("a caller that goes away: %v", err)
	}
	other := make(chan error, 1)
	go func() {
		_, err := j.create(context.Background(), "pod a", fingerprint{2}, maker{start: start})
		other <- err
	}()
	if _, err := j.create(gone, "pod a", fingerprint{2}, maker{start: start}); !errors.Is(err, context.Canceled) {
		t.Errorf("another content while running, given up: %v", err)
	}
	close(release)
	if err := <-other; errdefs.Code(err) != codes.AlreadyExists {
		t.Errorf("another content while running: %v", err)
	}
	callers.Wait()
	if made != 1 {
		t.Errorf("made %d times", made)
	}
	if _, err := j.create(context.Background(), "pod a", fingerprint{2}, maker{start: start}); errdefs.Code(err) != codes.AlreadyExists {
		t.Errorf("another content afterwards: %v", err)
	}
}

func TestFailedCreationLeavesNoTrace(t *testing.T) {
	var j joiner
	fail := errors.New("no")
	for _, want := range []error{fail, nil} {
		_, err := j.create(context.Background(), "pod a", fingerprint{}, maker{start: func(finish func(string, error)) bool {
			finish("id", want)
			return true
		}})
		if !errors.Is(err, want) {
			t.Errorf("create: %v, want %v", err, want)
		}
	}
	var closing joiner
	if _, err := closing.create(context.Background(), "pod a", fingerprint{}, maker{start: func(func(string, error)) bool { return false }}); errdefs.Code(err) != codes.Unavailable {
		t.Errorf("create while closing: %v", err)
	}
	if len(closing.by) != 0 {
		t.Error("a creation that never began is still there")
	}
}

// kubelet gives up after two minutes and asks again, with another path for the
// termination log.
func TestObjectNobodyWasToldOfIsReplaced(t *testing.T) {
	var j joiner
	finishFirst := make(chan func(string, error), 1)
	gone, cancel := context.WithCancel(context.Background())
	cancel()
	_, err := j.create(gone, "container a", fingerprint{1}, maker{start: func(finish func(string, error)) bool {
		finishFirst <- finish
		return true
	}})
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("the first caller: %v", err)
	}
	var removed []string
	again := maker{
		start: func(finish func(string, error)) bool { finish("second", nil); return true },
		remove: func(_ context.Context, id string) error {
			removed = append(removed, id)
			j.forget("container a", id)
			return nil
		},
	}
	(<-finishFirst)("first", nil)
	id, err := j.create(context.Background(), "container a", fingerprint{2}, again)
	if id != "second" || err != nil || len(removed) != 1 || removed[0] != "first" {
		t.Fatalf("the retry got %q, %v; removed %v", id, err, removed)
	}
	if _, err := j.create(context.Background(), "container a", fingerprint{3}, again); errdefs.Code(err) != codes.AlreadyExists {
		t.Errorf("one that somebody was told of: %v", err)
	}
}

func TestReplacementThatFailsIsTriedAgain(t *testing.T) {
	var j joiner
	c, _ := j.enter("container a", fingerprint{1})
	c.waiting-- // its caller is gone
	j.finish("container a", c, "first", nil)
	fail := errors.New("busy")
	for range 2 {
		_, err := j.create(context.Background(), "container a", fingerprint{2}, maker{remove: func(context.Context, string) error { return fail }})
		if !errors.Is(err, fail) {
			t.Errorf("got %v", err)
		}
	}
}

func TestForgetOnlyOwnID(t *testing.T) {
	var j joiner
	j.adopt("pod a", fingerprint{1}, "new")
	j.forget("pod a", "old")
	if j.by["pod a"] == nil {
		t.Fatal("the removal of an older object freed the identity of the newer")
	}
	j.forget("pod a", "new")
	if j.by["pod a"] != nil {
		t.Fatal("the identity is not free")
	}
}
