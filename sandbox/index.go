package sandbox

import (
	"maps"
	"strings"
	"sync"
	"sync/atomic"

	"berth/internal/errdefs"
)

// index finds objects by ID. Reading takes no lock: it loads a map that is never
// changed again. The lock orders writers, who replace the map.
type index[T interface{ visible() bool }] struct {
	kind string // for messages
	mu   sync.Mutex
	all  atomic.Pointer[map[string]T]
}

func newIndex[T interface{ visible() bool }](kind string) *index[T] {
	ix := &index[T]{kind: kind}
	ix.all.Store(&map[string]T{})
	return ix
}

func (ix *index[T]) snapshot() map[string]T { return *ix.all.Load() }

func (ix *index[T]) put(id string, v T) {
	ix.change(func(next map[string]T) { next[id] = v })
}

func (ix *index[T]) remove(id string) {
	ix.change(func(next map[string]T) { delete(next, id) })
}

func (ix *index[T]) change(edit func(map[string]T)) {
	ix.mu.Lock()
	defer ix.mu.Unlock()
	next := maps.Clone(*ix.all.Load())
	edit(next)
	ix.all.Store(&next)
}

// get returns the object with exactly that ID, visible or not.
func (ix *index[T]) get(id string) (T, bool) {
	v, ok := ix.snapshot()[id]
	return v, ok
}

// find returns the visible object with that ID, or the only one whose ID starts
// with it. NotFound if there is none, InvalidArgument if there are several.
func (ix *index[T]) find(id string) (T, error) {
	var found T
	if id == "" {
		return found, errdefs.InvalidArgument("the %s ID is empty", ix.kind)
	}
	all := ix.snapshot()
	if v, ok := all[id]; ok && v.visible() {
		return v, nil
	}
	matches := 0
	for full, v := range all {
		if strings.HasPrefix(full, id) && v.visible() {
			found = v
			matches++
		}
	}
	switch matches {
	case 0:
		return found, errdefs.NotFound("%s %q does not exist", ix.kind, id)
	case 1:
		return found, nil
	}
	var none T
	return none, errdefs.InvalidArgument("%s ID %q is the start of %d IDs", ix.kind, id, matches)
}
