package image

import (
	"context"
	"io"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/opencontainers/go-digest"

	"berth/image/registry"
)

// origin says where a layer that is here came from, seen from the repository of a pull.
type origin int

const (
	fromElsewhere  origin = iota // no image here is known to have it from the pull's registry
	fromRegistry                 // from another repository of the same registry
	fromRepository               // from the same repository
)

// accesses keeps which layers the pulls under way may use. For images that are recorded the index tells.
type accesses struct {
	mu     sync.Mutex // guards active and the layers of each access
	active map[*access]bool
}

// access is what one pull has shown of its right to read layers. Naming a digest shows nothing: whoever
// publishes a manifest could read the private layers of others that this node has. The registry has to
// serve the layer to this pull, or to say that it would (docs/adr/001-layer-access.md).
type access struct {
	all    *accesses
	repo   *registry.Repository
	layers map[digest.Digest]bool // names in the layer store
}

// begin returns the access of a pull. The caller ends it when the image is recorded or the pull has failed.
func (a *accesses) begin(repo *registry.Repository) *access {
	begun := &access{all: a, repo: repo, layers: map[digest.Digest]bool{}}
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

// grant notes that the pull's repository has served a layer, or would.
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

// origin is where the pulls under way have a layer from.
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

// nameOrigin compares the name of an image with the reference of a pull.
func nameOrigin(ref registry.Reference, name string) origin {
	switch rest, same := strings.CutPrefix(name, ref.Name()); {
	case same && (rest[:min(1, len(rest))] == ":" || rest[:min(1, len(rest))] == "@"):
		return fromRepository
	case strings.HasPrefix(name, ref.Domain+"/"):
		return fromRegistry
	}
	return fromElsewhere
}

// origin is where the images that are recorded have a layer from.
func (x *index) origin(ref registry.Reference, layer digest.Digest) origin {
	best := fromElsewhere
	for id, rec := range x.records {
		layers := []digest.Digest(nil)
		if img := x.byID[id]; img != nil {
			layers = img.Layers
		} else {
			layers = rec.layers() // not listed: the kernel can't mount it
		}
		if !slices.Contains(layers, layer) {
			continue
		}
		for _, name := range slices.Concat(rec.Tags, rec.Digests) {
			best = max(best, nameOrigin(ref, name))
		}
	}
	return best
}

// originOf is where images and pulls have a layer from.
func (s *Store) originOf(ref registry.Reference, layer digest.Digest) origin {
	return max(s.accesses.origin(ref, layer), s.index.Load().origin(ref, layer))
}

// mayUse reports whether a pull may use a layer that is here, without fetching it. A registry may say so
// of a blob that it has served before. Any other could lie about a blob that it does not have.
func (s *Store) mayUse(ctx context.Context, a *access, l registry.Layer, from origin) bool {
	name := sourceOf(l).Name()
	switch {
	case a.has(name):
		return true
	case from == fromRepository: // it has served the manifest to this pull
	case from == fromRegistry && s.hasBlob(ctx, a.repo, l):
	default:
		return false
	}
	a.grant(name)
	return true
}

func (s *Store) hasBlob(ctx context.Context, repo *registry.Repository, l registry.Layer) bool {
	defer s.cfg.Waits.BeginOpen("its registry to tell whether the pull may have it", "layer "+l.DiffID.String())() // stalls are given up
	return repo.HasBlob(ctx, l.Blob)
}

// use makes sure that a pull may use a layer that is here. If there is no other way it fetches the blob,
// which is not unpacked.
func (s *Store) use(ctx context.Context, a *access, l registry.Layer, from origin, track *layerTrack) error {
	if s.mayUse(ctx, a, l, from) {
		track.set(LayerPresent)
		return nil
	}
	ref := a.repo.Reference()
	s.log.Info("fetch a layer that is here, for its registry has not shown that it has it", "image", ref.String(), "layer", l.Blob.Digest)
	key := flightKey{domain: ref.Domain, repository: ref.Name(), blob: l.Blob.Digest, diffID: l.DiffID}
	err := s.share(ctx, a, key, l, track, func(ctx context.Context, received *atomic.Int64) error {
		return s.fromHosts(a.repo, l, received, func(host int) (inParts bool, err error) {
			blob, err := a.repo.Blob(ctx, l.Blob, host, func(n int) { received.Add(int64(n)) })
			if err != nil {
				return false, err
			}
			defer blob.Close() // read to its end or given up
			_, err = io.Copy(io.Discard, blob)
			return blob.InParts(), err
		})
	})
	return err
}
