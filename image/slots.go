package image

import (
	"context"
	"fmt"
	"sync"
)

// unpackSlots limits concurrent unpack processes. A layer occupies its slot until its registry has
// sent it. A registry gets a slot only if it holds fewer slots than are free, so slow registries do
// not starve others.
type unpackSlots struct {
	mu    sync.Mutex // guards all fields below
	free  int
	by    map[string]int // slots in use, by registry
	freed chan struct{}  // closed at the next release
}

func newUnpackSlots(most int) *unpackSlots {
	return &unpackSlots{free: most, by: map[string]int{}, freed: make(chan struct{})}
}

// acquire waits for a slot for a layer of a registry. The caller releases it.
func (t *unpackSlots) acquire(ctx context.Context, registry string) (release func(), err error) {
	for {
		freed, ok := t.try(registry)
		if ok {
			return func() { t.release(registry) }, nil
		}
		select {
		case <-freed:
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for an unpack slot: %w", ctx.Err())
		}
	}
}

// tryAcquire takes a slot if one is free and does not wait.
func (t *unpackSlots) tryAcquire(registry string) (release func(), ok bool) {
	if _, ok := t.try(registry); !ok {
		return nil, false
	}
	return func() { t.release(registry) }, true
}

// try takes a slot. If the registry may not have one, it returns a channel that is closed at the
// next release.
func (t *unpackSlots) try(registry string) (freed <-chan struct{}, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.by[registry] >= t.free {
		return t.freed, false
	}
	t.free--
	t.by[registry]++
	return nil, true
}

func (t *unpackSlots) release(registry string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.free++
	if t.by[registry]--; t.by[registry] == 0 {
		delete(t.by, registry)
	}
	close(t.freed)
	t.freed = make(chan struct{})
}
