package registry

import (
	"encoding/json"
	"errors"
	"fmt"
	"mime"
	"strings"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/internal/errdefs"
)

// Limits for documents of a registry, so that they cannot exhaust the node.
const (
	MaxManifestSize = 8 << 20 // bytes of a manifest or index
	MaxConfigSize   = 4 << 20 // bytes of an image configuration, which stays in memory; podman's limit, too
	MaxValues       = 1 << 18 // JSON values in a document: an empty descriptor takes 2 bytes here and 120 in memory
	MaxIndexDepth   = 3       // indexes between a reference and its manifest
	MaxLayers       = 500     // overlayfs mounts no more (OVL_MAX_STACK in fs/overlayfs)
)

// Media types of Docker's formats. The image-spec package has the media types of OCI.
const (
	mediaTypeDockerManifest = "application/vnd.docker.distribution.manifest.v2+json"
	mediaTypeDockerList     = "application/vnd.docker.distribution.manifest.list.v2+json"
	mediaTypeDockerConfig   = "application/vnd.docker.container.image.v1+json"
	mediaTypeDockerSchema1  = "application/vnd.docker.distribution.manifest.v1+json"
	mediaTypeSignedSchema1  = "application/vnd.docker.distribution.manifest.v1+prettyjws"
	dockerLayerPrefix       = "application/vnd.docker.image.rootfs."
	ociLayerPrefix          = "application/vnd.oci.image.layer."
)

// acceptManifests is the Accept header for manifests.
var acceptManifests = []string{strings.Join([]string{
	ocispec.MediaTypeImageIndex, ocispec.MediaTypeImageManifest, mediaTypeDockerList, mediaTypeDockerManifest, "*/*",
}, ", ")}

// document is a parsed manifest or index.
type document struct {
	index    []ocispec.Descriptor // of an index; nil for a manifest
	manifest ocispec.Manifest     // of a manifest
	artifact *Artifact            // what the manifest describes, without Manifest; nil: a container image
	raw      []byte               // as the registry served it; set by fetchDocument
}

// parseDocument parses a manifest or index. contentType is the registry's Content-Type. The content
// decides the type of the document. Its mediaType and the Content-Type must agree with it. A
// document that is both a manifest and an index would be two images (CVE-2021-41190).
func parseDocument(data []byte, contentType string) (document, error) {
	var raw struct {
		SchemaVersion schemaVersion        `json:"schemaVersion"`
		MediaType     string               `json:"mediaType"`
		ArtifactType  string               `json:"artifactType"`
		Manifests     []ocispec.Descriptor `json:"manifests"`
		Config        *ocispec.Descriptor  `json:"config"`
		Layers        []ocispec.Descriptor `json:"layers"`
		FSLayers      json.RawMessage      `json:"fsLayers"`
		Subject       *ocispec.Descriptor  `json:"subject"`
		Annotations   map[string]string    `json:"annotations"`
	}
	if err := decode(data, &raw); err != nil {
		return document{}, fmt.Errorf("not a manifest: %w", err)
	}
	if raw.SchemaVersion == "1" || raw.FSLayers != nil || isSchema1(contentType) {
		return document{}, errdefs.FailedPrecondition("Docker image manifest schema 1 is not supported: rebuild the image as an OCI image or with Docker 1.10 or later")
	}
	isIndex, isManifest := raw.Manifests != nil, raw.Config != nil || raw.Layers != nil
	switch {
	case raw.SchemaVersion != "2" && raw.SchemaVersion != "":
		return document{}, malformed("not a manifest: schema version %q", errdefs.Clip(string(raw.SchemaVersion)))
	case isIndex == isManifest:
		return document{}, malformed("not a manifest: it must have either manifests or a config")
	case isManifest && raw.Config == nil:
		return document{}, malformed("not an image manifest: it has no config")
	}
	for _, t := range []string{raw.MediaType, mediaType(contentType)} {
		if isIndex && isManifestType(t) || isManifest && isIndexType(t) {
			return document{}, malformed("content does not match the media type %s", errdefs.Clip(t))
		}
	}
	if isIndex {
		return document{index: raw.Manifests}, nil
	}
	m := ocispec.Manifest{
		MediaType:    raw.MediaType,
		ArtifactType: raw.ArtifactType,
		Config:       *raw.Config,
		Layers:       raw.Layers,
		Subject:      raw.Subject,
		Annotations:  raw.Annotations,
	}
	if isArtifact(m) {
		artifact, err := artifactOf(m)
		return document{manifest: m, artifact: artifact}, notImage(err)
	}
	return document{manifest: m}, checkManifest(m)
}

// checkManifest rejects manifests of images that cannot be mounted or that exceed the limits.
func checkManifest(m ocispec.Manifest) error {
	if err := checkDescriptor(m.Config, MaxConfigSize); err != nil {
		return malformed("config: %w", err)
	}
	if len(m.Layers) > MaxLayers {
		return errdefs.FailedPrecondition("image has %d layers, more than the %d that can be mounted",
			len(m.Layers), MaxLayers)
	}
	sizes := make(map[digest.Digest]int64, len(m.Layers))
	for i, l := range m.Layers {
		if l.MediaType != "" && !isLayerType(l.MediaType) {
			err := errdefs.FailedPrecondition("layer %d has the media type %q, which is no container image's layer",
				i, errdefs.Clip(l.MediaType))
			if isEncrypted(l.MediaType) {
				return err
			}
			return notImage(err)
		}
		if err := checkDescriptor(l, 0); err != nil {
			return malformed("layer %d: %w", i, err)
		}
		if size, ok := sizes[l.Digest]; ok && size != l.Size { // downloads of one blob are shared
			return malformed("layer %d: %s has two sizes", i, l.Digest)
		}
		sizes[l.Digest] = l.Size
	}
	return nil
}

// checkDescriptor checks digest and size; limit 0 is none.
func checkDescriptor(d ocispec.Descriptor, limit int64) error {
	if err := checkDigest(d.Digest); err != nil {
		return err
	}
	if d.Size < 0 {
		return errdefs.InvalidArgument("%s: size is negative", d.Digest)
	}
	if limit > 0 && d.Size > limit {
		return errdefs.InvalidArgument("%s: size %d is larger than the limit of %d bytes", d.Digest, d.Size, limit)
	}
	return nil
}

// parseConfig parses an image configuration and pairs the manifest's layers with their uncompressed
// digests.
func parseConfig(data []byte, layers []ocispec.Descriptor) (ocispec.Image, []Layer, error) {
	var c ocispec.Image
	if err := decode(data, &c); err != nil {
		return c, nil, fmt.Errorf("config: %w", err)
	}
	if len(c.RootFS.DiffIDs) != len(layers) {
		return c, nil, malformed("config has %d layers, manifest %d", len(c.RootFS.DiffIDs), len(layers))
	}
	pairs := make([]Layer, 0, len(layers))
	for i, d := range c.RootFS.DiffIDs {
		if err := checkDigest(d); err != nil {
			return c, nil, malformed("config: layer %d: %w", i, err)
		}
		if d.Algorithm() != digest.SHA256 {
			return c, nil, malformed("config: layer %d: %s is not a sha256 digest", i, d.Algorithm())
		}
		pairs = append(pairs, Layer{DiffID: d, Blob: layers[i]})
	}
	return c, pairs, nil
}

// mediaType strips the parameters of a Content-Type.
func mediaType(contentType string) string {
	t, _, err := mime.ParseMediaType(contentType)
	if err != nil {
		return ""
	}
	return t
}

func isSchema1(contentType string) bool {
	t := mediaType(contentType)
	return t == mediaTypeDockerSchema1 || t == mediaTypeSignedSchema1
}

func isIndexType(t string) bool { return t == ocispec.MediaTypeImageIndex || t == mediaTypeDockerList }

// IsDocumentType reports whether a media type is empty, or the type of a manifest or index.
func IsDocumentType(t string) bool { return t == "" || isIndexType(t) || isManifestType(t) }

func isManifestType(t string) bool {
	return t == ocispec.MediaTypeImageManifest || t == mediaTypeDockerManifest
}

// isLayerType accepts tar layers in any compression, because the content shows the compression.
// Encrypted layers, Helm charts and attestations are no filesystems.
func isLayerType(t string) bool {
	return (strings.HasPrefix(t, ociLayerPrefix) || strings.HasPrefix(t, dockerLayerPrefix)) && !isEncrypted(t)
}

func isEncrypted(layerType string) bool { return strings.Contains(layerType, "encrypted") }

// ErrNotImage matches errors about manifests that describe neither a container image nor an
// artifact that can be stored. Examples are signatures, attestations and bills of materials.
var ErrNotImage = errors.New("not an image")

// notImage makes an error match ErrNotImage, with the same text and code.
func notImage(err error) error {
	if err == nil {
		return nil
	}
	return &notImageError{err}
}

type notImageError struct{ error }

func (e *notImageError) Unwrap() error        { return e.error }
func (e *notImageError) Is(target error) bool { return target == ErrNotImage }
