package registry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/image/registry/platform"
	"berth/internal/errdefs"
)

// Image is a resolved image: everything but the content of its layers.
type Image struct {
	Digest       digest.Digest // what the reference names: an index or a manifest
	ConfigDigest digest.Digest // sha256; the image's ID
	RawConfig    []byte
	Config       ocispec.Image
	Layers       []Layer // bottom first
}

// Layer is a layer of an image.
type Layer struct {
	DiffID digest.Digest      // sha256 of the tar
	Blob   ocispec.Descriptor // the tar as the registry has it, compressed or not
}

// Digest asks what the reference names, without fetching it (HEAD). It returns ""
// if no host can tell or lets us see it; only a GET has the reasons.
func (r *Repository) Digest(ctx context.Context) digest.Digest {
	caps := capPull
	if r.ref.Digest == "" {
		caps |= capResolve
	}
	var found digest.Digest
	err := r.askOnce(ctx, caps, 0, func(e *endpoint) error {
		resp, err := e.request(ctx, http.MethodHead, "manifests/"+r.ref.identifier(), http.Header{"Accept": acceptManifests})
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

// HasBlob asks whether the repository would serve a blob, without fetching it (HEAD). It is false
// where no host says so, for whatever reason: a GET tells. A host can say so of a blob that it does
// not have, too.
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

// Resolve fetches the manifest that the reference names and the configuration of
// the image in it, choosing by platform where it is an index.
func (r *Repository) Resolve(ctx context.Context, node ocispec.Platform) (*Image, error) {
	doc, top, err := r.fetchDocument(ctx, r.ref.identifier(), ocispec.Descriptor{Digest: r.ref.Digest})
	if err != nil {
		return nil, fmt.Errorf("fetch manifest: %w", err)
	}
	chosen := ocispec.Descriptor{Platform: &ocispec.Platform{}}
	for depth := 1; doc.index != nil; depth++ {
		if depth > MaxIndexDepth {
			return nil, errdefs.FailedPrecondition("more than %d indexes are nested", MaxIndexDepth)
		}
		var ok bool
		if chosen, ok = platform.Choose(doc.index, node); !ok {
			return nil, errdefs.NotFound("no image for platform %s in the index %s", platform.String(node), top)
		}
		if err := checkDescriptor(chosen, MaxManifestSize); err != nil {
			return nil, corrupt("index %s: %w", top, err)
		}
		if doc, _, err = r.fetchDocument(ctx, chosen.Digest.String(), chosen); err != nil {
			return nil, fmt.Errorf("fetch manifest %s: %w", chosen.Digest, err)
		}
	}
	img, err := r.fetchConfig(ctx, doc.manifest)
	if err != nil {
		return nil, err
	}
	img.Digest = top
	return img, checkConfigPlatform(img.Config, node, chosen.Platform == nil)
}

// checkConfigPlatform refuses an image of another operating system and, where an
// index did not say what the image is for, one of another architecture. Whoever
// names a manifest of another architecture directly may have an emulator for it.
func checkConfigPlatform(c ocispec.Image, node ocispec.Platform, unsaid bool) error {
	if c.OS != "" && !platform.SameOS(c.Platform, node) {
		return errdefs.FailedPrecondition("image is for %s, this node is %s", errdefs.Clip(platform.String(c.Platform)), platform.String(node))
	}
	if !unsaid || platform.Runs(node, c.Platform) {
		return nil
	}
	return errdefs.NotFound("no image for platform %s in the index", platform.String(node))
}

// fetchDocument fetches a manifest or index by tag or digest. want holds the
// digest it must have, and its size if that is known too.
func (r *Repository) fetchDocument(ctx context.Context, identifier string, want ocispec.Descriptor) (doc document, d digest.Digest, err error) {
	caps := capPull
	if want.Digest == "" {
		caps |= capResolve
	}
	err = r.askAll(ctx, caps, func(e *endpoint) error {
		want := want // fetch fills in what this host says it is
		data, contentType, err := e.fetch(ctx, "manifests/"+identifier, &want, MaxManifestSize)
		if err != nil {
			return err
		}
		d = want.Digest
		doc, err = parseDocument(data, contentType)
		return err
	})
	return doc, d, err
}

// fetchConfig fetches and parses the configuration of an image.
func (r *Repository) fetchConfig(ctx context.Context, m ocispec.Manifest) (*Image, error) {
	if m.Config.Digest.Algorithm() != digest.SHA256 {
		return nil, errdefs.FailedPrecondition("config %s: an image's ID must be a sha256 digest", m.Config.Digest)
	}
	img := &Image{ConfigDigest: m.Config.Digest}
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

// documentTime bounds the transfer of a manifest or configuration, which a registry could draw out over an hour
// without ever counting as stalled.
const documentTime = 2 * time.Minute

// fetch fetches a small document whole and verifies it. want.Digest empty means
// the host is trusted to say what the name stands for; it is filled in.
func (e *endpoint) fetch(ctx context.Context, suffix string, want *ocispec.Descriptor, limit int64) (data []byte, contentType string, err error) {
	limited, cancel := context.WithTimeout(ctx, e.document)
	defer cancel()
	data, contentType, err = e.fetchUntil(limited, suffix, want, limit)
	if err != nil && limited.Err() != nil && ctx.Err() == nil {
		err = &UnavailableError{Err: fmt.Errorf("%w: not complete after %v", errStalled, e.document)}
	}
	return data, contentType, err
}

// fetchUntil is fetch for as long as ctx.
func (e *endpoint) fetchUntil(ctx context.Context, suffix string, want *ocispec.Descriptor, limit int64) (data []byte, contentType string, err error) {
	resp, err := e.request(ctx, http.MethodGet, suffix, http.Header{"Accept": acceptManifests})
	if err != nil {
		return nil, "", err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, "", e.statusError(resp)
	}
	defer resp.Body.Close() // read to its end or given up
	data, err = io.ReadAll(io.LimitReader(resp.Body, limit+1))
	if err != nil {
		return nil, "", bodyError(ctx, err)
	}
	if int64(len(data)) > limit {
		return nil, "", errdefs.FailedPrecondition("larger than the limit of %d bytes", limit)
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

// nameDigest sets the digest of content fetched by tag. Where the registry says
// what it is, in an algorithm we know, that must be right.
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

// bodyError is the error for a response that broke off.
func bodyError(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return &UnavailableError{Err: err, temporary: true}
}
