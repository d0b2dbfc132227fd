package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/opencontainers/go-digest"

	"berth/image/archive"
	"berth/image/layer"
	"berth/image/registry"
	"berth/internal/errdefs"
)

// SaveOptions say what Save writes.
type SaveOptions struct {
	Refs   []string       // images; a tag is recorded in the archive, an ID or a digest gives no name
	Format archive.Format // empty: archive.OCI
}

// Save writes an archive with images to out: an OCI layout or a docker archive, as a tar. Blobs are
// uncompressed tars, so an image keeps its ID but not the digest of its manifest. Save writes
// nothing if a tar cannot be restored (layer.Store.OpenTar). A later error leaves a truncated
// archive.
//
// Errors: NotFound for a missing image, InvalidArgument for an unknown format, FailedPrecondition
// for an image whose layers cannot be restored, DataLoss for a damaged layer. Errors of out are
// returned.
func (s *Store) Save(ctx context.Context, out io.Writer, opts SaveOptions) error {
	if opts.Format == "" {
		opts.Format = archive.OCI
	}
	if err := opts.Format.Validate(); err != nil {
		return err
	}
	if len(opts.Refs) == 0 {
		return errdefs.InvalidArgument("save: no image is named")
	}
	leave, ok := s.life.Enter() // Close waits for Save
	if !ok {
		return fmt.Errorf("save images: %w", errdefs.Unavailable("image store is closed"))
	}
	defer leave()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.life.Context(), cancel)()
	wanted, err := s.toSave(opts.Refs)
	if err != nil {
		return err
	}
	var layers []digest.Digest
	for _, w := range wanted {
		layers = append(layers, w.image.Layers...)
	}
	release, err := s.Acquire(ctx, "save", layers)
	if err != nil {
		return fmt.Errorf("save images: %w", err)
	}
	defer release()
	if err := s.lazy.Await(ctx, layers); err != nil {
		return fmt.Errorf("save images: %w", err)
	}
	var images []archive.Saved
	for _, w := range wanted {
		saved, err := s.saved(ctx, w)
		if err != nil {
			return fmt.Errorf("save image %s: %w", w.ref, err)
		}
		images = append(images, saved)
	}
	return archive.Write(out, opts.Format, images)
}

// namedImage is an image with the names to record.
type namedImage struct {
	ref   string // the name as the caller wrote it
	image *Image
	names []registry.Reference
}

// toSave finds images. References to the same image become one with several names.
func (s *Store) toSave(refs []string) (list []*namedImage, err error) {
	byID := map[string]*namedImage{}
	for _, ref := range refs {
		img, err := s.find(ref)
		if err != nil {
			return nil, err
		}
		if byID[img.ID] == nil {
			byID[img.ID] = &namedImage{ref: ref, image: img}
			list = append(list, byID[img.ID])
		}
		if name, ok := s.tagOf(img, ref); ok && !slices.Contains(byID[img.ID].names, name) {
			byID[img.ID].names = append(byID[img.ID].names, name)
		}
	}
	return list, nil
}

// tagOf returns the tag of an image that a caller wrote, in its normalized form.
func (s *Store) tagOf(img *Image, written string) (registry.Reference, bool) {
	candidates, err := s.cfg.Client.Candidates(written)
	if err != nil {
		return registry.Reference{}, false
	}
	i := slices.IndexFunc(candidates, func(r registry.Reference) bool {
		return r.Tag != "" && slices.Contains(img.RepoTags, r.String())
	})
	if i < 0 {
		return registry.Reference{}, false
	}
	return candidates[i], true
}

// Acquire keeps layers from deletion until release. It waits for deletions under way. what names
// the reason in waits.
func (s *Store) Acquire(ctx context.Context, what string, layers []digest.Digest) (release func(), err error) {
	owner := fmt.Sprintf("%s%d", pullPrefix, s.pullID.Add(1))
	end := s.cfg.Waits.Begin("layer deletion", what)
	err = s.refs.acquire(ctx, owner, layers)
	end()
	if err != nil {
		return nil, fmt.Errorf("wait for layer deletion: %w", err)
	}
	return func() {
		if err := s.sweepAfter(s.refs.release(owner)); err != nil {
			s.warnings.Warn(s.log, "delete unused layers; will be retried", "error", err)
		}
	}, nil
}

// saved describes an image for an archive. It checks that the tar of each layer can be opened.
func (s *Store) saved(ctx context.Context, w *namedImage) (archive.Saved, error) {
	if w.image.Artifact != nil {
		return archive.Saved{}, errdefs.FailedPrecondition("it is an OCI artifact, which berth cannot save")
	}
	saved := archive.Saved{Config: w.image.Raw, Names: w.names}
	for _, name := range w.image.Layers {
		restored, err := s.layers.openTar(name)
		if err != nil {
			return saved, hintAt(err)
		}
		saved.Layers = append(saved.Layers, archive.SavedLayer{
			Digest: restored.Digest(), Size: restored.Size(),
			Open: func() (io.ReadCloser, error) { return s.wholeTar(ctx, name) },
		})
		if err := restored.Close(); err != nil {
			return saved, err
		}
	}
	return saved, nil
}

// hintAt says what the operator can do about a layer without a record of its tar.
func hintAt(err error) error {
	if errors.Is(err, layer.ErrOldLayer) {
		return fmt.Errorf("%w; remove the image and pull it again (berth image rm, berth image pull)", err)
	}
	return err
}

// wholeTar returns the verified tar of a layer, which the caller keeps from deletion.
func (s *Store) wholeTar(ctx context.Context, name digest.Digest) (io.ReadCloser, error) {
	restored, err := s.layers.openTar(name)
	if err != nil {
		return nil, err
	}
	return struct {
		io.Reader
		io.Closer
	}{restored.Whole(ctx), restored}, nil
}

// openTar opens the tar of a layer in any form.
func (s *stores) openTar(name digest.Digest) (_ *layer.Tar, failed error) {
	for _, store := range s.usable {
		if failed != nil && !store.Has(name) {
			continue
		}
		restored, err := store.OpenTar(name)
		if err == nil {
			return restored, nil
		}
		if failed == nil || errdefs.IsNotFound(failed) {
			failed = err
		}
	}
	return nil, failed
}

// Tar is the tar of a layer that is kept from deletion until Close.
type Tar struct {
	*layer.Tar
	release func()
}

// NewTar returns a tar that calls release when it is closed.
func NewTar(tar *layer.Tar, release func()) *Tar { return &Tar{tar, release} }

// Close closes the tar.
func (t *Tar) Close() error {
	err := t.Tar.Close()
	t.release()
	return err
}

// OpenTar opens the tar of a layer of the store by its digest, whichever images use it. It does not
// check access, so the caller decides who may read the layer. The error is NotFound if no layer has
// the digest, or one of layer.Store.OpenTar.
func (s *Store) OpenTar(ctx context.Context, diffID digest.Digest) (*Tar, error) {
	failed := errdefs.NotFound("no layer has the tar %s", diffID)
	for _, name := range s.layers.withTar(diffID) {
		release, err := s.Acquire(ctx, "tar "+diffID.String(), []digest.Digest{name})
		if err != nil {
			return nil, err
		}
		restored, err := s.openComplete(ctx, name)
		if err == nil {
			return &Tar{restored, release}, nil
		}
		release()
		failed = err
	}
	return nil, failed
}

// openComplete opens the tar of a layer once the layer is complete.
func (s *Store) openComplete(ctx context.Context, name digest.Digest) (*layer.Tar, error) {
	if err := s.lazy.Await(ctx, []digest.Digest{name}); err != nil {
		return nil, err
	}
	return s.layers.openTar(name)
}

// withTar returns the names of the layers with a tar.
func (s *stores) withTar(diffID digest.Digest) (names []digest.Digest) {
	for _, store := range s.usable {
		for _, name := range store.List() {
			if info, err := store.Info(name); err == nil && info.DiffID == diffID && !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	return names
}
