package pull

import (
	"cmp"
	"context"
	"fmt"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sync/errgroup"

	"berth/image"
	"berth/image/erofs"
	"berth/image/layer"
	"berth/image/lazy"
	"berth/image/registry"
	"berth/image/tree"
	"berth/image/trust"
	"berth/internal/task"
	"berth/internal/trace"
)

// fetch downloads the missing layers of an image and commits it with its evidence.
func (p *Puller) fetch(ctx context.Context, repo *registry.Repository, img *registry.Image, evidence *trust.Evidence,
	tracks []*layerTrack) (*image.Image, error) {
	a := p.accesses.begin(repo, image.LayersOf(img))
	defer a.end()
	ref := repo.Reference()
	whole := p.store.Snapshot().MustBeWhole(img, ref)
	plan := p.lazy.Plan(ctx, p.store.LayerStore(image.LayersOf(img)), img, repo, whole)
	names := image.Naming{Refs: []registry.Reference{ref}, Registry: ref.Domain, Evidence: evidence}
	return p.add(ctx, ref.String(), img, names, plan,
		func(ctx context.Context, store *layer.Store, at attempt, i int) error {
			used := plan
			if at.whole {
				used = new(lazy.Plan)
			}
			f := &layerFetch{p: p, store: store, access: a, layer: img.Layers[i], plan: used, number: i, pinned: whole,
				track: tracks[i]}
			if err := f.get(ctx); err != nil {
				return err
			}
			if *tracks[i].state.Load() == LayerDone {
				p.store.KeepFinished(ref, img.Layers[i])
			}
			return nil
		})
}

// getLayer ensures that layer i of an image is in a store and that the image may use it.
type getLayer func(ctx context.Context, store *layer.Store, at attempt, i int) error

// add gets the layers of an image and commits it. plan is the plan of the first attempt. If it is
// nil, all layers are fetched whole.
func (p *Puller) add(ctx context.Context, what string, img *registry.Image, names image.Naming, plan *lazy.Plan,
	get getLayer) (added *image.Image, err error) {
	wrongTables, last := false, attempt{}
	err = p.retry(ctx, "image "+what, attempt{whole: plan == nil}, func(at attempt) (left options, err error) {
		last = at
		store := p.layerStore(img, at)
		left = options{driver: p.store.Fallback(store) != nil, whole: !at.whole, tables: !at.whole && plan.UsesTables()}
		added, err = p.addTo(ctx, what, img, names, store, func(ctx context.Context, i int) error {
			return get(ctx, store, at, i)
		})
		wrongTables = wrongTables || left.tables && isIndexFault(err)
		return left, err
	})
	if err == nil && wrongTables && last.whole {
		p.lazy.RejectTables(img, plan)
	}
	return added, err
}

// isIndexFault reports whether a wrong table of contents can have caused an error.
func isIndexFault(err error) bool {
	why := faultOf(err)
	return why == badTree || why == tooLarge || why == largeTree
}

// layerStore returns the layer store for an image.
func (p *Puller) layerStore(img *registry.Image, at attempt) *layer.Store {
	chain := image.LayersOf(img)
	store := p.store.LayerStore(chain)
	other := p.store.Fallback(store)
	// If the present layers alone are too large to merge, the missing layers are fetched as
	// directories at once.
	if other != nil && (at.fallback || missing(store, img) > 0 && other.Inodes(image.Distinct(chain)) > p.mostInodes()) {
		return other
	}
	return store
}

// addTo gets the layers of an image into a layer store and commits it. After a failure the layers
// that nothing else needs are deleted, except those that KeepFinished has kept.
func (p *Puller) addTo(ctx context.Context, what string, img *registry.Image, names image.Naming, store *layer.Store,
	get func(ctx context.Context, i int) error) (added *image.Image, err error) {
	chain := image.LayersOf(img)
	release, err := p.store.Acquire(ctx, "image "+what, chain)
	if err != nil {
		return nil, err
	}
	defer release()
	if err = p.addLayers(ctx, store, img, get); err == nil {
		recording := trace.Begin(ctx, "record")
		added, err = p.store.Commit(ctx, names, img, store)
		recording.End()
	}
	p.store.SettleFinished(names.Refs, chain, err)
	return added, err
}

// usualFile is the memory for merging one file: its node, its name and its directory entry. 140,000
// files fill erofs.MaxMemory.
const usualFile = tree.NodeMemory + 32

// mostInodes returns how many files of usual size in EROFS layers can be merged. The caller also
// counts files that upper layers hide, so some images are stored as directories although they could
// be merged.
func (p *Puller) mostInodes() uint64 {
	return uint64(cmp.Or(p.cfg.MergeMemory, erofs.MaxMemory)) / usualFile
}

// addLayers gets the layers that a store lacks and checks that they can be stacked.
func (p *Puller) addLayers(ctx context.Context, store *layer.Store, img *registry.Image,
	get func(ctx context.Context, i int) error) error {
	if wanted := missing(store, img); wanted > 0 {
		if err := store.HasRoom(wanted, p.store.Deleting()); err != nil {
			return err
		}
	}
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(p.cfg.MaxParallelDownloads)
	for i, l := range img.Layers {
		group.Go(func() error {
			return task.Guard(p.log, "pull", "layer "+l.DiffID.String(), func() error { return get(groupCtx, i) })
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	if chain := image.LayersOf(img); len(chain) > 0 { // a layer that does not fit the layers below fails the pull here
		defer trace.Begin(ctx, "stack layers").End()
		if _, err := store.Stack(ctx, image.Distinct(chain)); err != nil {
			return fmt.Errorf("stack layers: %w", err)
		}
	}
	return nil
}

// missing returns the size of the blobs to download for an image. The layers take more space on
// disk. The check before the download prevents that kubelet pulls an image again and again that
// does not fit.
func missing(store *layer.Store, img *registry.Image) (bytes uint64) {
	counted := map[digest.Digest]bool{}
	for _, l := range img.Layers {
		if name := lazy.SourceOf(l).Name(); !counted[name] && !store.Has(name) {
			counted[name] = true
			bytes += uint64(l.Blob.Size)
		}
	}
	return bytes
}
