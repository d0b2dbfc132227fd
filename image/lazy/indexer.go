package lazy

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/opencontainers/go-digest"

	"berth/image/blobindex"
	"berth/image/layer"
	"berth/image/registry"
	"berth/internal/errdefs"
	"berth/internal/rootfs"
	"berth/internal/task"
)

const (
	// indexesDir has the indexes of blobs, below the directory of the store.
	indexesDir = "indexes"
	// minIndexed is the size of the smallest blob that gets an index. Smaller blobs are always
	// fetched whole.
	minIndexed = 1 << 20
	// maxNoted is how many finished layers may wait for their indexes. Further layers get no index.
	maxNoted = 64
	// indexerStop limits the wait for an unfinished index when the store is closed.
	indexerStop = 5 * time.Second
)

// indexer makes the indexes of layers after they are complete, so that pulls do not wait for
// indexes.
type indexer struct {
	store *blobindex.Store
	log   *slog.Logger
	queue chan noted
	left  atomic.Int64               // indexes that are queued or being made
	span  func(blobSize int64) int64 // blobindex.SpanFor
	life  *task.Lifetime             // of its goroutine
}

// noted is the information about a blob that a pull has noted.
type noted struct {
	layers   *layer.Store
	registry string // that has served the blob
	source   layer.Source
	size     int64 // of the blob
	points   *os.File
	states   []blobindex.State
}

// openIndexes opens the indexes and starts the indexer.
func (z *Layers) openIndexes() error {
	store, err := blobindex.Open(filepath.Join(z.parts.Root, indexesDir), z.parts.IndexBytes, z.log)
	if err != nil {
		return err
	}
	x := &indexer{store: store, log: z.log, queue: make(chan noted, maxNoted), life: task.NewLifetime(),
		span: blobindex.SpanFor}
	x.life.Spawn(func() { x.run(x.life.Context()) })
	z.indexer = x
	return nil
}

// Inspect reads all indexes of blobs without changing anything. It returns the damaged indexes with
// the reason, by path. root is Parts.Root.
func Inspect(root string) (damaged map[string]error, err error) {
	return blobindex.Inspect(filepath.Join(root, indexesDir))
}

// Indexes returns the number of indexes of blobs and the bytes of their files.
func (z *Layers) Indexes() (n int, bytes int64) { return z.indexer.store.Usage() }

// DropIndexes removes the indexes of blobs. It returns how many bytes they had. The next pulls of
// their layers cannot be lazy.
func (z *Layers) DropIndexes() (freed int64, err error) { return z.indexer.store.Clear() }

// IndexStore returns the indexes of blobs.
func (z *Layers) IndexStore() *blobindex.Store { return z.indexer.store }

// Indexing returns how many indexes are being made or are queued.
func (z *Layers) Indexing() int64 { return z.indexer.left.Load() }

// mayHaveIndex reports whether a layer can get an index.
func mayHaveIndex(l registry.Layer) bool {
	return l.File == "" && l.Blob.Size >= minIndexed && l.Blob.Digest.Algorithm() == digest.SHA256
}

// BeginIndex returns the file for the points of a layer's blob, which is about to be fetched whole.
// It has no file if the layer needs no index.
func (z *Layers) BeginIndex(store *layer.Store, l registry.Layer) layer.Points {
	return z.indexer.begin(store, l)
}

// EndIndex makes the index of a layer that was fetched whole, in the background. err is the error
// of the transfer. from is the registry.
func (z *Layers) EndIndex(store *layer.Store, from string, l registry.Layer, points layer.Points, blob *registry.Blob,
	err error) {
	z.indexer.end(store, from, l, points, blob, err)
}

// begin returns the file for the points of a layer's blob, or nil if the layer needs no index.
func (x *indexer) begin(store *layer.Store, l registry.Layer) layer.Points {
	if !x.store.Enabled() || store.Kind() != rootfs.EROFS || !mayHaveIndex(l) || x.store.Has(l.Blob.Digest) {
		return layer.Points{}
	}
	f, err := x.store.NewFile()
	if err != nil {
		x.log.Debug("layer gets no index", "layer", l.Blob.Digest, "error", err)
		return layer.Points{}
	}
	return layer.Points{File: f, Span: x.span(l.Blob.Size)}
}

// end makes the index of a complete layer in the background, or closes the file if err is not nil.
// from is the registry.
func (x *indexer) end(store *layer.Store, from string, l registry.Layer, points layer.Points, blob *registry.Blob,
	err error) {
	if points.File == nil {
		if err == nil {
			x.noteServed(l.Blob.Digest, from)
		}
		return
	}
	if err == nil {
		var states []blobindex.State
		if states, err = blob.States(); err == nil {
			x.left.Add(1)
			select {
			case x.queue <- noted{store, from, SourceOf(l), l.Blob.Size, points.File, states}:
				return
			default:
				x.left.Add(-1)
				err = fmt.Errorf("%d layers wait for theirs", maxNoted)
			}
		}
	}
	_ = points.File.Close() // the file has no name, so its content is dropped
	x.log.Debug("layer gets no index", "layer", l.Blob.Digest, "error", err)
}

// run makes indexes until ctx is done.
func (x *indexer) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case n := <-x.queue:
			index := func() error { return x.make(n) }
			if err := task.Guard(x.log, "index", "layer "+n.source.DiffID.String(), index); err != nil {
				x.log.Debug("layer gets no index", "layer", n.source.Blob, "error", err)
			}
			x.left.Add(-1)
		}
	}
}

// make makes an index of what a pull has noted.
func (x *indexer) make(n noted) error {
	defer n.points.Close() // the file has no name, so its content is dropped
	made, err := n.layers.Packed(n.source.Name())
	if err != nil {
		return err
	}
	kind, points, err := readPoints(n.points)
	if err != nil {
		return err
	}
	record, err := digestOf(made.RecordPath)
	if err != nil {
		return err
	}
	err = x.store.Add(&blobindex.Index{
		Blob: n.source.Blob, BlobSize: n.size, DiffID: n.source.DiffID, TarSize: made.TarBytes, Kind: kind,
		States: n.states, Points: points, TreeDigest: made.Tree, RecordDigest: record, DataSize: made.DataSize,
		Summary: blobindex.Summary{Bytes: made.Bytes, Inodes: made.Inodes, Opaque: made.Opaque, Whiteouts: made.Whiteouts,
			Sum: made.Sum},
	}, made.TreePath, made.RecordPath)
	if err == nil {
		x.noteServed(n.source.Blob, n.registry)
	}
	return err
}

// noteServed notes that a registry has served a blob, if there is an index of the blob.
func (x *indexer) noteServed(blob digest.Digest, registry string) {
	if err := x.store.NoteServed(blob, registry); err != nil {
		x.log.Debug("the next pull of a layer cannot be lazy", "layer", blob, "registry", registry, "error", err)
	}
}

// readPoints reads what berth-unpack has written. A blob may have compromised that process.
func readPoints(f *os.File) (blobindex.Compression, []blobindex.Point, error) {
	st, err := f.Stat()
	if err != nil {
		return 0, nil, err
	}
	if st.Size() == 0 || st.Size() > blobindex.MaxEncoded {
		return 0, nil, errdefs.FailedPrecondition("the blob has no points, or too many: %d bytes", st.Size())
	}
	b := make([]byte, st.Size())
	if _, err := f.ReadAt(b, 0); err != nil {
		return 0, nil, err
	}
	return blobindex.DecodeRecorded(b)
}

func digestOf(path string) (digest.Digest, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close() // read only
	return digest.SHA256.FromReader(io.LimitReader(f, blobindex.MaxEncoded))
}

// close ends the indexer. Queued layers get no index.
func (x *indexer) close() error {
	x.life.Cancel()
	err := x.life.WaitFor(indexerStop)
	for {
		select {
		case n := <-x.queue:
			_ = n.points.Close() // the file has no name, so its content is dropped
		default:
			return err
		}
	}
}
