package state

import (
	"context"
	"errors"
	"sync"
	"testing"
)

func publish(f *Feed[int], from, to int) {
	for n := from; n < to; n++ {
		f.Publish(func() int { return n })
	}
}

func TestEveryReaderGetsEverythingInOrder(t *testing.T) {
	t.Parallel()
	const count = 1000
	f := NewFeed[int](count)
	var readers sync.WaitGroup
	for range 8 {
		r := f.Subscribe()
		readers.Go(func() {
			defer r.Close()
			for want := range count {
				if got, err := r.Next(context.Background()); got != want || err != nil {
					t.Errorf("item %d: %d, %v", want, got, err)
					return
				}
			}
		})
	}
	publish(f, 0, count)
	readers.Wait()
	if len(f.readers) != 0 {
		t.Errorf("%d readers left", len(f.readers))
	}
}

func TestSlowReaderGetsErrBehindAlone(t *testing.T) {
	t.Parallel()
	f := NewFeed[int](2)
	slow, quick := f.Subscribe(), f.Subscribe()
	defer slow.Close()
	defer quick.Close()
	for n := range 10 {
		publish(f, n, n+1)
		if got, err := quick.Next(context.Background()); got != n || err != nil {
			t.Fatalf("the quick reader: %d, %v", got, err)
		}
	}
	for range 2 { // the error persists
		if _, err := slow.Next(context.Background()); !errors.Is(err, ErrBehind) {
			t.Errorf("the slow reader: %v", err)
		}
	}
	if slow.queue != nil {
		t.Error("items are kept for a reader that is too far behind")
	}
}

func TestNoItemIsCreatedWithoutReaders(t *testing.T) {
	t.Parallel()
	f := NewFeed[int](1)
	f.Publish(func() int { t.Error("made"); return 0 })
	r := f.Subscribe()
	r.Close()
	f.Publish(func() int { t.Error("created after the last reader closed"); return 0 })
}

func TestNextEndsWithItsContext(t *testing.T) {
	t.Parallel()
	f := NewFeed[int](1)
	r := f.Subscribe()
	defer r.Close()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := r.Next(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	publish(f, 7, 8)
	if got, err := r.Next(ctx); got != 7 || err != nil { // a queued item needs no waiting
		t.Errorf("got %d, %v", got, err)
	}
}
