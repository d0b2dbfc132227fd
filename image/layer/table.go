package layer

import (
	"context"
	"sync"

	"github.com/opencontainers/go-digest"
)

// table is the index of one kind of things on disk. A thing is changed by one
// owner at a time, who holds its key while working on disk; others who want to
// change it wait. Readers see a thing from the moment it is complete to the moment
// its removal begins, and never wait.
type table[V any] struct {
	mu    sync.Mutex // guards items; never held across disk access
	items map[digest.Digest]*item[V]
}

type item[V any] struct {
	value *V            // nil: not visible
	busy  chan struct{} // closed when the owner is done; nil if there is none
}

func newTable[V any]() *table[V] { return &table[V]{items: map[digest.Digest]*item[V]{}} }

// get returns the thing named key, nil if there is none to be seen.
func (t *table[V]) get(key digest.Digest) *V {
	t.mu.Lock()
	defer t.mu.Unlock()
	if it := t.items[key]; it != nil {
		return it.value
	}
	return nil
}

// all returns everything to be seen, in no order.
func (t *table[V]) all() []*V {
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

// acquire waits until nobody changes key and makes the caller its owner, who
// must call release. The error is ctx's.
func (t *table[V]) acquire(ctx context.Context, key digest.Digest) (*owned[V], error) {
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

// owned is a key whose thing the holder may change.
type owned[V any] struct {
	table *table[V]
	key   digest.Digest
	item  *item[V]
}

// value is what readers see.
func (o *owned[V]) value() *V { return o.table.get(o.key) }

// set shows readers v, nil to hide it.
func (o *owned[V]) set(v *V) {
	o.table.mu.Lock()
	defer o.table.mu.Unlock()
	o.item.value = v
}

// release ends the ownership.
func (o *owned[V]) release() {
	o.table.mu.Lock()
	defer o.table.mu.Unlock()
	close(o.item.busy)
	o.item.busy = nil
	if o.item.value == nil {
		delete(o.table.items, o.key)
	}
}
