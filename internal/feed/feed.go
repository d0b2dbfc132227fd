// Package feed distributes events to any number of readers, in order.
//
// # Contract
//
// Publish never waits. Each reader gets every item published between its Subscribe and its Close
// exactly once and in order, at its own pace. A slow reader delays neither the publisher nor other
// readers. A reader's unread items are kept up to a limit. Beyond it the reader gets ErrBehind and
// no further items, so that a gap is never silent.
package feed

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// ErrBehind means that the reader was too slow and misses items from here on.
var ErrBehind = errors.New("the reader is too far behind: items were dropped")

// Feed distributes items of one type. New creates it.
type Feed[T any] struct {
	limit int // items kept for each reader

	mu      sync.Mutex // guards readers and all readers' queues; held for list operations and while an item is created
	readers map[*Reader[T]]struct{}
}

// New returns a feed that keeps up to limit unread items for each reader.
func New[T any](limit int) *Feed[T] {
	return &Feed[T]{limit: limit, readers: map[*Reader[T]]struct{}{}}
}

// Publish gives an item to all readers. It calls make under the lock, and only if there are
// readers. So items that describe states come in the order of these states. make must be fast, must
// not wait and must not call the feed.
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

// Subscribe returns a reader of all future items. Its owner closes it.
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
	more chan struct{} // capacity 1: the queue may have changed

	// Guarded by the feed's lock:
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

// wake makes a waiting Next look again.
func (r *Reader[T]) wake() {
	select {
	case r.more <- struct{}{}:
	default: // an earlier wake is pending, and Next will see it
	}
}

// Next waits for the next item. The error is ErrBehind if items were dropped, or ctx's.
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
		r.queue[0] = none // so that the queue's memory does not keep it alive
		if r.queue = r.queue[1:]; len(r.queue) == 0 {
			r.queue = nil
		}
		return item, true, nil
	}
	return item, false, nil
}

// Close ends the subscription and frees its queue.
func (r *Reader[T]) Close() {
	r.feed.mu.Lock()
	defer r.feed.mu.Unlock()
	delete(r.feed.readers, r)
	r.queue = nil
}
