package registry

import (
	"runtime"
	"slices"

	"github.com/containerd/platforms"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// DefaultPlatform returns the platform of this program.
func DefaultPlatform() ocispec.Platform {
	return ocispec.Platform{OS: runtime.GOOS, Architecture: runtime.GOARCH}
}

// choosePlatform returns the manifest of an index that suits a node best. It is the first with the
// best matching platform, or the first without a platform if none matches.
func choosePlatform(manifests []ocispec.Descriptor, node ocispec.Platform) (best ocispec.Descriptor, ok bool) {
	matcher := platforms.Only(node)
	manifests = slices.DeleteFunc(slices.Clone(manifests), func(m ocispec.Descriptor) bool {
		return m.ArtifactType == sociIndexType // it has the platform of its image
	})
	for _, m := range manifests {
		if m.Platform != nil && matcher.Match(*m.Platform) && (!ok || matcher.Less(*m.Platform, *best.Platform)) {
			best, ok = m, true
		}
	}
	if ok {
		return best, true
	}
	i := slices.IndexFunc(manifests, func(m ocispec.Descriptor) bool { return m.Platform == nil })
	if i < 0 {
		return best, false
	}
	return manifests[i], true
}
