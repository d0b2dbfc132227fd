package registry

import (
	"fmt"

	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/internal/errdefs"
)

// ReadBlob returns the content of a manifest, an index or a configuration that is on this machine.
// It returns an error if the content does not have the descriptor's size and digest.
type ReadBlob func(ocispec.Descriptor) ([]byte, error)

// ResolveLocal is [Repository.Resolve] for an image whose documents are on this machine. top
// describes its index or manifest. The documents get the same checks as a registry's documents. The
// error matches [ErrNotImage] if top describes a signature or something else that belongs to an
// image.
func ResolveLocal(read ReadBlob, top ocispec.Descriptor, node ocispec.Platform) (*Image, error) {
	if _, ok := choosePlatform([]ocispec.Descriptor{top}, node); !ok {
		return nil, errdefs.NotFound("image %s is not for platform %s", top.Digest, platforms.Format(node))
	}
	doc, err := readDocument(read, top)
	if err != nil {
		return nil, err
	}
	c := &choice{node: node, top: top.Digest, local: true}
	c.read = func(want ocispec.Descriptor) (document, error) {
		doc, err := readDocument(read, want)
		if err != nil {
			err = fmt.Errorf("index %s: %w", top.Digest, err)
		}
		return doc, err
	}
	c.config = func(m ocispec.Manifest) (*Image, error) {
		if m.Config.Digest.Algorithm() != digest.SHA256 {
			return nil, errdefs.FailedPrecondition("config %s: an image's ID must be a sha256 digest", m.Config.Digest)
		}
		config, err := read(m.Config)
		if err != nil {
			return nil, fmt.Errorf("read config %s: %w", m.Config.Digest, err)
		}
		return LocalImage(config, m.Layers)
	}
	return c.image(doc, top.Digest)
}

func readDocument(read ReadBlob, want ocispec.Descriptor) (document, error) {
	if err := checkDescriptor(want, MaxManifestSize); err != nil {
		return document{}, malformed("manifest: %w", err)
	}
	data, err := read(want)
	if err != nil {
		return document{}, fmt.Errorf("read manifest %s: %w", want.Digest, err)
	}
	doc, err := parseDocument(data, "")
	doc.raw = data
	return doc, err
}

// LocalImage returns the image of a configuration and its layers' blobs, bottom first. It has no
// manifest, and so no Digest.
func LocalImage(config []byte, layers []ocispec.Descriptor) (*Image, error) {
	if len(config) > MaxConfigSize {
		return nil, errdefs.FailedPrecondition("config is larger than the limit of %d bytes", MaxConfigSize)
	}
	if len(layers) > MaxLayers {
		return nil, errdefs.FailedPrecondition("image has %d layers, more than the %d that can be mounted",
			len(layers), MaxLayers)
	}
	img := &Image{ConfigDigest: digest.FromBytes(config), RawConfig: config}
	var err error
	img.Config, img.Layers, err = parseConfig(config, layers)
	return img, err
}

// ParseIndex parses the index of an OCI layout (image-spec "image-layout.md") and returns its
// entries. They may have any media type; [ResolveLocal] checks what they name.
func ParseIndex(data []byte) ([]ocispec.Descriptor, error) {
	doc, err := parseDocument(data, ocispec.MediaTypeImageIndex)
	if err != nil {
		return nil, err
	}
	return doc.index, nil
}

// CheckValues returns an error if JSON has more than [MaxValues] values. Call it before decoding.
func CheckValues(data []byte) error { return checkValues(data) }
