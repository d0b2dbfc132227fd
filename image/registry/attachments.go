package registry

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/internal/errdefs"
)

// Document is an index or a manifest as the registry served it.
type Document struct {
	Digest digest.Digest
	Raw    []byte
}

// Attachment is a signature that cosign has stored beside an image. Nothing in it is verified.
type Attachment struct {
	MediaType   string
	Payload     []byte
	Annotations map[string]string
}

// CosignBundle begins the types of sigstore bundles, the default of cosign 3. Their statements name
// no repository, which policies compare, and package trust cannot verify them.
const CosignBundle = "application/vnd.dev.sigstore.bundle."

const (
	cosignSimpleSigning = "application/vnd.dev.cosign.simplesigning.v1+json" // of a layer
	cosignArtifact      = "application/vnd.dev.cosign.artifact.sig.v1+json"  // of a referrer
	maxAttachments      = 64                                                 // signatures of one document
	maxAttachmentSize   = 1 << 20                                            // bytes of a signature's payload
	maxReferrers        = 16                                                 // referrers with signatures
	referrersAPI        = "referrers/"
)

// Attachments returns the signatures of a document. They come from cosign's tag (sha256-….sig) and
// from referrers in the same format. It is no error if there are none. Signatures beyond
// maxAttachments are ignored. If there are only sigstore bundles, the result is one Attachment with
// the type of a bundle and no payload.
func (r *Repository) Attachments(ctx context.Context, d digest.Digest) ([]Attachment, error) {
	if err := checkDigest(d); err != nil {
		return nil, err
	}
	tag := d.Algorithm().String() + "-" + d.Encoded()
	manifests, bundle, err := r.referrers(ctx, d, tag)
	if err != nil {
		return nil, fmt.Errorf("list signatures of %s: %w", d, err)
	}
	list, err := r.signaturesIn(ctx, "manifests/"+tag+".sig", ocispec.Descriptor{})
	if err != nil {
		return nil, fmt.Errorf("fetch signatures of %s: %w", d, err)
	}
	for _, m := range manifests {
		more, err := r.signaturesIn(ctx, "manifests/"+m.Digest.String(), m)
		if err != nil {
			return nil, fmt.Errorf("fetch signatures of %s: %w", d, err)
		}
		list = append(list, more...)
	}
	if len(list) == 0 && bundle != "" {
		return []Attachment{{MediaType: bundle}}, nil
	}
	return list[:min(len(list), maxAttachments)], nil
}

// referrers returns the manifests with cosign signatures that refer to a document, and the type of
// a sigstore bundle if there is one. If a registry does not have the referrers API, an index under
// a tag lists the referrers (distribution spec 1.1).
func (r *Repository) referrers(
	ctx context.Context, d digest.Digest, tag string,
) (found []ocispec.Descriptor, bundle string, err error) {
	for _, suffix := range []string{referrersAPI + d.String(), "manifests/" + tag} {
		data, err := r.small(ctx, suffix, ocispec.Descriptor{}, MaxManifestSize)
		if isAbsent(err) {
			continue
		}
		if err != nil {
			return nil, "", err
		}
		var index ocispec.Index
		if err := decode(data, &index); err != nil {
			return nil, "", fmt.Errorf("referrers: %w", err)
		}
		for _, m := range index.Manifests {
			if strings.HasPrefix(m.ArtifactType, CosignBundle) {
				bundle = m.ArtifactType
			}
			if m.ArtifactType == cosignArtifact && checkDescriptor(m, MaxManifestSize) == nil && len(found) < maxReferrers {
				found = append(found, m)
			}
		}
		return found, bundle, nil
	}
	return nil, "", nil
}

// signaturesIn returns the signatures in a manifest. A missing manifest has none.
func (r *Repository) signaturesIn(
	ctx context.Context, suffix string, want ocispec.Descriptor,
) (list []Attachment, err error) {
	data, err := r.small(ctx, suffix, want, MaxManifestSize)
	if isAbsent(err) && want.Digest == "" {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var manifest ocispec.Manifest
	if err := decode(data, &manifest); err != nil {
		return nil, fmt.Errorf("manifest of signatures: %w", err)
	}
	for _, l := range manifest.Layers {
		if l.MediaType != cosignSimpleSigning || len(list) == maxAttachments {
			continue
		}
		if err := checkDescriptor(l, maxAttachmentSize); err != nil {
			return nil, malformed("signature: %w", err)
		}
		payload, err := r.small(ctx, "blobs/"+l.Digest.String(), l, maxAttachmentSize)
		if err != nil {
			return nil, err
		}
		list = append(list, Attachment{MediaType: l.MediaType, Payload: payload, Annotations: l.Annotations})
	}
	return list, nil
}

// small fetches a small document or blob. If want has a digest, it checks the digest.
func (r *Repository) small(
	ctx context.Context, suffix string, want ocispec.Descriptor, limit int64,
) (data []byte, err error) {
	err = r.askAll(ctx, capPull, func(e *endpoint) error {
		expected := want // fetch sets the digest that this host reports
		data, _, err = e.fetch(ctx, suffix, &expected, limit)
		if err == nil {
			err = checkValues(data)
		}
		if strings.HasPrefix(suffix, referrersAPI) && lacksReferrers(data, err) {
			err = errdefs.NotFound("no referrers API")
		}
		return err
	})
	return data, err
}

// lacksReferrers reports whether an answer means that a registry does not have the referrers API.
// Some registries send another status than 404, or a page. A wrong guess means fewer signatures,
// which can only reject an image.
func lacksReferrers(data []byte, err error) bool {
	var answer *answerError
	if errors.As(err, &answer) {
		return slices.Contains([]int{http.StatusBadRequest, http.StatusForbidden, http.StatusNotFound,
			http.StatusMethodNotAllowed, http.StatusNotAcceptable, http.StatusNotImplemented}, answer.status)
	}
	if err != nil {
		return false // for example, no answer
	}
	doc, err := parseDocument(data, "")
	return err != nil || doc.index == nil
}

// isAbsent reports whether an error says that a registry does not have the document or the API.
func isAbsent(err error) bool {
	return errdefs.IsNotFound(err)
}
