package image

import (
	"context"
	"slices"
	"strings"
	"sync"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
)

// layerRefs knows who needs which layer, and which chains of layers, of which there may be images. Owners are images, holders and pulls.
//
// A layer or chain that nobody needs is first marked dying, under the lock, and then
// deleted, without it. Whoever comes to need a dying one waits until it is gone
// and makes it anew; so nobody ever gets hold of a half deleted one.
type layerRefs struct {
	mu      sync.Mutex // guards everything below
	owners  map[string]need
	layers  uses
	chains  uses
	settled bool // all owners have registered: deleting is allowed
}

// need is what an owner needs.
type need struct {
	layers []digest.Digest
	chain  digest.Digest // the ID of the chain that they are stacked as
}

// uses are those of things of one kind.
type uses struct {
	count map[digest.Digest]int
	dying map[digest.Digest]chan struct{} // closed when deleted
}

func newUses() uses {
	return uses{count: map[digest.Digest]int{}, dying: map[digest.Digest]chan struct{}{}}
}

func (u uses) drop(d digest.Digest) {
	if u.count[d]--; u.count[d] == 0 {
		delete(u.count, d)
	}
}

func newLayerRefs() *layerRefs {
	return &layerRefs{owners: map[string]need{}, layers: newUses(), chains: newUses()}
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

// tryAcquire registers an owner's layers unless one of them, or their chain, is being deleted;
// then it returns a channel that is closed when that is done.
func (l *layerRefs) tryAcquire(owner string, layers []digest.Digest) (gone <-chan struct{}, ok bool) {
	chain := identity.ChainID(distinct(layers))
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, d := range layers {
		if gone, ok := l.layers.dying[d]; ok {
			return gone, false
		}
	}
	if gone, ok := l.chains.dying[chain]; ok {
		return gone, false
	}
	for _, d := range layers {
		l.layers.count[d]++
	}
	l.chains.count[chain]++
	l.drop(owner)
	l.owners[owner] = need{slices.Clone(layers), chain}
	return nil, true
}

// has reports whether an owner is registered with exactly these layers.
func (l *layerRefs) has(owner string, layers []digest.Digest) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Equal(l.owners[owner].layers, layers)
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
	layers := l.owners[owner].layers
	l.drop(owner)
	return layers
}

func (l *layerRefs) drop(owner string) {
	owned, known := l.owners[owner]
	if !known {
		return
	}
	for _, d := range owned.layers {
		l.layers.drop(d)
	}
	l.chains.drop(owned.chain)
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
	for owner, owned := range l.owners {
		if strings.HasPrefix(owner, holderPrefix) {
			chains = append(chains, distinct(owned.layers))
		}
	}
	return chains, l.settled
}

// condemn marks those of the given layers dying that nobody needs, and returns
// them. The caller deletes each and calls buried.
func (l *layerRefs) condemn(layers []digest.Digest) []digest.Digest {
	return l.condemnOf(l.layers, layers)
}

// buried ends the dying of a layer, whether it was deleted or could not be.
func (l *layerRefs) buried(d digest.Digest) { l.buriedOf(l.layers, d) }

// condemnChains is condemn for the IDs of chains. For each the caller calls chainBuried.
func (l *layerRefs) condemnChains(chains []digest.Digest) []digest.Digest {
	return l.condemnOf(l.chains, chains)
}

// chainBuried is buried for a chain.
func (l *layerRefs) chainBuried(d digest.Digest) { l.buriedOf(l.chains, d) }

func (l *layerRefs) condemnOf(u uses, list []digest.Digest) (condemned []digest.Digest) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.settled {
		return nil
	}
	for _, d := range list {
		if u.count[d] == 0 && u.dying[d] == nil {
			u.dying[d] = make(chan struct{})
			condemned = append(condemned, d)
		}
	}
	return condemned
}

func (l *layerRefs) buriedOf(u uses, d digest.Digest) {
	l.mu.Lock()
	defer l.mu.Unlock()
	close(u.dying[d])
	delete(u.dying, d)
}
