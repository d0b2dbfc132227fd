package lazy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/image/blobindex"
	"berth/image/registry"
	"berth/internal/errdefs"
)

// blobSource reads ranges of the blob of an incomplete layer. It asks the repositories of the pulls
// that use the layer, with the credentials of these pulls. If none serves the blob, or after a
// restart, it asks the repositories of the images with the layer, with the credentials of the node.
type blobSource struct {
	z    *Layers
	name digest.Digest // of the layer
	blob ocispec.Descriptor

	users int // calls of Layers.use that are not done; guarded by the lock of z

	mu sync.Mutex
	// +checklocks:mu
	places []*place // in the order in which they are asked
	// +checklocks:mu
	closed bool
}

// maxPlaces limits the places of a blobSource.
const maxPlaces = 8

// place is something that serves a blob.
type place struct {
	repo *registry.Repository // as it was given
	blob io.ReaderAt          // of an archive; then repo is nil

	mu sync.Mutex
	// +checklocks:mu
	open *registry.Repository // nil: to be opened
	// +checklocks:mu
	first int // number of the host to ask first
}

// Range implements fill.Source.
func (b *blobSource) Range(ctx context.Context, offset, size int64) (io.ReadCloser, error) {
	tried := map[*place]bool{}
	var failed error
	for _, find := range []func() []*place{b.list, b.recorded} {
		for _, p := range find() {
			if tried[p] {
				continue
			}
			tried[p] = true
			body, err := b.from(ctx, p, offset, size)
			if err == nil || ctx.Err() != nil {
				return body, err
			}
			b.putLast(p)
			failed = errors.Join(failed, err)
		}
	}
	if failed == nil {
		failed = errdefs.Unavailable("no image names a registry that has %s", b.blob.Digest)
	}
	return nil, failed
}

// from requests a range of the blob from one place.
func (b *blobSource) from(ctx context.Context, p *place, offset, size int64) (io.ReadCloser, error) {
	if p.blob != nil {
		return io.NopCloser(io.NewSectionReader(p.blob, offset, size)), nil
	}
	repo, first, err := p.repository(b.stall())
	if err != nil {
		return nil, err
	}
	parts := b.z.parts
	received := func(n int) { parts.Observer.Received(repo.Reference().Domain, n) }
	body, err := repo.Range(ctx, b.blob, first, offset, size, received)
	if err != nil {
		p.reopen(repo) // its hosts may be different or reachable later
		p.release(repo)
		return nil, err
	}
	return &placeBody{Range: body, b: b, p: p, repo: repo, ctx: ctx, slow: parts.Slow, end: parts.Begin()}, nil
}

// stall returns the longest wait for a byte.
func (b *blobSource) stall() time.Duration { return b.z.cfg.Stall / maxStall }

// repository returns the open repository of a place.
func (p *place) repository(stall time.Duration) (_ *registry.Repository, first int, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.open == nil {
		if p.open, err = p.repo.Again(stall); err != nil {
			return nil, 0, err
		}
	}
	return p.open, p.first, nil
}

// reopen closes a repository that has failed, unless that was done.
func (p *place) reopen(failed *registry.Repository) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.open == failed {
		p.open = nil
		failed.Close()
	}
}

// release is called after each request. If the repository was closed meanwhile, it closes the
// connection of the request, too.
func (p *place) release(repo *registry.Repository) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.open != repo {
		repo.Close()
	}
}

// close closes idle connections.
func (p *place) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.open != nil {
		p.open.Close()
		p.open = nil
	}
}

// placeBody is a range from a registry, read at the rate of all pulls.
type placeBody struct {
	*registry.Range
	b    *blobSource
	p    *place
	repo *registry.Repository
	ctx  context.Context
	slow func(ctx context.Context, n int) error
	end  func()
}

// Read implements io.Reader.
func (r *placeBody) Read(p []byte) (int, error) {
	n, err := r.Range.Read(p)
	if err == nil {
		err = r.slow(r.ctx, n)
	}
	return n, err
}

// Close implements io.Closer.
func (r *placeBody) Close() error {
	r.end()
	err := r.Range.Close()
	r.p.release(r.repo)
	return err
}

// Reject implements fill.Rejecter.
func (r *placeBody) Reject() {
	r.b.putLast(r.p)
	r.p.mu.Lock()
	defer r.p.mu.Unlock()
	r.p.first = r.Host() + 1
}

// add adds a place. If first is set, the place is asked first, and replaces an existing place of
// the same repository. replaced reports whether there was such a place. If first is not set, an
// existing place of the same repository is kept, because it may have the credentials of a pull.
func (b *blobSource) add(p *place, first bool) (replaced bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	same := slices.IndexFunc(b.places, func(o *place) bool {
		return p.repo != nil && o.repo != nil && o.repo.Reference().Name() == p.repo.Reference().Name()
	})
	switch {
	case b.closed, same >= 0 && !first:
		p.close()
		return false
	case same >= 0:
		b.places[same].close()
		b.places = slices.Delete(b.places, same, same+1)
	}
	if first {
		b.places = slices.Insert(b.places, 0, p)
	} else {
		b.places = append(b.places, p)
	}
	for len(b.places) > maxPlaces {
		last := len(b.places) - 1
		b.places[last].close()
		b.places = b.places[:last]
	}
	return same >= 0
}

// drop removes a place.
func (b *blobSource) drop(p *place) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.places = slices.DeleteFunc(b.places, func(o *place) bool { return o == p })
	p.close()
}

func (b *blobSource) list() []*place {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.places)
}

// putLast moves a failed place to the end of the list.
func (b *blobSource) putLast(p *place) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if i := slices.Index(b.places, p); i >= 0 {
		b.places = append(slices.Delete(b.places, i, i+1), p)
	}
}

// recorded adds the repositories of the images that have the layer, and returns all places.
func (b *blobSource) recorded() []*place {
	for _, ref := range b.z.images.Servers(b.name) {
		repo, err := b.z.parts.Client.OpenWithin(ref, registry.Credentials{}, b.stall())
		if err != nil {
			b.z.log.Debug("a registry of an incomplete layer cannot be asked", "repository", ref.Name(), "error", err)
			continue
		}
		b.add(&place{repo: repo}, false)
	}
	return b.list()
}

func (b *blobSource) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	for _, p := range b.places {
		p.close()
	}
	b.places = nil
}

// prove checks, with a random part of the blob, that a place serves the blob of an index to the
// pull. A HEAD request would not show that the registry serves ranges. The caller has checked that
// the registry has served the whole blob to this node before. Another registry might have only a
// part of the blob, but the index has the names of all files (docs/adr/001-layer-access.md).
func (b *blobSource) prove(ctx context.Context, p *place, x *blobindex.Index) error {
	cells := (x.BlobSize + blobindex.Grid - 1) / blobindex.Grid
	offset := rand.Int64N(cells) * blobindex.Grid
	buf := make([]byte, min(blobindex.Grid, x.BlobSize-offset))
	body, err := b.from(ctx, p, offset, int64(len(buf)))
	if err != nil {
		return err
	}
	_, err = io.ReadFull(body, buf)
	if err := errors.Join(err, body.Close()); err != nil {
		return err
	}
	if err := x.Verify(offset, buf); err != nil {
		return fmt.Errorf("the registry sends another blob: %w", err)
	}
	return nil
}

// proveSealed is prove for a sealed index. The place must send a random span of the blob.
func (b *blobSource) proveSealed(ctx context.Context, p *place, x *blobindex.Index) error {
	i := len(x.Points) - 1
	if i > 1 {
		i = 1 + rand.IntN(i) // the first span has the gzip header, and no seal
	}
	offset, size := x.GridRange(i, i)
	raw, err := b.bytes(ctx, p, offset, size)
	if err != nil {
		return err
	}
	if _, _, err := x.Opened(i, raw); err != nil {
		return fmt.Errorf("the registry sends another blob: %w", err)
	}
	return nil
}
