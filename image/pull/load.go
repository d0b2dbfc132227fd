package pull

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"google.golang.org/grpc/codes"

	"berth/image"
	"berth/image/archive"
	"berth/image/blobindex"
	"berth/image/layer"
	"berth/image/lazy"
	"berth/image/registry"
	"berth/image/unpack"
	"berth/image/unpack/inflate"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
)

// LoadOptions say how the images of an archive are recorded.
type LoadOptions struct {
	Name string // replaces the names in the archive, which must then contain one image; empty: keep the names
	Pin  bool   // kubelet must not collect the images
	// Skipped, if not nil, is called for each entry that is no image of this node.
	Skipped func(archive.Skipped)

	origin string // of the archive, see Preload
}

// Load adds the images of a tar, an OCI layout or a docker archive, which may be compressed with
// gzip or zstd. It copies the tar to a file without a name, because an archive can list its parts
// in any order. It returns the images that were added before an error.
//
// Errors: InvalidArgument for anything other than an archive. DataLoss for content with a wrong
// digest. ResourceExhausted if the disk has no room for the archive and the layers.
func (p *Puller) Load(ctx context.Context, from io.Reader, opts LoadOptions) ([]*image.Image, error) {
	return p.loadFrom(ctx, "archive", opts, func(ctx context.Context, use func(*archive.Archive) error) error {
		return p.withSpool(ctx, from, use)
	})
}

// LoadFile is Load for a path: an OCI layout's directory, or a tar. It reads an uncompressed tar
// directly, not from a copy.
func (p *Puller) LoadFile(ctx context.Context, path string, opts LoadOptions) ([]*image.Image, error) {
	return p.loadFrom(ctx, path, opts, func(ctx context.Context, use func(*archive.Archive) error) error {
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
		return p.withSpool(ctx, f, use)
	})
}

// loadFrom loads the archive that open opens. what names the archive in errors and waits.
func (p *Puller) loadFrom(ctx context.Context, what string, opts LoadOptions,
	open func(context.Context, func(*archive.Archive) error) error) (images []*image.Image, err error) {
	names := image.Naming{Pin: opts.Pin, Origin: opts.origin}
	if opts.Name != "" {
		ref, err := registry.ParseReference(opts.Name)
		if err != nil {
			return nil, err
		}
		if ref.Tag == "" {
			return nil, errdefs.InvalidArgument("name %q: want a tag, not a digest", opts.Name)
		}
		names.Refs = []registry.Reference{ref}
	}
	track, err := p.pulls.start(what)
	if err != nil {
		return nil, fmt.Errorf("load %s: %w", what, err)
	}
	defer p.pulls.end(track)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(p.ctx, cancel)()
	err = open(ctx, func(from *archive.Archive) (err error) {
		images, err = p.loadArchive(ctx, what, from, names, opts, track)
		return err
	})
	if err != nil {
		return images, fmt.Errorf("load %s: %w", what, err)
	}
	return images, nil
}

// loadArchive adds the images of an archive, one after the other.
func (p *Puller) loadArchive(ctx context.Context, what string, from *archive.Archive, names image.Naming,
	opts LoadOptions, track *pullTrack) (added []*image.Image, err error) {
	images, skipped, err := from.Images(p.cfg.Platform)
	if err != nil {
		return nil, err
	}
	for _, entry := range skipped {
		p.log.Info("entry of an archive skipped", "from", what, "entry", entry.Name, "reason", entry.Reason)
		if opts.Skipped != nil {
			opts.Skipped(entry)
		}
	}
	if names.Refs != nil && len(images) > 1 {
		return nil, errdefs.InvalidArgument("a name was given for %d images", len(images))
	}
	for _, img := range images {
		as := image.Naming{Refs: img.Names, Pin: names.Pin, Origin: names.Origin}
		if names.Refs != nil {
			as.Refs = names.Refs
		}
		if err := checkSizes(img.Layers, p.cfg.Limits); err != nil {
			return added, err
		}
		tracks := track.setLayers(img.Layers)
		get := func(ctx context.Context, store *layer.Store, _ attempt, i int) error {
			return p.loadLayer(ctx, store, from, img.Layers[i], tracks[i])
		}
		one, err := p.add(ctx, what, img.Image, as, nil, get)
		if err != nil {
			return added, err
		}
		p.log.Info("image loaded", "from", what, "image", one.ID, "tags", one.RepoTags, "size", one.Size)
		added = append(added, one)
	}
	return added, nil
}

// archiveSlots names archives as a source of blobs, see fair.Slots.
const archiveSlots = "archive"

// loadLayer ensures that a layer of an archive is present. The archive must also contain a layer
// that is present. A digest alone is no evidence that the archive's author may read the layer
// (docs/adr/001-layer-access.md).
func (p *Puller) loadLayer(ctx context.Context, store *layer.Store, from *archive.Archive, l registry.Layer,
	track *layerTrack) error {
	if err := p.lazy.Retire(store, lazy.SourceOf(l)); err != nil {
		return err
	}
	present := store.Has(lazy.SourceOf(l).Name())
	first := attempt{registry: true}
	err := p.retry(ctx, "layer "+l.Blob.Digest.String(), first, func(at attempt) (left options, err error) {
		blob, err := from.Blob(l.Blob)
		if err != nil {
			return left, err
		}
		defer blob.Close() // read only
		in := &countedReader{ctx: ctx, from: blob}
		track.downloading(&in.n)
		had, err := p.unpack(ctx, store, archiveSlots, l, in, layer.Points{}, at.more)
		if err == nil { // the blob is unread if the layer is present
			_, err = io.Copy(io.Discard, in)
		}
		left.more, _ = p.budget.Grow(at.more, had, err)
		return left, err
	})
	if err != nil {
		return err
	}
	track.set(LayerDone)
	if present {
		track.set(LayerPresent)
	}
	return p.completeFrom(ctx, store, from, l) // a pull may have created it lazily meanwhile
}

// completeFrom waits until a layer is complete. It lets the archive fill the layer, too, because an
// image of an archive must not depend on a registry.
func (p *Puller) completeFrom(ctx context.Context, store *layer.Store, from *archive.Archive, l registry.Layer) error {
	name := lazy.SourceOf(l).Name()
	if store.Lazy(name) == nil {
		return nil
	}
	blob, err := from.BlobAt(l.Blob)
	if err != nil {
		return err
	}
	return errors.Join(p.lazy.AwaitFrom(ctx, name, blob), blob.Close())
}

// useTar opens a tar and passes it to use.
func useTar(f io.ReaderAt, size int64, use func(*archive.Archive) error) error {
	from, err := archive.OpenTar(f, size)
	if err != nil {
		return err
	}
	return use(from)
}

// withSpool copies a tar to a file without a name, and passes it to use. The file disappears with
// the process.
func (p *Puller) withSpool(ctx context.Context, from io.Reader, use func(*archive.Archive) error) (err error) {
	plain, err := inflate.NewReader(from, inflate.MaxWindow, nil)
	if err != nil {
		return invalid(err)
	}
	defer plain.Close() // a decompressor, whose errors come from Read
	failpoint.Reach("image.spool")
	f, err := os.CreateTemp(p.store.Spool(), "spool-")
	if err != nil {
		return err
	}
	failpoint.Reach("image.spool-made")
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := os.Remove(f.Name()); err != nil {
		return err
	}
	failpoint.Reach("image.spool-unnamed")
	in := &countedReader{ctx: ctx, from: plain, check: p.store.HasRoom}
	if _, err := io.Copy(onlyWriter{f}, in); err != nil {
		return err
	}
	return useTar(f, in.n.at.Load(), use)
}

// onlyWriter keeps io.Copy from using other methods of a file, so that its reader can check the
// disk.
type onlyWriter struct{ io.Writer }

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
