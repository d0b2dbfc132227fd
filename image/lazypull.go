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
	table   bool // the blob has a table of contents that can be used
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
	case !f.indexed && !f.table:
		return false, "this node has no index of the blob, and the manifest names no table of contents"
	case !f.served && !f.table:
		return false, "the index is one of another registry's blob"
	case f.missing < f.least:
		return false, fmt.Sprintf("only %d bytes could be fetched later, lazy.min_bytes is %d", f.missing, f.least)
	case f.estimate > 0 && f.estimate < f.leastTime:
		return false, fmt.Sprintf("the whole image takes about %v, lazy.min_time is %v",
			f.estimate.Round(time.Millisecond), f.leastTime)
	}
	if f.table {
		return true, "the blob has a table of contents"
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
	table  bool // the index is made of the blob's table of contents
}

// isLazy reports whether a layer is created lazily in a store.
func (p *lazyPlan) isLazy(store *layer.Store, i int) bool {
	return store == p.store && p.layers[i].lazily
}

// usesTables reports whether layers are created from tables of contents, which are not proven.
func (p *lazyPlan) usesTables() bool {
	return slices.ContainsFunc(p.layers, func(d lazyDecision) bool { return d.lazily && d.table })
}

// planLazy decides about the missing layers of an image.
func (s *Store) planLazy(ctx context.Context, store *layer.Store, img *registry.Image,
	repo *registry.Repository) *lazyPlan {
	ref := repo.Reference()
	plan := &lazyPlan{store: store, pinned: s.isPinned(img, ref), layers: make([]lazyDecision, len(img.Layers))}
	facts := lazyFacts{policy: s.incomplete.cfg.Policy, driver: store.Kind(), works: s.incomplete.engine != nil,
		pinned: plan.pinned, least: s.incomplete.cfg.MinBytes, leastTime: s.incomplete.cfg.MinTime}
	if !plan.pinned {
		s.findZtocs(ctx, store, img, repo)
	}
	counted := map[digest.Digest]bool{}
	served := func(l registry.Layer) bool { return l.File == "" && s.indexer.store.Served(l.Blob.Digest, ref.Domain) }
	for _, l := range img.Layers {
		indexed := served(l) || s.mayUseTable(l)
		if name := sourceOf(l).Name(); !counted[name] && !store.Has(name) && indexed {
			counted[name] = true
			facts.missing += l.Blob.Size
		}
	}
	facts.estimate = s.rates.estimate(ref.Domain, facts.missing)
	for i, l := range img.Layers {
		facts.indexed, facts.served = l.File == "" && s.indexer.store.Has(l.Blob.Digest), served(l)
		facts.table = !facts.served && s.mayUseTable(l) // an own index needs no proof
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
	d lazyDecision) (bool, error) {
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
func (s *Store) createBy(ctx context.Context, store *layer.Store, a *access, l registry.Layer, d lazyDecision) error {
	if d.table {
		return s.createByTable(ctx, store, a, l)
	}
	x, err := s.getIndex(ctx, l)
	if err != nil {
		return err
	}
	return s.createLazily(ctx, store, a, l, x)
}

// getIndex reads this node's index of a layer's blob. It tries again while the index is in use, by
// another pull for example, which never takes long.
func (s *Store) getIndex(ctx context.Context, l registry.Layer) (*blobindex.Index, error) {
	const attempts, pause = 50, 20 * time.Millisecond
	for left := attempts; ; left-- {
		x, err := s.indexer.store.Get(l.Blob.Digest)
		if err == nil {
			return x, matches(x, l)
		}
		if errdefs.Code(err) != codes.NotFound || !s.indexer.store.Has(l.Blob.Digest) || left == 0 {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(pause):
		}
	}
}

// matches returns an error if an index is not one of a layer.
func matches(x *blobindex.Index, l registry.Layer) error {
	if x.Blob != l.Blob.Digest || x.DiffID != l.DiffID || x.BlobSize != l.Blob.Size {
		return errdefs.FailedPrecondition("the index is one of the tar %s and %d bytes, the image names %s and %d",
			x.DiffID, x.BlobSize, l.DiffID, l.Blob.Size)
	}
	return nil
}

// createLazily creates a layer from an index of this node if the registry proves that it has the
// blob.
func (s *Store) createLazily(ctx context.Context, store *layer.Store, a *access, l registry.Layer,
	x *blobindex.Index) (err error) {
	src, done := s.incomplete.use(sourceOf(l), l.Blob.Size)
	defer done()
	p := &place{repo: a.repo}
	if err := src.prove(ctx, p, x); err != nil {
		p.close()
		return fmt.Errorf("ask the registry for parts of the blob: %w", err)
	}
	src.add(p, true)
	err = store.CreateLazy(ctx, sourceOf(l), x, nil, s.incomplete.filler(src, sourceOf(l), x, nil))
	s.incomplete.prefer(src.name)
	if errdefs.Code(err) == codes.DataLoss {
		err = errors.Join(err, s.indexer.store.Remove(l.Blob.Digest))
	}
	return err
}

// usePresent ensures that a pull may use a present layer.
func (s *Store) usePresent(ctx context.Context, a *access, l registry.Layer, plan *lazyPlan, track *layerTrack) error {
	if err := s.use(ctx, a, l, s.originOf(a, sourceOf(l).Name()), track); err != nil {
		return err
	}
	return s.useIncomplete(ctx, a, l, plan)
}

// useIncomplete lets an incomplete layer ask the pull's registry with the pull's credentials from
// now on. It waits for the layer if the image must be whole, or if another pull has created the
// layer from a table of contents that this pull must not trust.
func (s *Store) useIncomplete(ctx context.Context, a *access, l registry.Layer, plan *lazyPlan) error {
	name := sourceOf(l).Name()
	foreign := isForeign(a, l, plan.store.TOC(name))
	s.offer(a.repo, name)
	if plan.pinned || foreign {
		return s.awaitComplete(ctx, []digest.Digest{name})
	}
	return nil
}

// isForeign reports whether a pull must not use a layer before its table of contents is proven:
// another registry has served the table, or the image's manifest does not name this table.
func isForeign(a *access, l registry.Layer, table *layer.TOC) bool {
	return table != nil && (table.Registry != a.repo.Reference().Domain || table.Name != tableOf(l))
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
	if table := store.TOC(name); table != nil {
		s.falseTables.add(from.Blob, table.Name) // rejectTable may come later
	}
	return store.Retire(name)
}
