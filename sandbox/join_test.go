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
			id, err := j.create(context.Background(), "pod a", fingerprint{1}, start)
			if id != "id-1" || err != nil {
				t.Errorf("create: %q, %v", id, err)
			}
		})
	}
	<-entered
	gone, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := j.create(gone, "pod a", fingerprint{1}, start); !errors.Is(err, context.Canceled) {
		t.Errorf("a caller that goes away: %v", err)
	}
	if _, err := j.create(context.Background(), "pod a", fingerprint{2}, start); errdefs.Code(err) != codes.AlreadyExists {
		t.Errorf("another content while running: %v", err)
	}
	close(release)
	callers.Wait()
	if made != 1 {
		t.Errorf("made %d times", made)
	}
	if _, err := j.create(context.Background(), "pod a", fingerprint{2}, start); errdefs.Code(err) != codes.AlreadyExists {
		t.Errorf("another content afterwards: %v", err)
	}
}

func TestFailedCreationLeavesNoTrace(t *testing.T) {
	var j joiner
	fail := errors.New("no")
	for _, want := range []error{fail, nil} {
		_, err := j.create(context.Background(), "pod a", fingerprint{}, func(finish func(string, error)) bool {
			finish("id", want)
			return true
		})
		if !errors.Is(err, want) {
			t.Errorf("create: %v, want %v", err, want)
		}
	}
	var closing joiner
	if _, err := closing.create(context.Background(), "pod a", fingerprint{}, func(func(string, error)) bool { return false }); errdefs.Code(err) != codes.Unavailable {
		t.Errorf("create while closing: %v", err)
	}
	if len(closing.by) != 0 {
		t.Error("a creation that never began is still there")
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
