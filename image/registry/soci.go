package registry

import (
	"context"
	"fmt"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Names of SOCI's format, version 2. An annotation of the image's manifest has the digest of the
// SOCI index, so the digest of the image covers it. Version 1 finds its index by the referrers of
// an image, and no digest covers them: see docs/adr/025-lazy-layers.md.
const (
	sociIndexType       = "application/vnd.amazon.soci.index.v2+json"
	sociIndexAnnotation = "com.amazon.soci.index-digest"
	sociLayerAnnotation = "com.amazon.soci.image-layer-digest"
	sociZtocType        = "application/octet-stream"
)

// sociIndexOf returns the digest of an image's SOCI index, or "".
func sociIndexOf(m ocispec.Manifest) digest.Digest {
	d := digest.Digest(m.Annotations[sociIndexAnnotation])
	if checkDigest(d) != nil {
		return ""
	}
	return d
}

// Ztocs fetches a SOCI index (SOCIIndex of [Image]). It returns the descriptors of the tables of
// contents, by the digest of the layer's blob. The error is FailedPrecondition if the document is
// no SOCI index, or one of [Repository.Resolve].
func (r *Repository) Ztocs(ctx context.Context, sociIndex digest.Digest) (ztocs map[digest.Digest]ocispec.Descriptor,
	err error) {
	err = r.askAll(ctx, capPull, func(e *endpoint) error {
		want := ocispec.Descriptor{Digest: sociIndex}
		data, _, err := e.fetch(ctx, "manifests/"+sociIndex.String(), &want, MaxManifestSize)
		if err == nil {
			ztocs, err = parseSOCIIndex(data)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("fetch SOCI index %s: %w", sociIndex, err)
	}
	return ztocs, nil
}

// parseSOCIIndex returns the tables that a SOCI index names.
func parseSOCIIndex(data []byte) (map[digest.Digest]ocispec.Descriptor, error) {
	var m ocispec.Manifest
	if err := decode(data, &m); err != nil {
		return nil, fmt.Errorf("no SOCI index: %w", err)
	}
	if m.ArtifactType != sociIndexType && m.Config.MediaType != sociIndexType {
		return nil, malformed("no SOCI index of version 2")
	}
	ztocs := map[digest.Digest]ocispec.Descriptor{}
	for i, l := range m.Layers {
		blob := digest.Digest(l.Annotations[sociLayerAnnotation])
		if l.MediaType != sociZtocType || blob == "" {
			continue // for example a list of what to fetch early
		}
		if err := checkDescriptor(l, 0); err != nil {
			return nil, malformed("SOCI index: layer %d: %w", i, err)
		}
		ztocs[blob] = l
	}
	return ztocs, nil
}

// Document fetches a small blob and verifies its size and digest. limit is in bytes. Errors: those
// of [Repository.Resolve].
func (r *Repository) Document(ctx context.Context, blob ocispec.Descriptor, limit int64) (data []byte, err error) {
	if err := checkDescriptor(blob, limit); err != nil {
		return nil, err
	}
	err = r.askAll(ctx, capPull, func(e *endpoint) (err error) {
		want := blob
		data, _, err = e.fetch(ctx, "blobs/"+blob.Digest.String(), &want, limit)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("fetch blob %s: %w", blob.Digest, err)
	}
	return data, nil
}

// Manifest fetches the document that a pinned reference names, without parsing it. Its digest is
// verified. limit is in bytes. Errors: those of [Repository.Resolve].
func (r *Repository) Manifest(ctx context.Context, limit int64) (doc Document, err error) {
	err = r.askAll(ctx, capPull, func(e *endpoint) error {
		want := ocispec.Descriptor{Digest: r.ref.Digest}
		data, _, err := e.fetch(ctx, "manifests/"+r.ref.identifier(), &want, limit)
		doc = Document{Digest: r.ref.Digest, Raw: data}
		return err
	})
	if err != nil {
		return Document{}, fmt.Errorf("fetch manifest: %w", err)
	}
	return doc, nil
}
