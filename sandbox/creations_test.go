package sandbox

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
)

// testMaker returns a maker whose objects cannot be removed.
func testMaker(make func() (string, error)) maker {
	return maker{Spawn: func(f func()) bool { go f(); return true }, Make: make}
}

func TestSameRequestJoinsRunningCreation(t *testing.T) {
	t.Parallel()
	var j creations
	var made int
	release := make(chan struct{})
	entered := make(chan struct{})
	mk := testMaker(func() (string, error) {
		made++
		close(entered)
		<-release
		return "id-1", nil
	})
	var callers sync.WaitGroup
	for range 8 {
		callers.Go(func() {
			id, err := j.Create(context.Background(), "pod a", fingerprint{1}, mk)
			if id != "id-1" || err != nil {
				t.Errorf("create: %q, %v", id, err)
			}
		})
	}
	<-entered
	gone, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := j.Create(gone, "pod a", fingerprint{1}, mk); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled caller: %v", err)
	}
	other := make(chan error, 1)
	go func() {
		_, err := j.Create(context.Background(), "pod a", fingerprint{2}, mk)
		other <- err
	}()
	if _, err := j.Create(gone, "pod a", fingerprint{2}, mk); !errors.Is(err, context.Canceled) {
		t.Errorf("other content during the creation, cancelled: %v", err)
	}
	close(release)
	if err := <-other; errdefs.Code(err) != codes.AlreadyExists {
		t.Errorf("other content during the creation: %v", err)
	}
	callers.Wait()
	if made != 1 {
		t.Errorf("made %d times", made)
	}
	if _, err := j.Create(context.Background(), "pod a", fingerprint{2}, mk); errdefs.Code(err) != codes.AlreadyExists {
		t.Errorf("other content after the creation: %v", err)
	}
}

func TestFailedCreationLeavesNothing(t *testing.T) {
	t.Parallel()
	var j creations
	fail := errors.New("no")
	for _, want := range []error{fail, nil} {
		_, err := j.Create(context.Background(), "pod a", fingerprint{}, testMaker(func() (string, error) { return "id", want }))
		if !errors.Is(err, want) {
			t.Errorf("create: %v, want %v", err, want)
		}
	}
	var closing creations
	if _, err := closing.Create(context.Background(), "pod a", fingerprint{}, maker{Spawn: func(func()) bool { return false }}); errdefs.Code(err) != codes.Unavailable {
		t.Errorf("create while closing: %v", err)
	}
	if len(closing.by) != 0 {
		t.Error("a creation that did not start was kept")
	}
}

// kubelet gives up after two minutes and retries with another path for the termination log.
func TestUndeliveredObjectIsReplaced(t *testing.T) {
	t.Parallel()
	var j creations
	proceed := make(chan struct{})
	gone, cancel := context.WithCancel(context.Background())
	cancel()
	_, err := j.Create(gone, "container a", fingerprint{1}, testMaker(func() (string, error) { <-proceed; return "first", nil }))
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("the first caller: %v", err)
	}
	var removed []string
	again := testMaker(func() (string, error) { return "second", nil })
	again.Remove = func(_ context.Context, id string) error {
		removed = append(removed, id)
		j.Forget("container a", id)
		return nil
	}
	close(proceed)
	id, err := j.Create(context.Background(), "container a", fingerprint{2}, again)
	if id != "second" || err != nil || len(removed) != 1 || removed[0] != "first" {
		t.Fatalf("the retry got %q, %v; removed %v", id, err, removed)
	}
	if _, err := j.Create(context.Background(), "container a", fingerprint{3}, again); errdefs.Code(err) != codes.AlreadyExists {
		t.Errorf("a delivered object: %v", err)
	}
}

func TestFailedReplacementIsRetried(t *testing.T) {
	t.Parallel()
	var j creations
	j.Adopt("container a", fingerprint{1}, "first")
	j.by["container a"].delivered = false
	fail := errors.New("busy")
	mk := testMaker(nil)
	mk.Remove = func(context.Context, string) error { return fail }
	for range 2 {
		if _, err := j.Create(context.Background(), "container a", fingerprint{2}, mk); !errors.Is(err, fail) {
			t.Errorf("got %v", err)
		}
	}
	mk.Remove = func(context.Context, string) error { return fmt.Errorf("container first: %w", errInUse) }
	if _, err := j.Create(context.Background(), "container a", fingerprint{2}, mk); errdefs.Code(err) != codes.AlreadyExists {
		t.Errorf("object in use: %v", err)
	}
	if id, err := j.Create(context.Background(), "container a", fingerprint{1}, mk); id != "first" || err != nil {
		t.Errorf("object in use, same content: %q, %v", id, err)
	}
}

// A client that requests a container during its removal must not receive the old ID.
func TestRequestWaitsForRemoval(t *testing.T) {
	t.Parallel()
	var j creations
	j.Adopt("container a", fingerprint{1}, "first")
	j.Going("container a", "another") // of an older object: no effect
	if id, err := j.Create(t.Context(), "container a", fingerprint{1}, testMaker(nil)); id != "first" || err != nil {
		t.Fatalf("before its removal: %q, %v", id, err)
	}
	j.Going("container a", "first")
	fail := errors.New("the disk is full")
	tries := 0
	mk := testMaker(func() (string, error) { return "second", nil })
	mk.Remove = func(_ context.Context, id string) error {
		if tries++; tries == 1 {
			return fail
		}
		j.Forget("container a", id)
		return nil
	}
	if id, err := j.Create(t.Context(), "container a", fingerprint{1}, mk); !errors.Is(err, fail) {
		t.Errorf("failed removal: %q, %v", id, err)
	}
	for range 2 {
		if id, err := j.Create(t.Context(), "container a", fingerprint{1}, mk); id != "second" || err != nil {
			t.Errorf("after the removal: %q, %v", id, err)
		}
	}
	if tries != 2 {
		t.Errorf("removed in %d tries", tries)
	}
}

// A caller with the old content must not receive the ID during the removal either.
func TestRemovedObjectIsNotDelivered(t *testing.T) {
	t.Parallel()
	var j creations
	j.Adopt("container a", fingerprint{1}, "first")
	j.by["container a"].delivered = false
	removing, proceed := make(chan struct{}), make(chan struct{})
	replacing := testMaker(func() (string, error) { return "second", nil })
	replacing.Remove = func(_ context.Context, id string) error {
		close(removing)
		<-proceed
		j.Forget("container a", id)
		return nil
	}
	gone, cancel := context.WithCancel(context.Background())
	go func() { <-removing; cancel() }()
	if _, err := j.Create(gone, "container a", fingerprint{2}, replacing); !errors.Is(err, context.Canceled) {
		t.Errorf("the replacing caller gave up: %v", err)
	}
	got := make(chan string, 1)
	go func() {
		id, err := j.Create(context.Background(), "container a", fingerprint{1}, testMaker(func() (string, error) { return "third", nil }))
		if err != nil {
			t.Error(err)
		}
		got <- id
	}()
	close(proceed)
	if id := <-got; id != "third" {
		t.Errorf("got the removed object %q", id)
	}
}

func TestForgetIgnoresOtherID(t *testing.T) {
	t.Parallel()
	var j creations
	j.Adopt("pod a", fingerprint{1}, "new")
	j.Forget("pod a", "old")
	if j.by["pod a"] == nil {
		t.Fatal("the removal of an older object freed the identity of the newer")
	}
	j.Forget("pod a", "new")
	if j.by["pod a"] != nil {
		t.Fatal("the identity is not free")
	}
}
