// Package table is the index of things on disk, by digest.
//
// # Contract
//
// A thing is changed by one owner at a time, who holds its key while working on disk; others who want to change it wait. Readers see a thing from the
// moment it is complete to the moment its removal begins, and never wait.
package table

import (
	"context"
	"sync"

	"github.com/opencontainers/go-digest"
)

// Table is the index of one kind of things. Its methods may be called concurrently.
type Table[V any] struct {
	mu    sync.Mutex // guards items; never held across disk access
	items map[digest.Digest]*item[V]
}

type item[V any] struct {
	value *V            // nil: not visible
	busy  chan struct{} // closed when the owner is done; nil if there is none
}

// New returns a Table with nothing in it.
func New[V any]() *Table[V] { return &Table[V]{items: map[digest.Digest]*item[V]{}} }

// Add adds a thing that is there already, before there are owners.
func (t *Table[V]) Add(key digest.Digest, v *V) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.items[key] = &item[V]{value: v}
}

// Get returns the thing named key, nil if there is none to be seen.
func (t *Table[V]) Get(key digest.Digest) *V {
	t.mu.Lock()
	defer t.mu.Unlock()
	if it := t.items[key]; it != nil {
		return it.value
	}
	return nil
}

// All returns everything to be seen, in no order.
func (t *Table[V]) All() []*V {
	t.mu.Lock()
	defer t.mu.Unlock()
	values := make([]*V, 0, len(t.items))
	for _, it := range t.items {
		if it.value != nil {
			values = append(values, it.value)
		}
	}
	return values
}

// Acquire waits until nobody changes key and makes the caller its owner, who
// must call Release. The error is ctx's.
func (t *Table[V]) Acquire(ctx context.Context, key digest.Digest) (*Owned[V], error) {
	for {
		t.mu.Lock()
		it := t.items[key]
		if it == nil {
			it = &item[V]{}
			t.items[key] = it
		}
		busy := it.busy
		if busy == nil {
			it.busy = make(chan struct{})
			t.mu.Unlock()
			return &Owned[V]{t, key, it}, nil
		}
		t.mu.Unlock()
		select {
		case <-busy:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// Owned is a key whose thing the holder may change.
type Owned[V any] struct {
	table *Table[V]
	key   digest.Digest
	item  *item[V]
}

// Key is the thing's.
func (o *Owned[V]) Key() digest.Digest { return o.key }

// Value is what readers see.
func (o *Owned[V]) Value() *V { return o.table.Get(o.key) }

// Set shows readers v, nil to hide it.
func (o *Owned[V]) Set(v *V) {
	o.table.mu.Lock()
	defer o.table.mu.Unlock()
	o.item.value = v
}

// Release ends the ownership.
func (o *Owned[V]) Release() {
	o.table.mu.Lock()
	defer o.table.mu.Unlock()
	close(o.item.busy)
	o.item.busy = nil
	if o.item.value == nil {
		delete(o.table.items, o.key)
	}
}
