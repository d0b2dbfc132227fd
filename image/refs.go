package image

import (
	"context"
	"slices"
	"strings"
	"sync"

	"github.com/opencontainers/go-digest"
)

// layerRefs knows who needs which layer. Owners are images, holders and pulls.
//
// A layer that nobody needs is first marked dying, under the lock, and then
// deleted, without it. Whoever comes to need a dying layer waits until it is gone
// and fetches it anew; so nobody ever gets hold of a half deleted one.
type layerRefs struct {
	mu      sync.Mutex // guards everything below
	owners  map[string][]digest.Digest
	count   map[digest.Digest]int
	dying   map[digest.Digest]chan struct{} // closed when deleted
	settled bool                            // all owners have registered: deleting is allowed
}

func newLayerRefs() *layerRefs {
	return &layerRefs{owners: map[string][]digest.Digest{}, count: map[digest.Digest]int{}, dying: map[digest.Digest]chan struct{}{}}
}

// acquire registers an owner's layers, waiting for those that are being deleted.
// An owner that is registered already gets the new layers instead of the old.
func (l *layerRefs) acquire(ctx context.Context, owner string, layers []digest.Digest) error {
	for {
		gone, ok := l.tryAcquire(owner, layers)
		if ok {
			return nil
		}
		select {
		case <-gone:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// tryAcquire registers an owner's layers unless one of them is being deleted;
// then it returns a channel that is closed when that is done.
func (l *layerRefs) tryAcquire(owner string, layers []digest.Digest) (gone <-chan struct{}, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, d := range layers {
		if gone, ok := l.dying[d]; ok {
			return gone, false
		}
	}
	for _, d := range layers {
		l.count[d]++
	}
	l.drop(owner)
	l.owners[owner] = slices.Clone(layers)
	return nil, true
}

// has reports whether an owner is registered with exactly these layers.
func (l *layerRefs) has(owner string, layers []digest.Digest) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Equal(l.owners[owner], layers)
}

// giveUp forgets an owner that cannot use its layers, if all owners have registered.
func (l *layerRefs) giveUp(owner string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.settled {
		l.drop(owner)
	}
}

// release forgets an owner and returns the layers that it had. Unknown owners are fine.
func (l *layerRefs) release(owner string) []digest.Digest {
	l.mu.Lock()
	defer l.mu.Unlock()
	layers := l.owners[owner]
	l.drop(owner)
	return layers
}

func (l *layerRefs) drop(owner string) {
	for _, d := range l.owners[owner] {
		if l.count[d]--; l.count[d] == 0 {
			delete(l.count, d)
		}
	}
	delete(l.owners, owner)
}

// settle allows deleting.
func (l *layerRefs) settle() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.settled = true
}

// held returns the layers of each holder, as they are stacked, and whether all holders have registered.
func (l *layerRefs) held() (chains [][]digest.Digest, all bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for owner, layers := range l.owners {
		if strings.HasPrefix(owner, holderPrefix) {
			chains = append(chains, distinct(layers))
		}
	}
	return chains, l.settled
}

// condemn marks those of the given layers dying that nobody needs, and returns
// them. The caller deletes each and calls buried.
func (l *layerRefs) condemn(layers []digest.Digest) []digest.Digest {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.settled {
		return nil
	}
	var condemned []digest.Digest
	for _, d := range layers {
		if l.count[d] == 0 && l.dying[d] == nil {
			l.dying[d] = make(chan struct{})
			condemned = append(condemned, d)
		}
	}
	return condemned
}

// buried ends the dying of a layer, whether it was deleted or could not be.
func (l *layerRefs) buried(d digest.Digest) {
	l.mu.Lock()
	defer l.mu.Unlock()
	close(l.dying[d])
	delete(l.dying, d)
}
