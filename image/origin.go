package image

import (
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"

	"berth/image/registry"
)

// Origin is where a present layer came from, relative to the repository of a pull.
type Origin int

const (
	FromElsewhere  Origin = iota // another registry, or unknown
	FromRegistry                 // another repository of the same registry
	FromRepository               // the same repository
)

// OriginOf compares an image name, name:tag or name@digest, with the reference of a pull.
func OriginOf(ref registry.Reference, name string) Origin {
	repository := ref.Name()
	switch {
	case strings.HasPrefix(name, repository+":") || strings.HasPrefix(name, repository+"@"):
		return FromRepository
	case strings.HasPrefix(name, ref.Domain+"/"):
		return FromRegistry
	}
	return FromElsewhere
}

// Origins returns for each layer its closest origin among the recorded images. It makes one pass
// over the images; a node may have a thousand.
func (x *Snapshot) Origins(ref registry.Reference, layers []digest.Digest) map[digest.Digest]Origin {
	nearest := map[digest.Digest]Origin{}
	for _, layer := range layers {
		nearest[layer] = FromElsewhere
	}
	for id, rec := range x.records {
		from := rec.origin(ref)
		if from == FromElsewhere {
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
func (r imageRecord) origin(ref registry.Reference) Origin {
	best := FromElsewhere
	for _, names := range [][]string{r.Digests, r.Tags} {
		for _, name := range names {
			best = max(best, OriginOf(ref, name))
		}
	}
	return best
}

// ServedBy reports whether an image from a registry has a layer. The names of an image are no
// evidence of its registry, because archives and operators choose them.
func (x *Snapshot) ServedBy(domain string, layer digest.Digest) bool {
	for id, rec := range x.records {
		if slices.Contains(rec.Registries, domain) && slices.Contains(x.byID[id].Layers, layer) {
			return true
		}
	}
	return false
}
