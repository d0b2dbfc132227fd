package fair

import (
	"context"
	"fmt"
	"sync"
)

// Slots are a number of slots. The methods may be called concurrently.
type Slots struct {
	mu sync.Mutex
	// +checklocks:mu
	free int
	// +checklocks:mu
	by map[string]int // slots in use, by owner
	// +checklocks:mu
	freed chan struct{} // closed at the next release
}

// NewSlots returns a number of free slots.
func NewSlots(most int) *Slots {
	return &Slots{free: most, by: map[string]int{}, freed: make(chan struct{})}
}

// Acquire waits for a slot for an owner until ctx ends. It takes a free slot even if ctx has ended.
// The caller calls release once.
func (t *Slots) Acquire(ctx context.Context, owner string) (release func(), err error) {
	for {
		freed, ok := t.try(owner)
		if ok {
			return func() { t.release(owner) }, nil
		}
		select {
		case <-freed:
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for a slot: %w", ctx.Err())
		}
	}
}

// TryAcquire takes a slot if one is free and does not wait.
func (t *Slots) TryAcquire(owner string) (release func(), ok bool) {
	if _, ok := t.try(owner); !ok {
		return nil, false
	}
	return func() { t.release(owner) }, true
}

// Taken returns the number of slots in use.
func (t *Slots) Taken() (n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, of := range t.by {
		n += of
	}
	return n
}

// try takes a slot. If the owner may not have a slot now, it returns a channel that is closed at
// the next release.
func (t *Slots) try(owner string) (freed <-chan struct{}, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.by[owner] >= t.free {
		return t.freed, false
	}
	t.free--
	t.by[owner]++
	return nil, true
}

func (t *Slots) release(owner string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.free++
	if t.by[owner]--; t.by[owner] == 0 {
		delete(t.by, owner)
	}
	close(t.freed)
	t.freed = make(chan struct{})
}
