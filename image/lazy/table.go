package lazy

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/image/blobindex"
	"berth/image/erofs"
	"berth/image/layer"
	"berth/image/lazy/fill"
	"berth/image/lazy/toc"
	"berth/image/registry"
	"berth/image/tree"
	"berth/image/unpack"
	"berth/image/unpack/budget"
	"berth/internal/errdefs"
	"berth/internal/rootfs"
	"berth/internal/trace"
)

// mayUseTable reports whether a layer can be created from the table of contents of its blob.
func (z *Layers) mayUseTable(l registry.Layer) bool {
	if z.cfg.Policy != On || !mayHaveIndex(l) {
		return false
	}
	table := tableOf(l)
	return table != "" && !z.distrust.has(l.Blob.Digest, table)
}

// tableRef returns the reference of a layer's table of contents.
func tableRef(l registry.Layer) (toc.Ref, bool) {
	if l.Ztoc != nil {
		return toc.OfZtoc(l.Blob, *l.Ztoc)
	}
	return toc.Find(l.Blob)
}

// tableOf names the table of contents of a layer; empty: it has none.
func tableOf(l registry.Layer) string {
	if ref, ok := tableRef(l); ok {
		return ref.String()
	}
	return ""
}

// createByTable creates a layer from the table of contents of its blob. The registry of the pull
// must send the table. That shows that it has this part of the blob, and that the pull may have it.
// If the table is a separate blob, the registry must also send a part of the layer's blob.
func (z *Layers) createByTable(ctx context.Context, store *layer.Store, repo *registry.Repository,
	l registry.Layer) error {
	src, done := z.use(SourceOf(l), l.Blob.Size)
	defer done()
	p := &place{repo: repo}
	x, err := z.indexOfTable(ctx, store, src, p, l)
	if err != nil {
		p.close()
		return fmt.Errorf("table of contents: %w", err)
	}
	if z.layers.TOCBytes() > maxUnproven {
		p.close()
		return errdefs.FailedPrecondition("too many other layers wait for the proof of their indexes")
	}
	if err := x.CheckChunks(); err != nil {
		p.close()
		return fmt.Errorf("table of contents: %w", err)
	}
	if x.Sealed() { // the table is not a part of the blob, so it does not show that the blob is there
		if err := src.proveSealed(ctx, p, x); err != nil {
			p.close()
			return fmt.Errorf("ask the registry for parts of the blob: %w", err)
		}
	}
	replaced := src.add(p, true)
	table := &layer.TOC{Registry: repo.Reference().Domain, Name: tableOf(l)}
	err = store.CreateLazy(ctx, SourceOf(l), x, table, z.filler(src, SourceOf(l), x, table))
	if errors.Is(err, layer.ErrThere) && !replaced {
		src.drop(p) // the place has shown nothing about the existing layer
	}
	z.prefer(src.name)
	return err
}

const (
	// tableTimeout limits the time to read a table of contents and to make a tree of it. After that
	// the layer is fetched whole.
	tableTimeout = 30 * time.Second
	// maxUnproven limits the bytes of indexes that are not proven, because they are in memory.
	// Concurrent pulls can exceed it by two indexes.
	maxUnproven = 128 << 20
)

// indexOfTable makes an index of the table of contents in a blob, from a place that serves the
// blob.
func (z *Layers) indexOfTable(ctx context.Context, store *layer.Store, src *blobSource, p *place,
	l registry.Layer) (*blobindex.Index, error) {
	ctx, span := trace.Nest(ctx, "read table of contents")
	defer span.End()
	ctx, cancel := context.WithTimeout(ctx, tableTimeout)
	defer cancel()
	select {
	case z.tables <- struct{}{}:
		defer func() { <-z.tables }()
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for the tables of contents of other layers: %w", context.Cause(ctx))
	}
	ref, ok := tableRef(l)
	if !ok {
		return nil, errdefs.NotFound("the blob has none")
	}
	table, err := toc.Read(ctx, ref, toc.From{
		Fetch: func(ctx context.Context, offset, size int64) ([]byte, error) {
			return src.bytes(ctx, p, offset, size)
		},
		Inflate: z.inflate,
		Ztoc: func(ctx context.Context) ([]byte, error) {
			return p.repo.Document(ctx, *l.Ztoc, toc.MaxZtoc)
		},
	})
	if err != nil {
		return nil, err
	}
	x := table.Index(l.Blob.Digest, l.DiffID)
	limits := z.parts.Budget.Limits()
	if table.Size() > limits.Tar || x.DataSize > limits.Bytes {
		return nil, errdefs.FailedPrecondition("its files have %d bytes", table.Size())
	}
	return x, z.treeOfTable(ctx, store, p.repo.Reference().Domain, l, table, x)
}

// treeOfTable makes the tree that a table of contents describes, in the process that unpacks
// layers. domain is the registry.
func (z *Layers) treeOfTable(ctx context.Context, store *layer.Store, domain string, l registry.Layer, table *toc.Table,
	x *blobindex.Index) error {
	var made layer.Outlined
	_, err := z.parts.Budget.Run(ctx, domain, nameOf(l), budget.Shortage{}, func(limits unpack.Limits) (err error) {
		made, err = store.Outline(ctx, SourceOf(l), table.Outline(), limits)
		return err
	})
	if err != nil && !errors.Is(err, unix.ENOSPC) { // the blob itself may be within the limits
		err = errdefs.FailedPrecondition("%s", err.Error())
	}
	if err != nil {
		return err
	}
	root, err := z.decodeTree(made.Tree, made.DataSize)
	if err != nil {
		return err
	}
	if err := table.Place(root, made.DataSize); err != nil {
		return err
	}
	var placed bytes.Buffer
	if err := tree.Encode(&placed, root); err != nil {
		return fmt.Errorf("encode the tree: %w", err)
	}
	x.Tree, x.TreeDigest, x.RecordDigest = placed.Bytes(), digest.FromBytes(placed.Bytes()), digest.FromBytes(nil)
	used := layer.UsageOf(x)
	x.Summary = blobindex.Summary{Bytes: used.Bytes, Inodes: used.Inodes, Opaque: made.Opaque, Whiteouts: made.Whiteouts}
	_, err = z.decodeTree(x.Tree, x.DataSize)
	return err
}

// maxTree limits the tree of a layer. An image with a larger tree is stored as directories.
const maxTree = 64 << 20

// parallelTables limits the tables of contents that are read and decoded at a time.
const parallelTables = 2

// decodeTree decodes the tree of a layer with dataSize bytes of data, within the limits of merges.
func (z *Layers) decodeTree(encoded []byte, dataSize int64) (*tree.Node, error) {
	most := tree.Limit{Bytes: maxTree, Memory: int64(cmp.Or(z.parts.MergeMemory, erofs.MaxMemory)),
		Blocks: dataSize / tree.BlockSize}
	root, _, err := tree.Decode(bytes.NewReader(encoded), 0, most)
	if err != nil {
		return nil, fmt.Errorf("tree of the layer: %w", err)
	}
	return root, nil
}

// prover returns the function that proves the table of contents of a layer. It unpacks the blob
// again. For that it waits for an unpack slot and memory, as a pull does.
func (z *Layers) prover(from layer.Source, blobSize int64, table *layer.TOC) fill.Prove {
	l := registry.Layer{Blob: ocispec.Descriptor{Digest: from.Blob, Size: blobSize}, DiffID: from.DiffID}
	b := z.parts.Budget
	return func(ctx context.Context, blob *io.SectionReader) error {
		for more := (budget.Shortage{}); ; {
			had, err := b.Run(ctx, table.Registry, nameOf(l), more, func(limits unpack.Limits) error {
				if _, err := blob.Seek(0, io.SeekStart); err != nil {
					return err
				}
				return z.layers.Prove(ctx, from.Name(), blob, limits)
			})
			var grows bool
			if more, grows = b.Grow(more, had, err); grows {
				continue
			}
			if err != nil && layer.RejectsContent(err) && !errdefs.IsUnwritable(err) { // the blob is right, so its table is false
				err = errdefs.New(codes.DataLoss, "%w", err)
			}
			return err
		}
	}
}

// nameOf names a layer in waits.
func nameOf(l registry.Layer) string { return "layer " + l.DiffID.String() }

// bytes reads a range of the blob from a place. Nothing verifies it.
func (b *blobSource) bytes(ctx context.Context, p *place, offset, size int64) ([]byte, error) {
	body, err := b.from(ctx, p, offset, size)
	if err != nil {
		return nil, err
	}
	buf := make([]byte, size)
	_, err = io.ReadFull(body, buf)
	return buf, errors.Join(err, body.Close())
}

// inflate decompresses the beginning of a gzip member or zstd frame in a process of its own.
func (z *Layers) inflate(ctx context.Context, kind blobindex.Compression, in []byte,
	out int64) ([]byte, error) {
	inflater, err := z.cfg.Inflate(kind, out)
	if err != nil {
		return nil, err
	}
	raw, err := inflater.Span(ctx, blobindex.Point{Start: true}, in, out)
	return raw, errors.Join(err, inflater.Close())
}

// findZtocs looks for SOCI's tables of contents of an image's missing layers, if one could be used.
func (z *Layers) findZtocs(ctx context.Context, store *layer.Store, img *registry.Image, repo *registry.Repository) {
	if img.SOCIIndex == "" || z.cfg.Policy != On || z.engine == nil ||
		store.Kind() != rootfs.EROFS {
		return
	}
	missing, unproven := int64(0), false
	for _, l := range img.Layers {
		name := SourceOf(l).Name()
		if mayHaveIndex(l) && !store.Has(name) {
			missing += l.Blob.Size
		}
		unproven = unproven || store.TOC(name) != nil // isForeign compares the tables
	}
	if missing < max(z.cfg.MinBytes, 1) && !unproven {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, tableTimeout)
	defer cancel()
	ctx, span := trace.Nest(ctx, "look for SOCI index")
	defer span.End()
	ztocs, err := repo.Ztocs(ctx, img.SOCIIndex)
	if err != nil {
		z.log.Info("the image's SOCI index cannot be used", "image", repo.Reference().String(), "error", err)
		return
	}
	for i := range img.Layers {
		if ztoc, ok := ztocs[img.Layers[i].Blob.Digest]; ok {
			img.Layers[i].Ztoc = &ztoc
		}
	}
}

// rejectTable acts on a layer whose table of contents is false, or could not be proven. Containers
// on the layer may have used wrong files.
func (z *Layers) rejectTable(from layer.Source, table string, reason error) {
	said := "the table of contents of a layer could not be proven"
	if errors.Is(reason, fill.ErrWrongIndex) {
		said = "the table of contents of a layer does not describe the layer"
	}
	z.distrust.add(from.Blob, table)
	z.log.Error(said+"; the containers on the layer are killed", "layer", from.DiffID, "blob", from.Blob, "error", reason)
	z.wrong.add(from.Name(), fmt.Sprintf("the files of the image may have been wrong: %s: layer %s: %v", said,
		from.DiffID, reason))
}

// falseTables are tables of contents that are not used until the next start. Other tables of the
// same blob are still used. Otherwise anyone could block a layer of another image, by an image with
// a false table for the layer.
type falseTables struct {
	mu sync.Mutex
	// +checklocks:mu
	tables map[blobTable]bool
}

// blobTable is a table of contents of a blob.
type blobTable struct {
	blob  digest.Digest
	table string // see tableOf
}

// maxFalseTables limits the false tables. If there are so many, no table is used.
const maxFalseTables = 10_000

func (f *falseTables) has(blob digest.Digest, table string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.tables[blobTable{blob, table}] || len(f.tables) >= maxFalseTables
}

func (f *falseTables) add(blob digest.Digest, table string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.tables == nil {
		f.tables = map[blobTable]bool{}
	}
	f.tables[blobTable{blob, table}] = true
}
