package registry

import (
	"encoding/json"
	"fmt"
	"strings"
	"unicode"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/internal/errdefs"
)

// Annotations of a blob with the path of its file, in this order.
const (
	titleAnnotation = ocispec.AnnotationTitle   // written by ORAS
	modelAnnotation = "org.cncf.model.filepath" // written by ModelPack tools, read by CRI-O
)

// Limits of the path of a file in an artifact.
const (
	maxArtifactPath  = 1024 // bytes
	maxArtifactDepth = 32   // names
	maxArtifactName  = 255  // bytes of each name: NAME_MAX
)

// Artifact describes an OCI artifact that is not a container image (image-spec "manifest.md",
// Guidelines for Artifact Usage). berth stores each blob unchanged as a file. It writes an image
// configuration for the artifact, so the artifact is an image for the node.
type Artifact struct {
	Type     string         `json:"type"`     // artifactType, or the media type of the configuration
	Manifest digest.Digest  `json:"manifest"` // of the manifest
	Files    []ArtifactFile `json:"files"`    // as in the manifest
}

// ArtifactFile is a file of an artifact.
type ArtifactFile struct {
	Path      string        `json:"path"` // relative and clean
	MediaType string        `json:"mediaType"`
	Digest    digest.Digest `json:"digest"` // of the content
	Size      int64         `json:"size"`   // bytes
}

// layer returns the layer that a file becomes. Its DiffID is no digest of a tar, because the tar
// that berth makes of the file is known only after the download. The DiffID is derived from the
// blob and the path.
func (f ArtifactFile) layer() Layer {
	return Layer{
		DiffID: digest.FromString("file " + f.Path + " of an artifact"),
		Blob:   ocispec.Descriptor{MediaType: f.MediaType, Digest: f.Digest, Size: f.Size},
		File:   f.Path,
	}
}

// isArtifact reports whether a manifest does not describe a container image. As in CRI-O, an
// artifact has another type of configuration, or an artifactType and layers that are no layers of
// an image.
func isArtifact(m ocispec.Manifest) bool {
	switch m.Config.MediaType {
	case ocispec.MediaTypeImageConfig, mediaTypeDockerConfig, "":
	case "application/octet-stream": // from Docker 1.10
	default:
		return true
	}
	if m.ArtifactType == "" {
		return false
	}
	for _, l := range m.Layers {
		if !isLayerType(l.MediaType) {
			return true
		}
	}
	return false
}

// artifactOf returns the artifact that a manifest describes. It refuses paths that lead out of the
// artifact, that hide other files, or that occur twice.
func artifactOf(m ocispec.Manifest) (*Artifact, error) {
	a := &Artifact{Type: m.ArtifactType}
	if a.Type == "" {
		a.Type = m.Config.MediaType
	}
	a.Type = errdefs.Clip(a.Type)
	if len(m.Layers) > MaxLayers {
		return nil, errdefs.FailedPrecondition("artifact has %d blobs, more than the %d that can be mounted",
			len(m.Layers), MaxLayers)
	}
	seen := map[string]bool{} // true for files, false for their directories
	for i, l := range m.Layers {
		if err := checkDescriptor(l, 0); err != nil {
			return nil, malformed("blob %d: %w", i, err)
		}
		if hasNoSize(l) {
			return nil, malformed("blob %d: %s: its size is missing or 0", i, l.Digest)
		}
		path, ok := pathOf(l)
		if !ok {
			continue
		}
		if err := checkPath(path); err != nil {
			return nil, errdefs.FailedPrecondition("artifact's blob %d: title %q: %w", i, errdefs.Clip(path), err)
		}
		if err := enter(seen, path); err != nil {
			return nil, errdefs.FailedPrecondition("artifact's blob %d: title %q: %w", i, errdefs.Clip(path), err)
		}
		a.Files = append(a.Files, ArtifactFile{
			Path: path, MediaType: errdefs.Clip(l.MediaType), Digest: l.Digest, Size: l.Size,
		})
	}
	if len(a.Files) == 0 {
		return nil, errdefs.FailedPrecondition("artifact of type %q has no files", a.Type)
	}
	return a, nil
}

// pathOf returns the path of a blob's file. If a blob has no title, its digest is the name. An
// empty placeholder has no file.
func pathOf(l ocispec.Descriptor) (path string, ok bool) {
	for _, key := range []string{titleAnnotation, modelAnnotation} {
		if path := l.Annotations[key]; path != "" {
			return strings.TrimPrefix(path, "./"), true
		}
	}
	if l.MediaType == ocispec.MediaTypeEmptyJSON {
		return "", false
	}
	return l.Digest.Algorithm().String() + "-" + l.Digest.Encoded(), true
}

// checkPath rejects paths that are not relative and clean, or that mean something else in a layer.
func checkPath(path string) error {
	if len(path) > maxArtifactPath {
		return fmt.Errorf("longer than %d bytes", maxArtifactPath)
	}
	if strings.ContainsFunc(path, func(r rune) bool { return unicode.IsControl(r) || r == unicode.ReplacementChar }) {
		return fmt.Errorf("unprintable character")
	}
	names := strings.Split(path, "/")
	if len(names) > maxArtifactDepth {
		return fmt.Errorf("more than %d directories", maxArtifactDepth)
	}
	for _, name := range names {
		switch {
		case name == "" || name == "." || name == "..":
			return fmt.Errorf("not a path in the artifact")
		case len(name) > maxArtifactName:
			return fmt.Errorf("name longer than %d bytes", maxArtifactName)
		case strings.HasPrefix(name, ".wh."): // would hide a file
			return fmt.Errorf("name of a whiteout")
		}
	}
	return nil
}

// enter adds a file to the paths of an artifact.
func enter(seen map[string]bool, path string) error {
	if _, known := seen[path]; known {
		return fmt.Errorf("another blob has this path, too")
	}
	for i, c := range path {
		if c != '/' {
			continue
		}
		if seen[path[:i]] {
			return fmt.Errorf("another blob is the file %q", errdefs.Clip(path[:i]))
		}
		seen[path[:i]] = false
	}
	seen[path] = true
	return nil
}

// artifactConfig is the configuration that berth writes for an artifact.
type artifactConfig struct {
	ocispec.Image
	Artifact *Artifact `json:"artifact"`
}

// image returns the image that berth makes of an artifact.
func (a *Artifact) image() (*Image, error) {
	img := &Image{Artifact: a}
	config := artifactConfig{Artifact: a}
	config.RootFS.Type = "layers"
	for _, f := range a.Files {
		l := f.layer()
		img.Layers = append(img.Layers, l)
		config.RootFS.DiffIDs = append(config.RootFS.DiffIDs, l.DiffID)
	}
	var err error
	if img.RawConfig, err = json.Marshal(config); err != nil {
		return nil, fmt.Errorf("describe artifact: %w", err)
	}
	if len(img.RawConfig) > MaxConfigSize {
		return nil, errdefs.FailedPrecondition("artifact: its paths take more than %d bytes", MaxConfigSize)
	}
	img.Config, img.ConfigDigest = config.Image, digest.FromBytes(img.RawConfig)
	return img, nil
}

// image returns the image that berth makes of the document of an artifact.
func (d document) image() (*Image, error) {
	a := *d.artifact
	a.Manifest = digest.FromBytes(d.raw)
	return a.image()
}

// ParseArtifact returns the artifact that a stored configuration describes, or nil for a container
// image. An image's configuration cannot pass for an artifact's configuration, because no tar has
// the digests in the latter.
func ParseArtifact(config []byte) *Artifact {
	var c artifactConfig
	if err := json.Unmarshal(config, &c); err != nil || c.Artifact == nil || len(c.Artifact.Files) == 0 ||
		len(c.Artifact.Files) != len(c.RootFS.DiffIDs) {
		return nil
	}
	for i, f := range c.Artifact.Files {
		if f.layer().DiffID != c.RootFS.DiffIDs[i] {
			return nil
		}
	}
	return c.Artifact
}
