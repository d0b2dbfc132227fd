// Package index finds objects by ID.
//
// # Contract
//
// Readers take no lock: they load a map that is never changed again. Writers replace it, one
// after the other. What is not visible yet is found by its exact ID only.
package index

import (
	"maps"
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
	all  atomic.Pointer[map[string]T]
}

// New returns an empty index of objects of a kind, which error texts name.
func New[T Object](kind string) *Index[T] {
	ix := &Index[T]{kind: kind}
	ix.all.Store(&map[string]T{})
	return ix
}

// Snapshot returns all objects by ID; it is never changed.
func (ix *Index[T]) Snapshot() map[string]T { return *ix.all.Load() }

// Put enters an object.
func (ix *Index[T]) Put(id string, v T) {
	ix.change(func(next map[string]T) { next[id] = v })
}

// Remove takes out the object with that ID.
func (ix *Index[T]) Remove(id string) {
	ix.change(func(next map[string]T) { delete(next, id) })
}

func (ix *Index[T]) change(edit func(map[string]T)) {
	ix.mu.Lock()
	defer ix.mu.Unlock()
	next := maps.Clone(*ix.all.Load())
	edit(next)
	ix.all.Store(&next)
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
