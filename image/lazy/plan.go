package lazy

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/opencontainers/go-digest"

	"berth/image/layer"
	"berth/image/registry"
	"berth/internal/rootfs"
)

// facts decide whether a missing layer is created from an index of its blob and filled later.
type facts struct {
	policy  string // of Config
	driver  rootfs.Kind
	works   bool // the kernel can do it
	pinned  bool // the image must not depend on its registry
	indexed bool // there is an index of the layer's blob
	table   bool // the blob has a table of contents that can be used
	served  bool // the pull's registry has served the blob to this node
	missing int64
	least   int64 // Config.MinBytes; missing counts the bytes of the image's missing layers with an index
	// leastTime is Config.MinTime. estimate is the time to fetch the missing bytes, 0 if unknown.
	leastTime, estimate time.Duration
}

// decide returns whether to create the layer lazily, and why.
func (f facts) decide() (lazily bool, reason string) {
	switch {
	case f.policy == Off:
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

// Plan says which layers of an image a pull creates lazily. The zero value creates none.
type Plan struct {
	store  *layer.Store // the store for which the plan was made
	layers []decision   // by number of the layer
}

type decision struct {
	lazily bool
	reason string
	table  bool // the index is made of the blob's table of contents
}

// Lazily reports whether a layer is created lazily in a store, and why, or why not.
func (p *Plan) Lazily(store *layer.Store, i int) (lazily bool, reason string) {
	if p.layers == nil {
		return false, "an index was wrong"
	}
	return store == p.store && p.layers[i].lazily, p.layers[i].reason
}

// UsesTables reports whether layers are created from tables of contents, which are not proven.
func (p *Plan) UsesTables() bool {
	return slices.ContainsFunc(p.layers, func(d decision) bool { return d.lazily && d.table })
}

// Plan decides about the missing layers of an image. whole is set for an image that must not depend
// on its registry.
func (z *Layers) Plan(ctx context.Context, store *layer.Store, img *registry.Image, repo *registry.Repository,
	whole bool) *Plan {
	domain := repo.Reference().Domain
	plan := &Plan{store: store, layers: make([]decision, len(img.Layers))}
	known := facts{policy: z.cfg.Policy, driver: store.Kind(), works: z.engine != nil, pinned: whole,
		least: z.cfg.MinBytes, leastTime: z.cfg.MinTime}
	if !whole {
		z.findZtocs(ctx, store, img, repo)
	}
	counted := map[digest.Digest]bool{}
	served := func(l registry.Layer) bool { return l.File == "" && z.indexer.store.Served(l.Blob.Digest, domain) }
	for _, l := range img.Layers {
		indexed := served(l) || z.mayUseTable(l)
		if name := SourceOf(l).Name(); !counted[name] && !store.Has(name) && indexed {
			counted[name] = true
			known.missing += l.Blob.Size
		}
	}
	known.estimate = z.rates.estimate(domain, known.missing)
	for i, l := range img.Layers {
		known.indexed, known.served = l.File == "" && z.indexer.store.Has(l.Blob.Digest), served(l)
		known.table = !known.served && z.mayUseTable(l) // an own index is preferred, because it needs no proof
		plan.layers[i].table = known.table
		plan.layers[i].lazily, plan.layers[i].reason = known.decide()
	}
	return plan
}

// Observe notes a pull of whole layers, for estimates.
func (z *Layers) Observe(host string, bytes int64, took time.Duration) {
	z.rates.observe(host, bytes, took)
}

// RejectTables makes later pulls ignore the tables of contents of a plan. The caller's pull has
// failed with them, and then fetched the image whole.
func (z *Layers) RejectTables(img *registry.Image, plan *Plan) {
	for i, d := range plan.layers {
		if d.lazily && d.table {
			z.distrust.add(img.Layers[i].Blob.Digest, tableOf(img.Layers[i]))
		}
	}
}
