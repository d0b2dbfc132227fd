package layer

import (
	"context"
	"sync"

	"github.com/opencontainers/go-digest"
)

// table indexes values on disk by digest. Only a key's owner changes its value, and others wait for
// the ownership. Readers never wait. They see a value from its completion until its removal begins.
// Its methods may be called concurrently.
type table[V any] struct {
	mu sync.Mutex // never held across disk access
	// +checklocks:mu
	items map[digest.Digest]*item[V]
}

type item[V any] struct {
	value *V            // nil: not visible
	busy  chan struct{} // closed when the owner is done; nil: no owner
}

// newTable returns an empty table.
func newTable[V any]() *table[V] { return &table[V]{items: map[digest.Digest]*item[V]{}} }

// Add adds an existing value during the load, when there are no owners.
func (t *table[V]) Add(key digest.Digest, v *V) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.items[key] = &item[V]{value: v}
}

// Get returns the visible value of a key, or nil.
func (t *table[V]) Get(key digest.Digest) *V {
	t.mu.Lock()
	defer t.mu.Unlock()
	if it := t.items[key]; it != nil {
		return it.value
	}
	return nil
}

// All returns all visible values, unordered.
func (t *table[V]) All() []*V {
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

// Acquire waits until key has no owner and makes the caller its owner, who must call Release. The
// error is ctx's.
func (t *table[V]) Acquire(ctx context.Context, key digest.Digest) (*owned[V], error) {
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
			return &owned[V]{t, key, it}, nil
		}
		t.mu.Unlock()
		select {
		case <-busy:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// owned is a key whose owner may change its value.
type owned[V any] struct {
	table *table[V]
	key   digest.Digest
	item  *item[V]
}

// Key returns the key.
func (o *owned[V]) Key() digest.Digest { return o.key }

// Value returns the visible value.
func (o *owned[V]) Value() *V { return o.table.Get(o.key) }

// Set makes v visible; nil hides the value.
func (o *owned[V]) Set(v *V) {
	o.table.mu.Lock()
	defer o.table.mu.Unlock()
	o.item.value = v
}

// Release ends the ownership.
func (o *owned[V]) Release() {
	o.table.mu.Lock()
	defer o.table.mu.Unlock()
	close(o.item.busy)
	o.item.busy = nil
	if o.item.value == nil {
		delete(o.table.items, o.key)
	}
}
