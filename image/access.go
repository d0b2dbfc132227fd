package image

import (
	"context"
	"io"
	"strings"
	"sync"

	"github.com/opencontainers/go-digest"

	"berth/image/registry"
	"berth/internal/trace"
)

// origin is where a present layer came from, relative to the repository of a pull.
type origin int

const (
	fromElsewhere  origin = iota // another registry, or unknown
	fromRegistry                 // another repository of the same registry
	fromRepository               // the same repository
)

// accesses records which layers the current pulls may use. It is not on disk, because an
// interrupted pull grants no access. The index has the repositories of recorded images.
type accesses struct {
	mu     sync.Mutex // guards active and the layers of each access
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

	mu      sync.Mutex // guards all fields below
	seen    *index     // the index that origins was computed from
	origins map[digest.Digest]origin
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
func (a *accesses) origin(ref registry.Reference, layer digest.Digest) origin {
	a.mu.Lock()
	defer a.mu.Unlock()
	best := fromElsewhere
	for other := range a.active {
		if other.layers[layer] {
			best = max(best, nameOrigin(ref, other.repo.Reference().String()))
		}
	}
	return best
}

// nameOrigin compares an image name, name:tag or name@digest, with the reference of a pull.
func nameOrigin(ref registry.Reference, name string) origin {
	repository := ref.Name()
	switch {
	case strings.HasPrefix(name, repository+":") || strings.HasPrefix(name, repository+"@"):
		return fromRepository
	case strings.HasPrefix(name, ref.Domain+"/"):
		return fromRegistry
	}
	return fromElsewhere
}

// origins returns for each layer its closest origin among the recorded images. It makes one pass
// over the images; a node may have a thousand.
func (x *index) origins(ref registry.Reference, layers []digest.Digest) map[digest.Digest]origin {
	nearest := map[digest.Digest]origin{}
	for _, layer := range layers {
		nearest[layer] = fromElsewhere
	}
	for id, rec := range x.records {
		from := rec.origin(ref)
		if from == fromElsewhere {
			continue
		}
		for _, layer := range x.byID[id].Layers {
			if so, wanted := nearest[layer]; wanted {
				nearest[layer] = max(so, from)
			}
		}
	}
	return nearest
}

// origin returns the closest origin among the names of an image.
func (r imageRecord) origin(ref registry.Reference) origin {
	best := fromElsewhere
	for _, names := range [][]string{r.Digests, r.Tags} {
		for _, name := range names {
			best = max(best, nameOrigin(ref, name))
		}
	}
	return best
}

// recorded returns the closest origin of a layer among the images of an index.
func (a *access) recorded(x *index, layer digest.Digest) origin {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.seen != x {
		a.seen, a.origins = x, x.origins(a.repo.Reference(), a.wanted)
	}
	return a.origins[layer]
}

// originOf returns the closest origin of a layer among images, pulls, and layers of failed pulls.
func (s *Store) originOf(a *access, layer digest.Digest) origin {
	ref := a.repo.Reference()
	return max(s.accesses.origin(ref, layer), s.finished.origin(ref, layer), a.recorded(s.index.Load(), layer))
}

// mayUse reports whether a pull may use a present layer without a download. It asks only a registry
// that served the blob before, because another registry could claim a blob that it does not have.
func (s *Store) mayUse(ctx context.Context, a *access, l registry.Layer, from origin) bool {
	name := sourceOf(l).Name()
	switch {
	case a.has(name):
		return true
	case from == fromRepository: // its manifest was served to this pull
	case from == fromRegistry && s.hasBlob(ctx, a.repo, l):
	default:
		return false
	}
	a.grant(name)
	return true
}

func (s *Store) hasBlob(ctx context.Context, repo *registry.Repository, l registry.Layer) bool {
	// No deadline: stalled transfers end.
	defer s.cfg.Waits.BeginOpen("registry layer access", "layer "+l.DiffID.String())()
	return repo.HasBlob(ctx, l.Blob)
}

// use ensures that a pull may use a present layer. If mayUse returns false, it downloads the blob
// and checks the digest, but does not unpack it.
func (s *Store) use(ctx context.Context, a *access, l registry.Layer, from origin, track *layerTrack) error {
	ctx, span := trace.Nest(ctx, "check access")
	defer span.End()
	if s.mayUse(ctx, a, l, from) {
		track.set(LayerPresent)
		return nil
	}
	ref := a.repo.Reference()
	s.log.Info("downloading a present layer to verify that the registry has it", "image", ref.String(),
		"layer", l.Blob.Digest)
	key := flightKey{domain: ref.Domain, repository: ref.Name(), blob: l.Blob.Digest, diffID: l.DiffID}
	err := s.share(ctx, a, key, l, track, func(ctx context.Context, received *transfer) error {
		return s.fromHosts(a.repo, l, received, func(host int) (inPieces bool, err error) {
			blob, err := a.repo.Blob(ctx, l.Blob, host, func(n int) { received.at.Add(int64(n)) })
			if err != nil {
				return false, err
			}
			defer blob.Close() // read to its end or abandoned
			_, err = io.Copy(io.Discard, blob)
			return blob.InPieces(), err
		})
	})
	return err
}
