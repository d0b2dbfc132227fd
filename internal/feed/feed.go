// Package feed tells any number of readers what happens, in order.
//
// # Contract
//
// Publish never waits. Each reader gets every item published between its Subscribe
// and its Close exactly once and in order, at its own pace; none can slow the
// publisher or another reader. What a reader has not read is kept for it up to a
// limit. One that falls further behind is told so by ErrBehind, and gets nothing more:
// a gap is never silent.
package feed

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// ErrBehind tells a reader that it was too slow: items are missing from here on.
var ErrBehind = errors.New("the reader is too far behind: items were dropped")

// Feed distributes items of one kind. Make it with New.
type Feed[T any] struct {
	limit int // items kept for each reader

	mu      sync.Mutex // guards what follows and all readers' queues; held for list operations and for making an item
	readers map[*Reader[T]]struct{}
}

// New returns a feed that keeps up to limit unread items for each reader.
func New[T any](limit int) *Feed[T] {
	return &Feed[T]{limit: limit, readers: map[*Reader[T]]struct{}{}}
}

// Publish gives an item to all readers. Without readers it costs next to nothing; make is
// called only if there are some. It is called under the lock, so that items which show the
// state of things come in the order of their states: it must be quick, wait for nothing and
// not call the feed.
func (f *Feed[T]) Publish(make func() T) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.readers) == 0 {
		return
	}
	item := make()
	for r := range f.readers {
		r.add(item, f.limit)
	}
}

// Subscribe returns a reader of all items published from now on. Its owner closes it.
func (f *Feed[T]) Subscribe() *Reader[T] {
	r := &Reader[T]{feed: f, more: make(chan struct{}, 1)}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.readers[r] = struct{}{}
	return r
}

// Reader is one subscription. Next is for one goroutine at a time.
type Reader[T any] struct {
	feed *Feed[T]
	more chan struct{} // capacity 1: there may be something new to see

	// Under the feed's lock:
	queue  []T
	behind bool
}

// add needs the feed's lock.
func (r *Reader[T]) add(item T, limit int) {
	if r.behind {
		return
	}
	if len(r.queue) >= limit {
		r.queue, r.behind = nil, true
	} else {
		r.queue = append(r.queue, item)
	}
	r.wake()
}

// wake makes a waiting Next look.
func (r *Reader[T]) wake() {
	select {
	case r.more <- struct{}{}:
	default: // it has not looked since the last time, and will
	}
}

// Next waits for the next item. ErrBehind when items were dropped, or ctx's error.
func (r *Reader[T]) Next(ctx context.Context) (T, error) {
	for {
		item, ok, err := r.pop()
		if ok || err != nil {
			return item, err
		}
		select {
		case <-r.more:
		case <-ctx.Done():
			return item, fmt.Errorf("wait for the next item: %w", ctx.Err())
		}
	}
}

func (r *Reader[T]) pop() (item T, ok bool, err error) {
	r.feed.mu.Lock()
	defer r.feed.mu.Unlock()
	switch {
	case r.behind:
		return item, false, ErrBehind
	case len(r.queue) > 0:
		item = r.queue[0]
		var none T
		r.queue[0] = none // or it would live as long as the queue's memory
		if r.queue = r.queue[1:]; len(r.queue) == 0 {
			r.queue = nil
		}
		return item, true, nil
	}
	return item, false, nil
}

// Close ends the subscription and frees what was kept for it.
func (r *Reader[T]) Close() {
	r.feed.mu.Lock()
	defer r.feed.mu.Unlock()
	delete(r.feed.readers, r)
	r.queue = nil
}
