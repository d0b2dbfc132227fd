package image

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/opencontainers/go-digest"
	"google.golang.org/grpc/codes"

	"berth/image/layer"
	blobindex "berth/image/lazy/index"
	"berth/image/registry"
	"berth/internal/errdefs"
	"berth/internal/rootfs"
	"berth/internal/trace"
)

// lazyFacts are what decides whether a missing layer is created from an index of its blob, and
// filled later.
type lazyFacts struct {
	policy  string // of LazyConfig
	driver  rootfs.Kind
	works   bool // the kernel can do it
	pinned  bool // the image must not depend on its registry
	indexed bool // there is an index of the layer's blob
	peer    bool // a peer has an index, and the policy allows its use
	table   bool // the blob has a table of contents, and the policy allows its use
	served  bool // the pull's registry has served the blob to this node
	missing int64
	least   int64 // LazyConfig.MinBytes; missing are the image's bytes in missing layers with an index
	// leastTime is LazyConfig.MinTime; estimate is how long the missing bytes take, 0 if unknown.
	leastTime, estimate time.Duration
}

// decide returns whether to create the layer lazily, and why.
func (f lazyFacts) decide() (lazily bool, reason string) {
	switch {
	case f.policy == LazyOff:
		return false, "lazy.policy is off"
	case f.driver != rootfs.EROFS:
		return false, "layers are stored as directories"
	case !f.works:
		return false, "the kernel cannot report reads of layers"
	case f.pinned:
		return false, "the image is pinned"
	case !f.indexed && !f.peer && !f.table && f.policy == LazyAll:
		return false, "neither this node nor a peer has an index of the blob; there is no index"
	case !f.indexed && !f.peer && !f.table:
		return false, "this node has no index of the blob"
	case !f.served && !f.peer && !f.table:
		return false, "the index is one of another registry's blob"
	case f.missing < f.least:
		return false, fmt.Sprintf("only %d bytes could be fetched later, lazy.min_bytes is %d", f.missing, f.least)
	case f.estimate > 0 && f.estimate < f.leastTime:
		return false, fmt.Sprintf("the whole image takes about %v, lazy.min_time is %v",
			f.estimate.Round(time.Millisecond), f.leastTime)
	}
	switch {
	case f.table:
		return true, "the blob has a table of contents"
	case f.peer:
		return true, "another node has an index of the blob"
	}
	return true, "this node has an index of the blob"
}

// lazyPlan says which layers of an image a pull creates lazily.
type lazyPlan struct {
	store  *layer.Store // for which it was made
	pinned bool
	layers []lazyDecision // by number of the layer
}

type lazyDecision struct {
	lazily bool
	reason string
	peer   string // address of the node with the index; empty: this one
	table  bool   // the index is made of the blob's table of contents
	// claimed is the digest of the tree in the peer's index, if a layer was created from it.
	claimed digest.Digest
}

// isLazy reports whether a layer is created lazily in a store.
func (p *lazyPlan) isLazy(store *layer.Store, i int) bool {
	return store == p.store && p.layers[i].lazily
}

// usesClaims reports whether layers are created from indexes that are not proven.
func (p *lazyPlan) usesClaims() bool {
	return slices.ContainsFunc(p.layers, func(d lazyDecision) bool { return d.lazily && (d.table || d.peer != "") })
}

// planLazy decides about the missing layers of an image.
func (s *Store) planLazy(ctx context.Context, store *layer.Store, img *registry.Image,
	repo *registry.Repository) *lazyPlan {
	ref := repo.Reference()
	plan := &lazyPlan{store: store, pinned: s.isPinned(img, ref), layers: make([]lazyDecision, len(img.Layers))}
	facts := lazyFacts{policy: s.incomplete.cfg.Policy, driver: store.Kind(), works: s.incomplete.engine != nil,
		pinned: plan.pinned, least: s.incomplete.cfg.MinBytes, leastTime: s.incomplete.cfg.MinTime}
	var peers map[digest.Digest]string
	if !plan.pinned {
		s.findZtocs(ctx, store, img, repo)
		peers = s.findIndexes(ctx, store, img, repo)
	}
	counted := map[digest.Digest]bool{}
	served := func(l registry.Layer) bool { return l.File == "" && s.indexer.store.Served(l.Blob.Digest, ref.Domain) }
	for _, l := range img.Layers {
		indexed := served(l) || peers[sourceOf(l).Name()] != "" || s.mayUseTable(l)
		if name := sourceOf(l).Name(); !counted[name] && !store.Has(name) && indexed {
			counted[name] = true
			facts.missing += l.Blob.Size
		}
	}
	facts.estimate = s.rates.estimate(ref.Domain, facts.missing)
	for i, l := range img.Layers {
		facts.indexed, facts.served = l.File == "" && s.indexer.store.Has(l.Blob.Digest), served(l)
		peer := peers[sourceOf(l).Name()]
		if facts.indexed && facts.served { // one that needs no proof
			peer = ""
		}
		facts.peer, plan.layers[i].peer = peer != "", peer
		facts.table = !facts.served && s.mayUseTable(l)
		plan.layers[i].table = facts.table
		plan.layers[i].lazily, plan.layers[i].reason = facts.decide()
	}
	return plan
}

// isPinned reports whether an image must be on the node whole.
func (s *Store) isPinned(img *registry.Image, ref registry.Reference) bool {
	names := []string{ref.String(), img.ConfigDigest.String()}
	if img.Digest != "" {
		names = append(names, ref.WithDigest(img.Digest))
	}
	x := s.index.Load()
	if slices.ContainsFunc(names, func(name string) bool { return x.pinned[name] }) {
		return true
	}
	recorded := x.byID[img.ConfigDigest.String()]
	return recorded != nil && recorded.Pinned
}

// getLazily creates a layer from the index of its blob. It returns false if the layer must be
// fetched whole, after it has logged why. The error wraps layer.ErrThere if another pull has
// created the layer meanwhile.
func (s *Store) getLazily(ctx context.Context, store *layer.Store, a *access, l registry.Layer,
	d *lazyDecision) (bool, error) {
	ctx, span := trace.Nest(ctx, "create lazily")
	defer span.End()
	err := s.createBy(ctx, store, a, l, d)
	switch {
	case err == nil:
		a.grant(sourceOf(l).Name())
		s.incomplete.decided(sourceOf(l).Name(), "fetched after the pull: "+d.reason)
		return true, nil
	case errors.Is(err, layer.ErrThere):
		return false, err
	case ctx.Err() != nil:
		return false, context.Cause(ctx)
	case errdefs.Code(err) == codes.ResourceExhausted:
		return false, err
	}
	s.incomplete.decided(sourceOf(l).Name(), "fetched whole: "+err.Error())
	s.log.Info("layer is fetched whole, because it cannot be created from its index", "image", a.repo.Reference().String(),
		"layer", l.Blob.Digest, "error", err)
	return false, nil
}

// createBy creates a layer as a decision says.
func (s *Store) createBy(ctx context.Context, store *layer.Store, a *access, l registry.Layer, d *lazyDecision) error {
	if d.table {
		return s.createByTable(ctx, store, a, l)
	}
	x, claim, err := s.indexFor(ctx, a.repo, l, d.peer)
	if err != nil {
		return err
	}
	err = s.createLazily(ctx, store, a, l, x, claim)
	if err != nil && claim != nil && !errors.Is(err, layer.ErrThere) {
		s.suspect(l.Blob.Digest, x.States, claim, err)
	}
	if err == nil && claim != nil {
		d.claimed = x.TreeDigest
	}
	return err
}

// indexFor returns the index of a layer's blob: of this node if it may use its own, or else of a
// peer with a claim.
func (s *Store) indexFor(ctx context.Context, repo *registry.Repository, l registry.Layer,
	peer string) (*blobindex.Index, *layer.Claim, error) {
	if peer == "" || s.indexer.store.Served(l.Blob.Digest, repo.Reference().Domain) {
		own, err := s.ownIndex(ctx, l)
		if err == nil || peer == "" {
			return own, nil, err
		}
	}
	x, claim, err := s.indexOfPeer(ctx, repo, l, peer)
	if err != nil {
		return nil, nil, err
	}
	// The registry has not served the blob to this node, so its pulls must not learn names of files
	// from the own index. The peer knows them all if its index is the same. That one is true then.
	if own, err := s.ownIndex(ctx, l); err == nil && sameFiles(own, x) {
		return own, nil, nil
	}
	return x, claim, nil
}

// ownIndex returns this node's index of a layer's blob.
func (s *Store) ownIndex(ctx context.Context, l registry.Layer) (*blobindex.Index, error) {
	x, err := s.getIndex(ctx, l.Blob.Digest)
	if err != nil {
		return nil, err
	}
	return x, matches(x, l)
}

// sameFiles reports whether two indexes of one blob show the same files.
func sameFiles(a, b *blobindex.Index) bool {
	return a.TreeDigest == b.TreeDigest && a.RecordDigest == b.RecordDigest && a.DataSize == b.DataSize
}

// getIndex reads an index of this node.
func (s *Store) getIndex(ctx context.Context, blob digest.Digest) (x *blobindex.Index, err error) {
	err = s.withIndex(ctx, blob, func() (err error) { x, err = s.indexer.store.Get(blob); return err })
	return x, err
}

// withIndex calls get for an index. It tries again while the index is in use, for another node for
// example, which never takes long.
func (s *Store) withIndex(ctx context.Context, blob digest.Digest, get func() error) (err error) {
	const attempts, pause = 50, 20 * time.Millisecond
	for range attempts {
		err = get()
		if errdefs.Code(err) != codes.NotFound || !s.indexer.store.Has(blob) {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(pause):
		}
	}
	return err
}

// createLazily creates a layer if the registry proves that it has the blob. claim is nil for an
// index of this node.
func (s *Store) createLazily(ctx context.Context, store *layer.Store, a *access, l registry.Layer,
	x *blobindex.Index, claim *layer.Claim) (err error) {
	src, done := s.incomplete.use(sourceOf(l), l.Blob.Size)
	defer done()
	p := &place{repo: a.repo}
	if err := src.prove(ctx, p, x); err != nil {
		p.close()
		return fmt.Errorf("ask the registry for parts of the blob: %w", err)
	}
	replaced := src.add(p, true)
	err = store.CreateLazy(ctx, sourceOf(l), x, claim, s.incomplete.filler(src, sourceOf(l), x, claim))
	if errors.Is(err, layer.ErrThere) && !replaced {
		src.drop(p)
	}
	s.incomplete.prefer(src.name)
	if errdefs.Code(err) == codes.DataLoss && claim == nil {
		err = errors.Join(err, s.indexer.store.Remove(l.Blob.Digest))
	}
	return err
}

// usePresent ensures that a pull may use a present layer. If the layer is incomplete, it can be
// fetched with the pull's credentials from now on. An image that must be whole waits for it.
func (s *Store) usePresent(ctx context.Context, a *access, l registry.Layer, plan *lazyPlan, track *layerTrack) error {
	name := sourceOf(l).Name()
	claim := plan.store.Claimed(name)
	if err := s.use(ctx, a, l, s.originOf(a, name), track); err != nil {
		return err
	}
	return s.useClaimed(ctx, a, l, plan, claim)
}

// useClaimed lets an incomplete layer ask the pull's registry, if that is safe, and waits for the
// layer if the pull must not use it before. claim is that of the layer, or nil.
func (s *Store) useClaimed(ctx context.Context, a *access, l registry.Layer, plan *lazyPlan, claim *layer.Claim) error {
	name, foreign := sourceOf(l).Name(), isForeign(a, l, claim)
	// One attacker can have a node and a registry. So a registry must not send ranges for the index
	// of a node that another registry has confirmed. For a table of contents it may, because the
	// table verifies its ranges. So the first registry cannot delay this pull.
	if !foreign || claim.Table != "" {
		s.offer(a.repo, name)
	}
	if plan.pinned || foreign {
		return s.awaitComplete(ctx, []digest.Digest{name})
	}
	return nil
}

// awaitForeign waits for a layer that another pull has created lazily while this one fetched it, if
// its files are not proven to this pull.
func (s *Store) awaitForeign(ctx context.Context, a *access, l registry.Layer, plan *lazyPlan) error {
	return s.useClaimed(ctx, a, l, plan, plan.store.Claimed(sourceOf(l).Name()))
}

// isForeign reports whether a pull must not use a layer with a claim before the proof.
func isForeign(a *access, l registry.Layer, claim *layer.Claim) bool {
	// Another registry has confirmed an index that is not proven. It may have lied together with a
	// node, to get wrong files into the images of this registry. And another image may name another
	// part of the blob as its table of contents.
	return claim != nil && (claim.Registry != a.repo.Reference().Domain ||
		claim.Table != "" && claim.Table != tableOf(l))
}

// offer lets the incomplete layers of an image ask a repository with the credentials of its pull,
// which has access to them.
func (s *Store) offer(repo *registry.Repository, layers ...digest.Digest) {
	for _, name := range layers {
		if s.incomplete.get(name) == nil {
			continue
		}
		if src := s.incomplete.known(name); src != nil {
			src.add(&place{repo: repo}, true)
		}
	}
}

// retire sets a layer aside that cannot be completed, so that a pull can create it again.
func (s *Store) retire(store *layer.Store, from layer.Source) error {
	name := from.Name()
	l := store.Lazy(name)
	if l == nil || l.Err() == nil {
		return nil
	}
	s.log.Warn("layer that cannot be completed is set aside", "layer", name, "error", l.Err())
	if claim := store.Claimed(name); claim != nil && claim.Table != "" {
		s.falseTables.add(from.Blob, claim.Table) // distrustTable may come later
	}
	return store.Retire(name)
}
