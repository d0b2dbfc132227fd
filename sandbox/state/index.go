package state

import (
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"berth/internal/errdefs"
)

// Indexed is an element of an Index.
type Indexed interface {
	Visible() bool // to clients
}

// Index finds objects by ID. Readers need no lock: they load an immutable map, which writers
// replace. Only Get finds an object that is not visible yet. The lock serializes writers.
type Index[T Indexed] struct {
	kind string // for error texts
	mu   sync.Mutex
	all  atomic.Pointer[indexed[T]]
}

// indexed is the immutable content of an index.
type indexed[T Indexed] struct {
	byID   map[string]T
	sorted atomic.Pointer[[]T] // nil until Sorted is called
}

// NewIndex returns an empty index. kind names its objects in error texts.
func NewIndex[T Indexed](kind string) *Index[T] {
	ix := &Index[T]{kind: kind}
	ix.all.Store(&indexed[T]{byID: map[string]T{}})
	return ix
}

// Snapshot returns all objects by ID. The map is immutable.
func (ix *Index[T]) Snapshot() map[string]T { return ix.all.Load().byID }

// Sorted returns all objects in the order of compare. The slice is immutable. Each call must pass
// the same compare function, because the index sorts once per change.
func (ix *Index[T]) Sorted(compare func(a, b T) int) []T {
	all := ix.all.Load()
	if sorted := all.sorted.Load(); sorted != nil {
		return *sorted
	}
	sorted := slices.SortedFunc(maps.Values(all.byID), compare)
	all.sorted.Store(&sorted)
	return sorted
}

// Put adds an object.
func (ix *Index[T]) Put(id string, v T) {
	ix.change(func(next map[string]T) { next[id] = v })
}

// PutAll adds objects by ID in one change.
func (ix *Index[T]) PutAll(objects map[string]T) {
	ix.change(func(next map[string]T) { maps.Copy(next, objects) })
}

// Remove removes the object with that ID.
func (ix *Index[T]) Remove(id string) {
	ix.change(func(next map[string]T) { delete(next, id) })
}

func (ix *Index[T]) change(edit func(map[string]T)) {
	ix.mu.Lock()
	defer ix.mu.Unlock()
	next := maps.Clone(ix.Snapshot())
	edit(next)
	ix.all.Store(&indexed[T]{byID: next})
}

// Get returns the object with exactly that ID, visible or not.
func (ix *Index[T]) Get(id string) (T, bool) {
	v, ok := ix.Snapshot()[id]
	return v, ok
}

// Find returns the visible object with that ID, or the only visible object whose ID starts with id.
// The error is NotFound if there is no such object, and InvalidArgument if id is empty or
// ambiguous.
func (ix *Index[T]) Find(id string) (T, error) {
	var found T
	if id == "" {
		return found, errdefs.InvalidArgument("the %s ID is empty", ix.kind)
	}
	all := ix.Snapshot()
	if v, ok := all[id]; ok && v.Visible() {
		return v, nil
	}
	matches := 0
	for full, v := range all {
		if strings.HasPrefix(full, id) && v.Visible() {
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
