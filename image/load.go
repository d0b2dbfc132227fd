package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/opencontainers/go-digest"
	"google.golang.org/grpc/codes"

	"berth/image/archive"
	"berth/image/layer"
	blobindex "berth/image/lazy/index"
	"berth/image/registry"
	"berth/image/unpack"
	"berth/image/unpack/inflate"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
)

// LoadOptions say how the images of an archive are recorded.
type LoadOptions struct {
	Name string // replaces the names in the archive, which must contain one image; empty: those names
	Pin  bool   // kubelet must not collect the images
	// Skipped, if not nil, is called for each entry that is no image of this node.
	Skipped func(archive.Skipped)

	origin string // of the archive, see Preload
}

// Load adds the images of a tar, an OCI layout or a docker archive, which may be compressed with
// gzip or zstd. It copies the tar to a file without a name, because an archive can list its parts
// in any order. It returns the images that were added before an error.
//
// Errors: InvalidArgument for something else than an archive, DataLoss for content with another
// digest, ResourceExhausted if the disk has no room for archive and layers.
func (s *Store) Load(ctx context.Context, from io.Reader, opts LoadOptions) ([]*Image, error) {
	return s.loadFrom(ctx, "archive", opts, func(ctx context.Context, use func(*archive.Archive) error) error {
		return s.withSpool(ctx, from, use)
	})
}

// LoadFile is Load for a path: an OCI layout's directory, or a tar. It reads an uncompressed tar in
// its place.
func (s *Store) LoadFile(ctx context.Context, path string, opts LoadOptions) ([]*Image, error) {
	return s.loadFrom(ctx, path, opts, func(ctx context.Context, use func(*archive.Archive) error) error {
		info, err := os.Stat(path)
		if err != nil {
			return err
		}
		if info.IsDir() {
			root, err := os.OpenRoot(path)
			if err != nil {
				return err
			}
			defer root.Close() // read only
			return use(archive.OpenDir(root))
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close() // read only
		head := make([]byte, inflate.HeadSize)
		if n, err := f.ReadAt(head, 0); err == nil {
			if kind, err := inflate.Detect(head[:n]); err == nil && kind == blobindex.None {
				return useTar(f, info.Size(), use)
			}
		}
		return s.withSpool(ctx, f, use)
	})
}

// loadFrom loads what open opens. what names it in errors and waits.
func (s *Store) loadFrom(ctx context.Context, what string, opts LoadOptions,
	open func(context.Context, func(*archive.Archive) error) error) (images []*Image, err error) {
	names := naming{pin: opts.Pin, origin: opts.origin}
	if opts.Name != "" {
		ref, err := registry.ParseReference(opts.Name)
		if err != nil {
			return nil, err
		}
		if ref.Tag == "" {
			return nil, errdefs.InvalidArgument("name %q: want a tag, not a digest", opts.Name)
		}
		names.refs = []registry.Reference{ref}
	}
	track, err := s.pulls.start(what)
	if err != nil {
		return nil, fmt.Errorf("load %s: %w", what, err)
	}
	defer s.pulls.end(track)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.ctx, cancel)()
	err = open(ctx, func(from *archive.Archive) (err error) {
		images, err = s.loadArchive(ctx, what, from, names, opts, track)
		return err
	})
	if err != nil {
		return images, fmt.Errorf("load %s: %w", what, err)
	}
	return images, nil
}

// loadArchive adds the images of an archive, one after the other.
func (s *Store) loadArchive(ctx context.Context, what string, from *archive.Archive, names naming,
	opts LoadOptions, track *pullTrack) (added []*Image, err error) {
	images, skipped, err := from.Images(s.cfg.Platform)
	if err != nil {
		return nil, err
	}
	for _, entry := range skipped {
		s.log.Info("entry of an archive skipped", "from", what, "entry", entry.Name, "reason", entry.Reason)
		if opts.Skipped != nil {
			opts.Skipped(entry)
		}
	}
	if names.refs != nil && len(images) > 1 {
		return nil, errdefs.InvalidArgument("a name was given for %d images", len(images))
	}
	for _, img := range images {
		as := naming{refs: img.Names, pin: names.pin, origin: names.origin}
		if names.refs != nil {
			as.refs = names.refs
		}
		if err := checkSizes(img.Layers, s.cfg.Limits); err != nil {
			return added, err
		}
		tracks := track.setLayers(img.Layers)
		one, err := s.add(ctx, what, img.Image, as, func(ctx context.Context, store *layer.Store, i int) error {
			return s.loadLayer(ctx, store, from, img.Layers[i], tracks[i])
		})
		if err != nil {
			return added, err
		}
		s.log.Info("image loaded", "from", what, "image", one.ID, "tags", one.RepoTags, "size", one.Size)
		added = append(added, one)
	}
	return added, nil
}

// archiveSlots names archives as a source of blobs, see fair.Slots.
const archiveSlots = "archive"

// loadLayer ensures that a layer of an archive is present. An archive must contain a present layer,
// too: a digest alone is no evidence that its author may read the layer
// (docs/adr/001-layer-access.md).
func (s *Store) loadLayer(ctx context.Context, store *layer.Store, from *archive.Archive, l registry.Layer,
	track *layerTrack) error {
	for more := (shortage{}); ; {
		blob, err := from.Blob(l.Blob)
		if err != nil {
			return err
		}
		if err := s.retire(store, sourceOf(l)); err != nil {
			return errors.Join(err, blob.Close())
		}
		present := store.Has(sourceOf(l).Name())
		in := &countedReader{ctx: ctx, from: blob}
		track.downloading(&in.n)
		had, err := s.unpack(ctx, store, archiveSlots, l, in, layer.Points{}, more)
		if err == nil { // the blob is unread if the layer is present
			_, err = io.Copy(io.Discard, in)
		}
		_ = blob.Close() // read only
		if !more.grow(s.memory, had, err) {
			if err == nil && present {
				track.set(LayerPresent)
				return s.completeFrom(ctx, from, l)
			} else if err == nil {
				track.set(LayerDone)
			}
			return err
		}
	}
}

// completeFrom waits until a layer is complete, and lets it be filled from an archive, too: an
// image of an archive must not depend on a registry.
func (s *Store) completeFrom(ctx context.Context, from *archive.Archive, l registry.Layer) error {
	name := sourceOf(l).Name()
	src := s.incomplete.known(name)
	if s.incomplete.get(name) == nil || src == nil {
		return nil
	}
	blob, err := from.BlobAt(l.Blob)
	if err != nil {
		return err
	}
	p := &place{blob: blob}
	src.add(p, true)
	err = s.awaitComplete(ctx, []digest.Digest{name})
	src.drop(p)
	return errors.Join(err, blob.Close())
}

// useTar opens a tar and passes it on.
func useTar(f io.ReaderAt, size int64, use func(*archive.Archive) error) error {
	from, err := archive.OpenTar(f, size)
	if err != nil {
		return err
	}
	return use(from)
}

// withSpool copies a tar to a file without a name, which goes with the process, and passes it on.
func (s *Store) withSpool(ctx context.Context, from io.Reader, use func(*archive.Archive) error) (err error) {
	plain, err := inflate.NewReader(from, inflate.MaxWindow, nil)
	if err != nil {
		return invalid(err)
	}
	defer plain.Close() // a decompressor; its errors come from Read
	failpoint.Reach("image.spool")
	f, err := os.CreateTemp(filepath.Join(s.cfg.Root, spoolDir), "spool-")
	if err != nil {
		return err
	}
	failpoint.Reach("image.spool-made")
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := os.Remove(f.Name()); err != nil {
		return err
	}
	failpoint.Reach("image.spool-unnamed")
	in := &countedReader{ctx: ctx, from: plain, check: func() error { return s.layers.hasRoom() }}
	if _, err := io.Copy(onlyWriter{f}, in); err != nil {
		return err
	}
	return useTar(f, in.n.at.Load(), use)
}

// spoolDir is the directory of unfinished layers, which the next start empties.
const spoolDir = "tmp"

// onlyWriter keeps io.Copy from using other methods of a file, so that its reader can check the
// disk.
type onlyWriter struct{ io.Writer }

// hasRoom returns ResourceExhausted if the disk's reserve is in use.
func (s *stores) hasRoom() error { return s.primary.HasRoom(0, s.deleting()) }

// invalid gives errors of decompressors a code.
func invalid(err error) error {
	if err == nil || errors.Is(err, io.EOF) || errdefs.Code(err) != codes.Unknown {
		return err
	}
	if unpack.CodeOf(err) == unpack.FailedPrecondition {
		return errdefs.FailedPrecondition("archive: %w", err)
	}
	return errdefs.InvalidArgument("read archive: %w", err)
}

// countedReader counts bytes and ends with a context. check, if not nil, is called every
// checkBytes.
type countedReader struct {
	ctx     context.Context
	from    io.Reader
	check   func() error
	n       transfer
	checked int64
}

const checkBytes = 16 << 20

func (r *countedReader) Read(p []byte) (int, error) {
	if r.ctx.Err() != nil {
		return 0, context.Cause(r.ctx)
	}
	if r.check != nil && r.n.at.Load() >= r.checked {
		if err := r.check(); err != nil {
			return 0, err
		}
		r.checked = r.n.at.Load() + checkBytes
	}
	n, err := r.from.Read(p)
	r.n.at.Add(int64(n))
	if r.check != nil {
		err = invalid(err)
	}
	return n, err
}
