package image

import (
	"context"
	"slices"
	"strings"
	"sync"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"

	"berth/internal/rootfs"
)

// layerRefs knows who needs which layer, and which chains of layers, of which there may be images. Owners are images, holders and pulls.
// An image needs its layers in one form. Holders and pulls need them in whatever form there is: a container may run on any.
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
	kinds  []rootfs.Kind // the forms of both
}

// form is a layer, or a chain of layers, in one form.
type form struct {
	kind rootfs.Kind
	name digest.Digest
}

var anyKind = []rootfs.Kind{rootfs.Directory, rootfs.EROFS}

func (n need) layerForms() (list []form) {
	for _, kind := range n.kinds {
		for _, d := range n.layers {
			list = append(list, form{kind, d})
		}
	}
	return list
}

func (n need) chainForms() (list []form) {
	for _, kind := range n.kinds {
		list = append(list, form{kind, n.chain})
	}
	return list
}

// uses are those of things of one kind.
type uses struct {
	count map[form]int
	dying map[form]chan struct{} // closed when deleted
}

func newUses() uses {
	return uses{count: map[form]int{}, dying: map[form]chan struct{}{}}
}

func (u uses) add(list []form) {
	for _, f := range list {
		u.count[f]++
	}
}

func (u uses) drop(list []form) {
	for _, f := range list {
		if u.count[f]--; u.count[f] == 0 {
			delete(u.count, f)
		}
	}
}

// isDying returns what is closed when one of the list has been deleted, if one is being deleted.
func (u uses) isDying(list []form) (gone <-chan struct{}, dying bool) {
	for _, f := range list {
		if gone, ok := u.dying[f]; ok {
			return gone, true
		}
	}
	return nil, false
}

func newLayerRefs() *layerRefs {
	return &layerRefs{owners: map[string]need{}, layers: newUses(), chains: newUses()}
}

// acquire registers an owner's layers, waiting for those that are being deleted.
// An owner that is registered already gets the new layers instead of the old. Without kinds they are needed in any form.
func (l *layerRefs) acquire(ctx context.Context, owner string, layers []digest.Digest, kinds ...rootfs.Kind) error {
	for {
		gone, ok := l.tryAcquire(owner, layers, kinds...)
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
func (l *layerRefs) tryAcquire(owner string, layers []digest.Digest, kinds ...rootfs.Kind) (gone <-chan struct{}, ok bool) {
	if len(kinds) == 0 {
		kinds = anyKind
	}
	needs := need{slices.Clone(layers), identity.ChainID(distinct(layers)), kinds}
	l.mu.Lock()
	defer l.mu.Unlock()
	if gone, dying := l.layers.isDying(needs.layerForms()); dying {
		return gone, false
	}
	if gone, dying := l.chains.isDying(needs.chainForms()); dying {
		return gone, false
	}
	l.layers.add(needs.layerForms())
	l.chains.add(needs.chainForms())
	l.drop(owner)
	l.owners[owner] = needs
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
	l.layers.drop(owned.layerForms())
	l.chains.drop(owned.chainForms())
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
func (l *layerRefs) condemn(layers []form) []form {
	return l.condemnOf(l.layers, layers)
}

// buried ends the dying of a layer, whether it was deleted or could not be.
func (l *layerRefs) buried(f form) { l.buriedOf(l.layers, f) }

// condemnChains is condemn for the IDs of chains. For each the caller calls chainBuried.
func (l *layerRefs) condemnChains(chains []form) []form {
	return l.condemnOf(l.chains, chains)
}

// chainBuried is buried for a chain.
func (l *layerRefs) chainBuried(f form) { l.buriedOf(l.chains, f) }

func (l *layerRefs) condemnOf(u uses, list []form) (condemned []form) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.settled {
		return nil
	}
	for _, f := range list {
		if u.count[f] == 0 && u.dying[f] == nil {
			u.dying[f] = make(chan struct{})
			condemned = append(condemned, f)
		}
	}
	return condemned
}

func (l *layerRefs) buriedOf(u uses, f form) {
	l.mu.Lock()
	defer l.mu.Unlock()
	close(u.dying[f])
	delete(u.dying, f)
}
