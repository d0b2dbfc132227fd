package state

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// ErrBehind means that the reader was too slow and misses items from here on.
var ErrBehind = errors.New("the reader is too far behind: items were dropped")

// Feed distributes items of one type to any number of readers. Each reader gets every item
// published between its Subscribe and its Close exactly once and in order.
//
// A slow reader delays neither the publisher nor other readers. The feed keeps a limited number of
// unread items for each reader. A reader that exceeds the limit gets ErrBehind and no further
// items, so that a gap is never silent.
type Feed[T any] struct {
	limit int // items kept for each reader

	mu sync.Mutex // guards readers and their queues; held while an item is created
	// +checklocks:mu
	readers map[*FeedReader[T]]struct{}
}

// NewFeed returns a feed that keeps up to limit unread items for each reader.
func NewFeed[T any](limit int) *Feed[T] {
	return &Feed[T]{limit: limit, readers: map[*FeedReader[T]]struct{}{}}
}

// Publish gives an item to all readers, without waiting for them. It calls make only if the feed
// has readers. It holds the lock meanwhile, so that items which describe states are queued in the
// order of the states. make must be fast. It must not wait, and must not call the feed.
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

// Subscribe returns a reader of all future items. The caller closes it.
func (f *Feed[T]) Subscribe() *FeedReader[T] {
	r := &FeedReader[T]{feed: f, more: make(chan struct{}, 1)}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.readers[r] = struct{}{}
	return r
}

// FeedReader is one subscription. One goroutine at a time may call Next.
type FeedReader[T any] struct {
	feed *Feed[T]
	more chan struct{} // capacity 1: the queue may have changed

	// The feed's lock guards the fields below.
	queue  []T
	behind bool
}

// add appends an item to the queue. The caller holds the feed's lock.
func (r *FeedReader[T]) add(item T, limit int) {
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

// wake makes a waiting Next check the queue again.
func (r *FeedReader[T]) wake() {
	select {
	case r.more <- struct{}{}:
	default: // an earlier wake is pending, and Next will see it
	}
}

// Next waits for the next item. The error is ErrBehind if items were dropped, or ctx's.
func (r *FeedReader[T]) Next(ctx context.Context) (T, error) {
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

func (r *FeedReader[T]) pop() (item T, ok bool, err error) {
	r.feed.mu.Lock()
	defer r.feed.mu.Unlock()
	switch {
	case r.behind:
		return item, false, ErrBehind
	case len(r.queue) > 0:
		item = r.queue[0]
		var none T
		r.queue[0] = none // lets the garbage collector free the item
		if r.queue = r.queue[1:]; len(r.queue) == 0 {
			r.queue = nil
		}
		return item, true, nil
	}
	return item, false, nil
}

// Close ends the subscription and frees its queue.
func (r *FeedReader[T]) Close() {
	r.feed.mu.Lock()
	defer r.feed.mu.Unlock()
	delete(r.feed.readers, r)
	r.queue = nil
}
