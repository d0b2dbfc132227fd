package pull

import (
	"context"
	"io"
	"sync"

	"github.com/opencontainers/go-digest"

	"berth/image"
	"berth/image/lazy"
	"berth/image/registry"
	"berth/internal/trace"
)

// accesses records which layers the current pulls may use. It is not on disk, because an
// interrupted pull grants no access. For recorded images, the [image.Snapshot] has the
// repositories.
type accesses struct {
	mu sync.Mutex // guards active and the layers of each access
	// +checklocks:mu
	active map[*access]bool
}

// access records the layers that one pull may use. A digest in a manifest is no evidence: anyone
// could publish a manifest with the digests of another user's private layers. The registry must
// serve the layer to this pull or confirm that it would (docs/adr/001-layer-access.md).
type access struct {
	all    *accesses
	repo   *registry.Repository
	wanted []digest.Digest        // names of the image's layers in the layer store
	layers map[digest.Digest]bool // the layers that the pull may read

	mu sync.Mutex
	// +checklocks:mu
	seen *image.Snapshot // the images that origins was computed from
	// +checklocks:mu
	origins map[digest.Digest]image.Origin
}

// begin returns the access of a pull to the wanted layers. The caller calls end after the image is
// recorded or the pull has failed.
func (a *accesses) begin(repo *registry.Repository, wanted []digest.Digest) *access {
	begun := &access{all: a, repo: repo, wanted: wanted, layers: map[digest.Digest]bool{}}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.active == nil {
		a.active = map[*access]bool{}
	}
	a.active[begun] = true
	return begun
}

func (a *access) end() {
	a.all.mu.Lock()
	defer a.all.mu.Unlock()
	delete(a.all.active, a)
}

// grant records that the pull's repository has served a layer or confirmed access to it.
func (a *access) grant(layer digest.Digest) {
	a.all.mu.Lock()
	defer a.all.mu.Unlock()
	a.layers[layer] = true
}

// has reports whether the pull may use a layer.
func (a *access) has(layer digest.Digest) bool {
	a.all.mu.Lock()
	defer a.all.mu.Unlock()
	return a.layers[layer]
}

// origin returns the closest origin of a layer among the current pulls.
func (a *accesses) origin(ref registry.Reference, layer digest.Digest) image.Origin {
	a.mu.Lock()
	defer a.mu.Unlock()
	best := image.FromElsewhere
	for other := range a.active {
		if other.layers[layer] {
			best = max(best, image.OriginOf(ref, other.repo.Reference().String()))
		}
	}
	return best
}

// recorded returns the closest origin of a layer among the images of a snapshot.
func (a *access) recorded(x *image.Snapshot, layer digest.Digest) image.Origin {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.seen != x {
		a.seen, a.origins = x, x.Origins(a.repo.Reference(), a.wanted)
	}
	return a.origins[layer]
}

// originOf returns the closest origin of a layer among images, pulls, and layers of failed pulls.
func (p *Puller) originOf(a *access, layer digest.Digest) image.Origin {
	ref := a.repo.Reference()
	return max(p.accesses.origin(ref, layer), image.OriginOf(ref, p.store.FinishedFor(layer)),
		a.recorded(p.store.Snapshot(), layer))
}

// mayUse reports whether a pull may use a present layer without a download. It asks only a registry
// that served the blob before, because another registry could claim a blob that it does not have.
func (p *Puller) mayUse(ctx context.Context, a *access, l registry.Layer, from image.Origin) bool {
	name := lazy.SourceOf(l).Name()
	switch {
	case a.has(name):
		return true
	case from == image.FromRepository: // its manifest was served to this pull
	case from == image.FromRegistry && p.hasBlob(ctx, a.repo, l):
	default:
		return false
	}
	a.grant(name)
	return true
}

func (p *Puller) hasBlob(ctx context.Context, repo *registry.Repository, l registry.Layer) bool {
	// No deadline: stalled transfers end.
	defer p.cfg.Waits.BeginOpen("registry layer access", "layer "+l.DiffID.String())()
	return repo.HasBlob(ctx, l.Blob)
}

// use ensures that a pull may use a present layer. If mayUse returns false, it downloads the blob
// and checks the digest, but does not unpack it.
func (p *Puller) use(ctx context.Context, a *access, l registry.Layer, from image.Origin, track *layerTrack) error {
	ctx, span := trace.Nest(ctx, "check access")
	defer span.End()
	if p.mayUse(ctx, a, l, from) {
		track.set(LayerPresent)
		return nil
	}
	ref := a.repo.Reference()
	p.log.Info("downloading a present layer to verify that the registry has it", "image", ref.String(),
		"layer", l.Blob.Digest)
	key := flightKey{domain: ref.Domain, repository: ref.Name(), blob: l.Blob.Digest, diffID: l.DiffID}
	return p.share(ctx, a, key, l, track, func(ctx context.Context, received *transfer) error {
		first := attempt{registry: true}
		return p.retry(ctx, "layer "+l.Blob.Digest.String(), first, func(at attempt) (left options, err error) {
			received.reset()
			blob, err := a.repo.Blob(ctx, l.Blob, at.host, func(n int) { received.at.Add(int64(n)) })
			if err != nil {
				return left, err
			}
			defer blob.Close() // read to its end or abandoned
			_, err = io.Copy(io.Discard, blob)
			left.hosts = a.repo.Attempts(l.Blob.Digest, blob.InPieces())
			return left, err
		})
	})
}
