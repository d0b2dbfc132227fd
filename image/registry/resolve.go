package registry

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/internal/errdefs"
	"berth/internal/fair"
)

// Image is a resolved image without the content of its layers. [Repository.Blob] reads them.
type Image struct {
	Digest       digest.Digest // of the index or manifest that the reference names
	ConfigDigest digest.Digest // sha256; the image's ID
	RawConfig    []byte
	Config       ocispec.Image
	Layers       []Layer    // bottom first
	Documents    []Document // from the one that the reference names to the manifest
	Artifact     *Artifact  // nil: a container image
	// SOCIIndex is the digest of the image's SOCI index in the same repository; empty: it has none.
	SOCIIndex digest.Digest
}

// Layer is a layer of an image.
type Layer struct {
	DiffID digest.Digest      // sha256 of the tar
	Blob   ocispec.Descriptor // as the registry has it, compressed or not
	File   string             // of an artifact: the path of the file that the blob is; empty: the blob is a tar
	// Ztoc is SOCI's table of contents of the blob, which is a separate blob. It is nil if the blob
	// has none, or if nobody has looked for it. See Repository.Ztocs.
	Ztoc *ocispec.Descriptor
}

// Digest resolves the reference with HEAD requests. It returns "" if no host answers with a digest.
// A GET request then shows the reason.
func (r *Repository) Digest(ctx context.Context) digest.Digest {
	caps := capPull
	if r.ref.Digest == "" {
		caps |= capResolve
	}
	var found digest.Digest
	err := r.askOnce(ctx, caps, 0, func(e *endpoint) error {
		accept := http.Header{"Accept": acceptManifests}
		resp, err := e.request(ctx, http.MethodHead, "manifests/"+r.ref.identifier(), accept)
		if err != nil {
			return err
		}
		defer drain(resp.Body)
		d := digest.Digest(resp.Header.Get("Docker-Content-Digest"))
		if d == "" {
			d = r.ref.Digest
		}
		if resp.StatusCode != http.StatusOK || checkDigest(d) != nil {
			return errors.New("no digest")
		}
		found = d
		return nil
	})
	if err != nil {
		return ""
	}
	return found
}

// HasBlob asks with HEAD requests whether the repository would serve a blob. It returns false if no
// host confirms it, for whatever reason. A host could also confirm a blob that it does not have.
func (r *Repository) HasBlob(ctx context.Context, want ocispec.Descriptor) bool {
	if checkDescriptor(want, 0) != nil {
		return false
	}
	return r.askOnce(ctx, capPull, 0, func(e *endpoint) error {
		resp, err := e.request(ctx, http.MethodHead, "blobs/"+want.Digest.String(), http.Header{"Accept": {"*/*"}})
		if err != nil {
			return err
		}
		defer drain(resp.Body)
		if resp.StatusCode != http.StatusOK || resp.ContentLength >= 0 && resp.ContentLength != want.Size {
			return errors.New("no such blob")
		}
		return nil
	}) == nil
}

// Resolve fetches the manifest and the configuration of the image that the reference names. From an
// index it selects the image for a platform.
func (r *Repository) Resolve(ctx context.Context, node ocispec.Platform) (*Image, error) {
	doc, top, err := r.fetchDocument(ctx, r.ref.identifier(), ocispec.Descriptor{Digest: r.ref.Digest})
	if err != nil {
		return nil, fmt.Errorf("fetch manifest: %w", err)
	}
	c := &choice{node: node, top: top, config: func(m ocispec.Manifest) (*Image, error) { return r.fetchConfig(ctx, m) }}
	c.read = func(want ocispec.Descriptor) (document, error) {
		if err := checkDescriptor(want, MaxManifestSize); err != nil {
			return document{}, malformed("index %s: %w", top, err)
		}
		doc, _, err := r.fetchDocument(ctx, want.Digest.String(), want)
		if err != nil {
			err = fmt.Errorf("fetch manifest %s: %w", want.Digest, err)
		}
		return doc, err
	}
	img, err := c.image(doc, top)
	if err != nil {
		return nil, err
	}
	return img, r.findSizes(ctx, img.Layers)
}

// hasNoSize reports whether the size of a blob is missing, or is 0 although the blob is not empty.
func hasNoSize(d ocispec.Descriptor) bool {
	return d.Size == 0 && d.Digest != d.Digest.Algorithm().FromBytes(nil)
}

// findSizes asks the hosts for the sizes that a manifest does not have, because CRI-O pulls such
// images too. The digest of the blob shows later whether the size was right.
func (r *Repository) findSizes(ctx context.Context, layers []Layer) error {
	for i := range layers {
		blob := &layers[i].Blob
		if !hasNoSize(*blob) {
			continue
		}
		err := r.askAll(ctx, capPull, func(e *endpoint) error {
			resp, err := e.request(ctx, http.MethodHead, "blobs/"+blob.Digest.String(), http.Header{"Accept": {"*/*"}})
			if err != nil {
				return err
			}
			if resp.StatusCode != http.StatusOK {
				return e.statusError(resp)
			}
			drain(resp.Body)
			if blob.Size = resp.ContentLength; blob.Size <= 0 {
				return malformed("the host does not tell it")
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("layer %d: %s: its size is missing or 0 in the manifest: %w", i, blob.Digest, err)
		}
	}
	return nil
}

// fetchDocument fetches a manifest or index by tag or digest. want has the expected digest, and the
// size if known.
func (r *Repository) fetchDocument(
	ctx context.Context, identifier string, want ocispec.Descriptor,
) (doc document, d digest.Digest, err error) {
	caps := capPull
	if want.Digest == "" {
		caps |= capResolve
	}
	err = r.askAll(ctx, caps, func(e *endpoint) error {
		want := want // fetch sets the digest that this host reports
		data, contentType, err := e.fetch(ctx, "manifests/"+identifier, &want, MaxManifestSize)
		if err != nil {
			return err
		}
		d = want.Digest
		doc, err = parseDocument(data, contentType)
		doc.raw = data
		return err
	})
	return doc, d, err
}

// fetchConfig fetches and parses the configuration of an image.
func (r *Repository) fetchConfig(ctx context.Context, m ocispec.Manifest) (*Image, error) {
	if m.Config.Digest.Algorithm() != digest.SHA256 {
		return nil, errdefs.FailedPrecondition("config %s: an image's ID must be a sha256 digest", m.Config.Digest)
	}
	img := &Image{ConfigDigest: m.Config.Digest, SOCIIndex: sociIndexOf(m)}
	err := r.askAll(ctx, capPull, func(e *endpoint) error {
		want := m.Config
		data, _, err := e.fetch(ctx, "blobs/"+want.Digest.String(), &want, MaxConfigSize)
		if err != nil {
			return err
		}
		img.RawConfig = data
		img.Config, img.Layers, err = parseConfig(data, m.Layers)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("fetch config %s: %w", m.Config.Digest, err)
	}
	return img, nil
}

// documentTimeout limits the transfer of a manifest or configuration. A registry could otherwise
// extend it over an hour without a stall.
const documentTimeout = 2 * time.Minute

// fetch fetches and verifies a small document. If want.Digest is empty, the host is trusted to
// resolve the tag, and fetch sets it.
func (e *endpoint) fetch(
	ctx context.Context, suffix string, want *ocispec.Descriptor, limit int64,
) (data []byte, contentType string, err error) {
	limited, cancel := context.WithTimeout(ctx, e.document)
	defer cancel()
	data, contentType, err = e.fetchUntil(limited, suffix, want, limit)
	if err != nil && limited.Err() != nil && ctx.Err() == nil {
		err = &UnavailableError{Err: fmt.Errorf("%w: not complete after %v", fair.ErrStalled, e.document)}
	}
	return data, contentType, err
}

// fetchUntil is fetch with the caller's deadline.
func (e *endpoint) fetchUntil(
	ctx context.Context, suffix string, want *ocispec.Descriptor, limit int64,
) (data []byte, contentType string, err error) {
	resp, err := e.request(ctx, http.MethodGet, suffix, http.Header{"Accept": acceptManifests})
	if err != nil {
		return nil, "", err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, "", e.statusError(resp)
	}
	defer resp.Body.Close() // read to its end or abandoned
	if data, err = readLimited(resp.Body, limit); err != nil {
		return nil, "", bodyError(ctx, err)
	}
	if err := checkLimit(data, limit); err != nil {
		return nil, "", err
	}
	if !isNamed(data, want.Digest, resp.Header) {
		if data, err = unpackJSON(data, resp.Header.Get("Content-Encoding"), limit); err != nil {
			return nil, "", err
		}
	}
	if want.Size > 0 && int64(len(data)) != want.Size {
		return nil, "", corrupt("size is %d bytes, not %d", len(data), want.Size)
	}
	if want.Digest == "" {
		return data, resp.Header.Get("Content-Type"), nameDigest(want, data, resp.Header)
	}
	if got := want.Digest.Algorithm().FromBytes(data); got != want.Digest {
		return nil, "", corrupt("digest of the content is %s, not %s", got, want.Digest)
	}
	return data, resp.Header.Get("Content-Type"), nil
}

// isNamed reports whether content has the wanted digest or, if none is known, the digest in its
// headers.
func isNamed(data []byte, want digest.Digest, h http.Header) bool {
	if want == "" {
		want = digest.Digest(h.Get("Docker-Content-Digest"))
	}
	return checkDigest(want) == nil && want.Algorithm().FromBytes(data) == want
}

// nameDigest sets the digest of content that was fetched by tag. If the registry reports a digest
// with a supported algorithm, it must match.
func nameDigest(want *ocispec.Descriptor, data []byte, h http.Header) error {
	want.Digest = digest.FromBytes(data)
	said := digest.Digest(h.Get("Docker-Content-Digest"))
	if checkDigest(said) != nil || said.Algorithm().FromBytes(data) == said {
		return nil
	}
	got := want.Digest
	want.Digest = ""
	return corrupt("digest of the content is %s, not %s", got, said)
}

// bodyError is the error for an interrupted response.
func bodyError(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return &UnavailableError{Err: err, temporary: true}
}
