package archive

import (
	"errors"
	"regexp"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/image/registry"
	"berth/internal/errdefs"
)

// Skipped is an entry of an archive that is no image for this node. It is for example a signature,
// an attestation or the image of another platform.
type Skipped struct {
	Name   string // its name in the archive, or else its digest
	Reason error
}

// isSkippable reports whether an entry with this error can be left out. A damaged entry cannot.
func isSkippable(entry ocispec.Descriptor, err error) bool {
	return errdefs.IsNotFound(err) || errors.Is(err, registry.ErrNotImage) ||
		err != nil && !registry.IsDocumentType(entry.MediaType)
}

// skippedEntry describes an entry of an index.
func skippedEntry(entry ocispec.Descriptor, reason error) Skipped {
	name := entry.Digest.String()
	for _, key := range []string{refNameAnnotation, nameAnnotation} {
		if text := entry.Annotations[key]; text != "" {
			name = text
		}
	}
	return Skipped{errdefs.Clip(name), reason}
}

// withoutArtifacts leaves out the artifacts that have no name if there are container images.
// Tools that copy an image add charts and bills of materials in this way.
func withoutArtifacts(images []Image) (kept []Image, skipped []Skipped) {
	for _, img := range images {
		if img.Artifact == nil || len(img.Names) > 0 {
			kept = append(kept, img)
			continue
		}
		reason := errdefs.FailedPrecondition("artifact of type %q without a name", img.Artifact.Type)
		skipped = append(skipped, Skipped{img.Digest.String(), reason})
	}
	for _, img := range kept {
		if img.Artifact == nil {
			return kept, skipped
		}
	}
	return images, nil
}

// cosignTag matches the tags under which cosign stores signatures and attestations of an image.
// Registries without the referrers API use them too.
var cosignTag = regexp.MustCompile(`^sha256-[0-9a-f]{64}(\.(sig|att|sbom))?$`)

// isAttachment reports whether all names of an image in a docker archive are tags of attachments.
// Such an archive does not say what kind of content a layer has.
func isAttachment(tags []string) bool {
	for _, tag := range tags {
		if ref, err := registry.ParseReference(tag); err != nil || !cosignTag.MatchString(ref.Tag) {
			return false
		}
	}
	return len(tags) > 0
}
