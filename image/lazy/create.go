package lazy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"time"

	"github.com/opencontainers/go-digest"
	"google.golang.org/grpc/codes"

	"berth/image/blobindex"
	"berth/image/layer"
	"berth/image/registry"
	"berth/internal/errdefs"
	"berth/internal/trace"
)

// Create creates layer i of an image from the index of its blob. The repository has shown that it
// has the blob. Create returns false if the layer must be fetched whole, after it has logged why.
// The error wraps layer.ErrThere if another pull has created the layer meanwhile.
func (z *Layers) Create(ctx context.Context, plan *Plan, i int, l registry.Layer,
	repo *registry.Repository) (bool, error) {
	ctx, span := trace.Nest(ctx, "create lazily")
	defer span.End()
	err := z.createBy(ctx, plan.store, repo, l, plan.layers[i].table)
	switch {
	case err == nil:
		z.Decided(SourceOf(l).Name(), "fetched after the pull: "+plan.layers[i].reason)
		return true, nil
	case errors.Is(err, layer.ErrThere):
		return false, err
	case ctx.Err() != nil:
		return false, context.Cause(ctx)
	case errdefs.Code(err) == codes.ResourceExhausted:
		return false, err
	}
	z.Decided(SourceOf(l).Name(), "fetched whole: "+err.Error())
	z.log.Info("layer is fetched whole, because it cannot be created from its index", "image", repo.Reference().String(),
		"layer", l.Blob.Digest, "error", err)
	return false, nil
}

// createBy creates a layer from this node's index, or from a table of contents.
func (z *Layers) createBy(ctx context.Context, store *layer.Store, repo *registry.Repository, l registry.Layer,
	table bool) error {
	if table {
		return z.createByTable(ctx, store, repo, l)
	}
	x, err := z.getIndex(ctx, l)
	if err != nil {
		return err
	}
	return z.createByIndex(ctx, store, repo, l, x)
}

// getIndex reads this node's index of a layer's blob. It tries again while the index is in use, by
// another pull for example, which never takes long.
func (z *Layers) getIndex(ctx context.Context, l registry.Layer) (*blobindex.Index, error) {
	const attempts, pause = 50, 20 * time.Millisecond
	for left := attempts; ; left-- {
		x, err := z.indexer.store.Get(l.Blob.Digest)
		if err == nil {
			return x, matches(x, l)
		}
		if !errors.Is(err, fs.ErrNotExist) || !z.indexer.store.Has(l.Blob.Digest) || left == 0 {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(pause):
		}
	}
}

// matches returns an error if an index does not belong to a layer.
func matches(x *blobindex.Index, l registry.Layer) error {
	if x.Blob != l.Blob.Digest || x.DiffID != l.DiffID || x.BlobSize != l.Blob.Size {
		return errdefs.FailedPrecondition("the index is one of the tar %s and %d bytes, the image names %s and %d",
			x.DiffID, x.BlobSize, l.DiffID, l.Blob.Size)
	}
	return nil
}

// createByIndex creates a layer from an index of this node if the registry proves that it has the
// blob.
func (z *Layers) createByIndex(ctx context.Context, store *layer.Store, repo *registry.Repository, l registry.Layer,
	x *blobindex.Index) (err error) {
	src, done := z.use(SourceOf(l), l.Blob.Size)
	defer done()
	p := &place{repo: repo}
	if err := src.prove(ctx, p, x); err != nil {
		p.close()
		return fmt.Errorf("ask the registry for parts of the blob: %w", err)
	}
	src.add(p, true)
	err = store.CreateLazy(ctx, SourceOf(l), x, nil, z.filler(src, SourceOf(l), x, nil))
	z.prefer(src.name)
	if errdefs.Code(err) == codes.DataLoss {
		err = errors.Join(err, z.indexer.store.Remove(l.Blob.Digest))
	}
	return err
}

// IsForeign reports whether a pull must not use an incomplete layer before its table of contents is
// proven. That is so if another registry has served the table, or if the image's manifest does not
// name this table.
func (z *Layers) IsForeign(store *layer.Store, l registry.Layer, domain string) bool {
	table := store.TOC(SourceOf(l).Name())
	return table != nil && (table.Registry != domain || table.Name != tableOf(l))
}

// AwaitFrom waits until a layer is complete. The layer can be filled from a copy of its blob
// meanwhile.
func (z *Layers) AwaitFrom(ctx context.Context, name digest.Digest, blob io.ReaderAt) error {
	src := z.known(name)
	if z.Get(name) == nil || src == nil {
		return nil
	}
	p := &place{blob: blob}
	src.add(p, true)
	defer src.drop(p)
	return z.Await(ctx, []digest.Digest{name})
}

// Offer lets the incomplete layers of an image ask a repository with the credentials of its pull,
// which has access to them.
func (z *Layers) Offer(repo *registry.Repository, layers ...digest.Digest) {
	for _, name := range layers {
		if z.Get(name) == nil {
			continue
		}
		if src := z.known(name); src != nil {
			src.add(&place{repo: repo}, true)
		}
	}
}

// Retire sets a layer aside that cannot be completed, so that a pull can create it again.
func (z *Layers) Retire(store *layer.Store, from layer.Source) error {
	name := from.Name()
	l := store.Lazy(name)
	if l == nil || l.Err() == nil {
		return nil
	}
	z.log.Warn("layer that cannot be completed is set aside", "layer", name, "error", l.Err())
	if table := store.TOC(name); table != nil {
		z.distrust.add(from.Blob, table.Name) // rejectTable may come later
	}
	return store.Retire(name)
}
