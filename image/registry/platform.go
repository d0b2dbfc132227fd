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

// attestationAnnotation marks the attestations that buildx puts into an index. Their platform is
// unknown/unknown.
const attestationAnnotation = "vnd.docker.reference.type"

func isAttestation(m ocispec.Descriptor) bool { return m.Annotations[attestationAnnotation] != "" }

// choosePlatform returns the manifest of an index that suits a node best. It is the first with the
// best matching platform, or the first without a platform if none matches. An artifact is chosen
// only if there is no image.
func choosePlatform(manifests []ocispec.Descriptor, node ocispec.Platform) (best ocispec.Descriptor, ok bool) {
	var images, artifacts []ocispec.Descriptor
	for _, m := range manifests {
		switch {
		case m.ArtifactType == sociIndexType || isAttestation(m): // it may have the platform of its image
		case m.ArtifactType != "":
			artifacts = append(artifacts, m)
		default:
			images = append(images, m)
		}
	}
	if best, ok = bestOf(images, node); ok {
		return best, true
	}
	return bestOf(artifacts, node)
}

// bestOf is choosePlatform among manifests of one kind.
func bestOf(manifests []ocispec.Descriptor, node ocispec.Platform) (best ocispec.Descriptor, ok bool) {
	matcher := platforms.Only(node)
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
