// Package index finds objects by ID.
//
// # Contract
//
// Readers take no lock: they load a map that is never changed again. Writers replace it, one
// after the other. What is not visible yet is found by its exact ID only.
package index

import (
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"berth/internal/errdefs"
)

// Object is what an index holds.
type Object interface {
	Visible() bool // to clients
}

// Index finds objects by ID. The lock orders writers, who replace the map.
type Index[T Object] struct {
	kind string // for messages
	mu   sync.Mutex
	all  atomic.Pointer[objects[T]]
}

// objects are those of an index between two changes.
type objects[T Object] struct {
	byID   map[string]T
	sorted atomic.Pointer[[]T] // nil until somebody asks
}

// New returns an empty index of objects of a kind, which error texts name.
func New[T Object](kind string) *Index[T] {
	ix := &Index[T]{kind: kind}
	ix.all.Store(&objects[T]{byID: map[string]T{}})
	return ix
}

// Snapshot returns all objects by ID; it is never changed.
func (ix *Index[T]) Snapshot() map[string]T { return ix.all.Load().byID }

// Sorted returns all objects in the order of compare; it is never changed. compare is the same with each call, and so is what it says of two
// objects: until one is put or removed, they are sorted once.
func (ix *Index[T]) Sorted(compare func(a, b T) int) []T {
	all := ix.all.Load()
	if sorted := all.sorted.Load(); sorted != nil {
		return *sorted
	}
	sorted := slices.SortedFunc(maps.Values(all.byID), compare)
	all.sorted.Store(&sorted)
	return sorted
}

// Put enters an object.
func (ix *Index[T]) Put(id string, v T) {
	ix.change(func(next map[string]T) { next[id] = v })
}

// PutAll enters objects by ID, with one change of the index.
func (ix *Index[T]) PutAll(objects map[string]T) {
	ix.change(func(next map[string]T) { maps.Copy(next, objects) })
}

// Remove takes out the object with that ID.
func (ix *Index[T]) Remove(id string) {
	ix.change(func(next map[string]T) { delete(next, id) })
}

func (ix *Index[T]) change(edit func(map[string]T)) {
	ix.mu.Lock()
	defer ix.mu.Unlock()
	next := maps.Clone(ix.Snapshot())
	edit(next)
	ix.all.Store(&objects[T]{byID: next})
}

// Get returns the object with exactly that ID, visible or not.
func (ix *Index[T]) Get(id string) (T, bool) {
	v, ok := ix.Snapshot()[id]
	return v, ok
}

// Find returns the visible object with that ID, or the only one whose ID starts
// with it. NotFound if there is none, InvalidArgument if there are several.
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
