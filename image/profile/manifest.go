package profile

import (
	"encoding/json"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/internal/errdefs"
)

// MediaType marks an artifact as a seccomp profile (KEP-6061).
const MediaType = "application/vnd.cncf.seccomp-profile.config.v1+json"

// MaxManifest limits the manifest of an artifact, in bytes.
const MaxManifest = 64 << 10

// CheckManifest checks the manifest of an artifact, of at most MaxManifest bytes, and returns the
// descriptor of its only layer.
// An index is refused: a pinned digest names one profile, which is the same for every platform.
func CheckManifest(data []byte) (ocispec.Descriptor, error) {
	var none ocispec.Descriptor
	var m ocispec.Manifest
	if err := json.Unmarshal(data, &m); err != nil {
		return none, invalid("manifest is no JSON: %s", errdefs.Clip(err.Error()))
	}
	if m.SchemaVersion != 2 || m.MediaType != "" && m.MediaType != ocispec.MediaTypeImageManifest {
		return none, invalid("%q is no OCI image manifest", errdefs.Clip(m.MediaType))
	}
	if m.Config.MediaType != MediaType && m.ArtifactType != MediaType {
		return none, invalid("neither config nor artifactType has the media type %s", MediaType)
	}
	if len(m.Layers) != 1 {
		return none, invalid("manifest has %d layers, a profile has one", len(m.Layers))
	}
	l := m.Layers[0]
	if err := l.Digest.Validate(); err != nil {
		return none, invalid("digest of the layer: %s", errdefs.Clip(err.Error()))
	}
	if l.Size < 1 || l.Size > MaxSize {
		return none, invalid("layer has %d bytes, allowed are 1 to %d", l.Size, MaxSize)
	}
	return l, nil
}
