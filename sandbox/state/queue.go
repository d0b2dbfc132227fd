package state

import (
	"context"
	"fmt"
	"sync"
)

// Queue passes items from any number of goroutines to one reader, in order. Writers never wait. It
// has no limit, so its reader must not wait for clients.
type Queue[T any] struct {
	more chan struct{} // capacity 1: there may be items

	mu sync.Mutex // guards items; held while an item is created
	// +checklocks:mu
	items []T
}

// NewQueue returns an empty queue.
func NewQueue[T any]() *Queue[T] { return &Queue[T]{more: make(chan struct{}, 1)} }

// Put appends the item that make returns. It holds the lock meanwhile, so that items which describe
// states are queued in the order of the states. make must be fast. It must not wait, and must not
// call the queue.
func (q *Queue[T]) Put(make func() T) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.items = append(q.items, make())
	select {
	case q.more <- struct{}{}:
	default: // the reader will see this item with an earlier one
	}
}

// Next waits for items and returns all of them. The error is ctx's.
func (q *Queue[T]) Next(ctx context.Context) ([]T, error) {
	select {
	case <-q.more:
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for the next item: %w", ctx.Err())
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	items := q.items
	q.items = nil
	return items, nil
}
