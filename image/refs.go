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

// layerRefs counts the owners of layers and of layer chains. The owners are images, holders and
// pulls. An image needs its layers in one form. Holders and pulls need them in all forms, because a
// container may run on any form.
//
// A layer or chain that has no owner is marked under the lock. It is deleted when the lock is
// released. A new owner waits for the end of the deletion and creates the layer again, so nothing
// uses a partially deleted layer.
type layerRefs struct {
	mu sync.Mutex
	// +checklocks:mu
	owners map[string]need
	// mu guards the content of these maps. The maps themselves stay the same.
	layers uses
	chains uses
	// +checklocks:mu
	settled bool // all owners have registered: deletion is allowed
}

// need lists the layers that an owner needs.
type need struct {
	layers []digest.Digest
	chain  digest.Digest // the chain ID of the layers
	kinds  []rootfs.Kind // the forms of the layers and the chain
}

// form is a layer or a layer chain in one form.
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

// uses counts the owners of layers or of chains.
type uses struct {
	count    map[form]int
	deleting map[form]chan struct{} // closed after the deletion
}

func newUses() uses {
	return uses{count: map[form]int{}, deleting: map[form]chan struct{}{}}
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

// isDeleting reports whether an element of the list is under deletion. It returns a channel that is
// closed after the deletion.
func (u uses) isDeleting(list []form) (gone <-chan struct{}, deleting bool) {
	for _, f := range list {
		if gone, ok := u.deleting[f]; ok {
			return gone, true
		}
	}
	return nil, false
}

func newLayerRefs() *layerRefs {
	return &layerRefs{owners: map[string]need{}, layers: newUses(), chains: newUses()}
}

// acquire registers an owner's layers in the given forms, or in all forms. It waits until none of
// them is under deletion. It replaces the earlier layers of the owner.
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

// tryAcquire registers an owner's layers. If a layer or the chain is under deletion, it registers
// nothing, and returns a channel that is closed after the deletion.
func (l *layerRefs) tryAcquire(
	owner string, layers []digest.Digest, kinds ...rootfs.Kind,
) (gone <-chan struct{}, ok bool) {
	if len(kinds) == 0 {
		kinds = anyKind
	}
	needs := need{slices.Clone(layers), identity.ChainID(Distinct(layers)), kinds}
	l.mu.Lock()
	defer l.mu.Unlock()
	if gone, deleting := l.layers.isDeleting(needs.layerForms()); deleting {
		return gone, false
	}
	if gone, deleting := l.chains.isDeleting(needs.chainForms()); deleting {
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

// isPulled reports whether a current pull needs a layer.
func (l *layerRefs) isPulled(name digest.Digest) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for owner, n := range l.owners {
		if strings.HasPrefix(owner, pullPrefix) && slices.Contains(n.layers, name) {
			return true
		}
	}
	return false
}

// releaseIfSettled removes an owner after settle. Before settle, the owner may be an earlier
// daemon's container.
func (l *layerRefs) releaseIfSettled(owner string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.settled {
		l.drop(owner)
	}
}

// release removes an owner and returns its layers. An unknown owner has none.
func (l *layerRefs) release(owner string) []digest.Digest {
	l.mu.Lock()
	defer l.mu.Unlock()
	layers := l.owners[owner].layers
	l.drop(owner)
	return layers
}

// drop forgets an owner. The caller holds the lock.
//
// +checklocks:l.mu
func (l *layerRefs) drop(owner string) {
	owned, known := l.owners[owner]
	if !known {
		return
	}
	l.layers.drop(owned.layerForms())
	l.chains.drop(owned.chainForms())
	delete(l.owners, owner)
}

// settle allows deletion.
func (l *layerRefs) settle() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.settled = true
}

// held returns the distinct layers of each holder, and whether all holders have registered.
func (l *layerRefs) held() (chains [][]digest.Digest, all bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for owner, owned := range l.owners {
		if strings.HasPrefix(owner, holderPrefix) {
			chains = append(chains, Distinct(owned.layers))
		}
	}
	return chains, l.settled
}

// markDeleting marks the given layers that have no owner, and returns them. The caller deletes each
// and then calls deleted.
func (l *layerRefs) markDeleting(layers []form) []form {
	return l.mark(l.layers, layers)
}

// deleted unmarks a layer, even after a failed deletion.
func (l *layerRefs) deleted(f form) { l.unmark(l.layers, f) }

// markChainsDeleting is markDeleting for chains.
func (l *layerRefs) markChainsDeleting(chains []form) []form {
	return l.mark(l.chains, chains)
}

func (l *layerRefs) chainDeleted(f form) { l.unmark(l.chains, f) }

func (l *layerRefs) mark(u uses, list []form) (marked []form) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.settled {
		return nil
	}
	for _, f := range list {
		if u.count[f] == 0 && u.deleting[f] == nil {
			u.deleting[f] = make(chan struct{})
			marked = append(marked, f)
		}
	}
	return marked
}

func (l *layerRefs) unmark(u uses, f form) {
	l.mu.Lock()
	defer l.mu.Unlock()
	close(u.deleting[f])
	delete(u.deleting, f)
}
