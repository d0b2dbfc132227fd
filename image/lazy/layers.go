package lazy

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"

	"berth/image/blobindex"
	"berth/image/layer"
	"berth/image/lazy/fill"
	"berth/image/registry"
	"berth/image/unpack/budget"
	"berth/internal/errdefs"
	"berth/internal/task"
)

// Policies of Config.
const (
	Off = "off" // pulls fetch whole layers
	// With On, pulls create layers from indexes that this node has made, and from tables of
	// contents that the manifest names by digest.
	On = "on"
)

// Config configures layers that containers use before they are complete.
type Config struct {
	Policy   string        // empty: Off. Incomplete layers of an earlier daemon are filled in any case
	MinBytes int64         // an image with fewer bytes to fetch lazily is fetched whole
	MinTime  time.Duration // an image that takes less time at the speed of recent pulls is fetched whole
	Stall    time.Duration // longest wait of a reader; 0: the default of package fill
	Memory   int64         // bytes of all parts that are being filled; 0: the default of package fill
	// Inflate starts a process that decompresses parts of a blob. The blob's tar has tarSize bytes.
	Inflate func(kind blobindex.Compression, tarSize int64) (fill.Inflater, error)
	// Kept, if not nil, has the files that fill.Engine.Keep returned in an earlier daemon, which
	// has ended. Open owns them.
	Kept []*os.File
}

// Parts are what Layers share with pulls.
type Parts struct {
	Root        string // of the image store
	Client      *registry.Client
	Budget      *budget.Budget
	MergeMemory int64 // bytes for merging the trees of layers; 0: erofs.MaxMemory
	IndexBytes  int64 // bytes of all indexes of blobs; 0: none are made
	Observer    Observer
	Waits       *task.Waits // nil: no recording
	// Begin is called before bytes of a layer are requested, and end after they have arrived. Slow
	// waits until n more bytes may be received.
	Begin func() (end func())
	Slow  func(ctx context.Context, n int) error
}

// Observer receives measurements. Its methods must not block.
type Observer interface {
	// Received reports bytes of layers as they arrive from a registry.
	Received(registry string, bytes int)
	// ReadWaited reports how long a read of an incomplete layer has waited for its content.
	ReadWaited(waited time.Duration)
}

// Images are the images of the node, as far as Layers need them.
type Images interface {
	// Servers returns references of images with a layer, one reference for each repository that has
	// served the layer.
	Servers(layer digest.Digest) []registry.Reference
	// RemoveWith removes the images with a layer that cannot be completed.
	RemoveWith(ctx context.Context, layer digest.Digest, reason error) error
}

const (
	// lazyDir has the incomplete layers, in the directory of the EROFS driver's store.
	lazyDir = "lazy"
	// maxStall is the part of a reader's longest wait that berth waits for a byte of one host. The
	// rest is left for other hosts.
	maxStall = 4
	// incompleteStop limits the wait for the goroutines of Layers.
	incompleteStop = 5 * time.Second
)

// Layers are the layers that are used before they are complete. Its methods may be called
// concurrently after Start.
type Layers struct {
	cfg      Config
	parts    Parts
	log      *slog.Logger
	engine   *fill.Engine    // nil: the kernel cannot report reads, or there are no lazy layers
	images   Images          // set by Start
	layers   *layer.Store    // of the EROFS driver; set with engine
	life     *task.Lifetime  // of goroutines that handle ended layers
	unloaded []digest.Digest // unproven layers that could not be loaded, until Start
	indexer  *indexer        // set by Start
	tables   chan struct{}   // holds a token for each table of contents that is being read
	rates    rates           // tell how long a whole pull would take
	distrust falseTables
	wrong    wrongFiles
	complete atomic.Pointer[func(layer.Source)] // see OnComplete

	mu sync.Mutex
	// +checklocks:mu
	sources map[digest.Digest]*blobSource
	// +checklocks:mu
	decisions map[digest.Digest]string // of pulls, by layer
}

// New returns Layers. The caller calls Open, if a driver has incomplete layers, then Start, and at
// the end Close.
func New(cfg Config, parts Parts, log *slog.Logger) *Layers {
	if cfg.Policy == "" {
		cfg.Policy = Off
	}
	if cfg.Stall <= 0 {
		cfg.Stall = fill.DefaultStall
	}
	return &Layers{cfg: cfg, parts: parts, log: log, life: task.NewLifetime(), tables: make(chan struct{}, parallelTables),
		sources:   map[digest.Digest]*blobSource{},
		decisions: map[digest.Digest]string{}}
}

// Open opens the Engine if it is needed. dir is the directory of the EROFS driver's store. probeDir
// is a directory on the same filesystem for temporary files.
func (z *Layers) Open(dir, probeDir string) error {
	needed, err := z.needed(filepath.Join(dir, lazyDir))
	if err != nil || !needed && z.cfg.Policy == Off {
		return errors.Join(err, z.DropKept())
	}
	cfg := fill.Config{Dir: probeDir, Memory: z.cfg.Memory, Stall: z.cfg.Stall, Needed: needed,
		Room: func() error { return z.layers.HasRoom(0, z.layers.Deleting().Bytes) }, Waits: z.parts.Waits,
		Waited: z.parts.Observer.ReadWaited, Log: z.log}
	if len(z.cfg.Kept) == 2 {
		cfg.Group, cfg.Ring = z.cfg.Kept[0], z.cfg.Kept[1]
		z.cfg.Kept = nil
	}
	z.engine, err = fill.Open(cfg)
	switch {
	case err == nil:
		return z.DropKept()
	case errors.Is(err, errors.ErrUnsupported), !needed:
		z.engine = nil
		z.log.Warn("images are pulled whole: layers cannot be used before they are complete", "error", err)
		return z.DropKept()
	}
	return err
}

// needed reports whether there are incomplete layers, or events of an earlier daemon.
func (z *Layers) needed(dir string) (bool, error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	return len(entries) > 0 || len(z.cfg.Kept) > 0, nil
}

// DropKept closes the files of an earlier daemon that no Engine has taken.
func (z *Layers) DropKept() (failed error) {
	for _, f := range z.cfg.Kept {
		failed = errors.Join(failed, f.Close())
	}
	z.cfg.Kept = nil
	return failed
}

// Works reports whether layers can be used before they are complete.
func (z *Layers) Works() bool { return z.engine != nil }

// Enabled reports whether pulls create layers lazily.
func (z *Layers) Enabled() bool { return z.cfg.Policy != Off }

// Hooks returns what the layer store needs.
func (z *Layers) Hooks() layer.Lazy {
	fill := func(from layer.Source, x *blobindex.Index, toc *layer.TOC) layer.Filler {
		return z.filler(z.source(from, x.BlobSize), from, x, toc)
	}
	return layer.Lazy{Engine: z.engine, Done: z.ended, Fill: fill}
}

// Opened sets the layer store that was opened with Hooks.
func (z *Layers) Opened(store *layer.Store) { z.layers = store }

// Start begins to fill the layers and to make indexes. The caller has loaded all images of the
// node.
func (z *Layers) Start(images Images) error {
	z.images = images
	if err := z.openIndexes(); err != nil {
		return err
	}
	for _, name := range z.unloaded {
		z.endUnloaded(name)
	}
	z.unloaded = nil
	for _, name := range z.names() {
		z.prefer(name)
	}
	if z.engine != nil {
		z.engine.Start()
	}
	return nil
}

// prefer makes the Engine fetch those parts of a layer first that processes have waited for
// earlier.
func (z *Layers) prefer(name digest.Digest) {
	l, src := z.Get(name), z.known(name)
	if l != nil && src != nil && z.layers.TOC(name) == nil { // an index of a table has other spans than an own index
		l.Prefer(z.indexer.store.Profile(src.blob.Digest))
	}
}

// StopIndexing ends the making of indexes. Queued layers get no index.
func (z *Layers) StopIndexing() error {
	if z.indexer == nil {
		return nil
	}
	return z.indexer.close()
}

// Close ends the filling. The layer store is closed.
func (z *Layers) Close() (failed error) {
	z.life.Close()
	z.life.Cancel()
	failed = z.life.WaitFor(incompleteStop)
	if z.engine != nil {
		failed = errors.Join(failed, z.engine.Close())
	}
	z.mu.Lock()
	defer z.mu.Unlock()
	for _, src := range z.sources {
		src.close()
	}
	return errors.Join(failed, z.DropKept())
}

// source returns the source of an incomplete layer's blob, and creates it if needed.
func (z *Layers) source(from layer.Source, blobSize int64) *blobSource {
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.sourceLocked(from, blobSize)
}

// sourceLocked is source for a caller that holds the lock.
//
// +checklocks:z.mu
func (z *Layers) sourceLocked(from layer.Source, blobSize int64) *blobSource {
	name := from.Name()
	if z.sources[name] == nil {
		z.sources[name] = &blobSource{z: z, name: name, blob: ocispec.Descriptor{Digest: from.Blob, Size: blobSize}}
	}
	return z.sources[name]
}

// use returns the source of a layer that is about to be created. The source is kept at least until
// done is called. Then it is dropped, unless the layer is incomplete.
func (z *Layers) use(from layer.Source, blobSize int64) (src *blobSource, done func()) {
	z.mu.Lock()
	defer z.mu.Unlock()
	src = z.sourceLocked(from, blobSize)
	src.users++
	return src, func() {
		z.mu.Lock()
		src.users--
		z.mu.Unlock()
		z.forgetUnused(src.name)
	}
}

// known returns the source of a layer, or nil.
func (z *Layers) known(name digest.Digest) *blobSource {
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.sources[name]
}

// forgetUnused drops the source of a layer, unless the layer is incomplete.
func (z *Layers) forgetUnused(name digest.Digest) {
	z.mu.Lock()
	src := z.sources[name]
	unused := src != nil && src.users == 0 && z.Get(name) == nil
	if unused {
		delete(z.sources, name)
	}
	z.mu.Unlock()
	if unused {
		src.close()
	}
}

// Removed forgets a layer that was removed.
func (z *Layers) Removed(name digest.Digest) {
	z.mu.Lock()
	delete(z.decisions, name)
	z.mu.Unlock()
	z.forgetUnused(name)
}

// forget drops the source of a layer that no longer needs it.
func (z *Layers) forget(name digest.Digest) {
	z.mu.Lock()
	src := z.sources[name]
	delete(z.sources, name)
	z.mu.Unlock()
	if src != nil {
		src.close()
	}
}

func (z *Layers) filler(src *blobSource, from layer.Source, x *blobindex.Index,
	toc *layer.TOC) layer.Filler {
	kind, tarSize := x.Kind, x.TarSize // the function must not keep x, which has tree and record, in memory
	f := layer.Filler{Source: src, Inflater: func() (fill.Inflater, error) { return z.cfg.Inflate(kind, tarSize) }}
	if toc != nil {
		f.Prove = z.prover(from, x.BlobSize, toc)
	}
	return f
}

// Get returns an incomplete layer, or nil.
func (z *Layers) Get(name digest.Digest) *fill.Layer {
	if z.layers == nil {
		return nil
	}
	return z.layers.Lazy(name)
}

// ended is layer.Lazy.Done. The layer store calls it, so a goroutine does the work.
func (z *Layers) ended(from layer.Source, l *fill.Layer, toc *layer.TOC, err error) {
	z.life.Spawn(func() {
		handle := func() error { return z.handleEnd(from, l, toc, err) }
		if failed := task.Guard(z.log, "end the filling", "layer "+from.DiffID.String(), handle); failed != nil {
			z.log.Warn("handle the end of an incomplete layer", "layer", from.DiffID, "error", failed)
		}
	})
}

func (z *Layers) handleEnd(from layer.Source, l *fill.Layer, toc *layer.TOC, err error) error {
	z.forget(from.Name())
	if err != nil && toc != nil {
		z.rejectTable(from, toc.Name, err) // this comes first, because the rest may wait for the disk
	}
	if err != nil {
		return z.quarantine(z.life.Context(), from, err)
	}
	z.log.Info("layer is complete", "layer", from.DiffID, "blob", from.Blob)
	if done := z.complete.Load(); done != nil {
		(*done)(from)
	}
	if toc != nil {
		return nil // an index of a table has other spans than an own index
	}
	return z.indexer.store.AddProfile(from.Blob, l.Faulted())
}

// OnComplete sets a function that is called for each layer that has become complete.
func (z *Layers) OnComplete(do func(layer.Source)) { z.complete.Store(&do) }

// quarantine removes the index and the images of a layer that cannot be completed, so that the next
// pull fetches it whole. Containers keep the layer.
func (z *Layers) quarantine(ctx context.Context, from layer.Source, reason error) error {
	return errors.Join(z.removeIndex(ctx, from.Blob), z.images.RemoveWith(ctx, from.Name(), reason))
}

// removeIndex removes an index. It tries again while the index is in use, which never takes long.
func (z *Layers) removeIndex(ctx context.Context, blob digest.Digest) error {
	const attempts, pause = 100, 20 * time.Millisecond
	for range attempts {
		if err := z.indexer.store.Remove(blob); err != nil || !z.indexer.store.Has(blob) {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(pause):
		}
	}
	return errdefs.Unavailable("index of %s is in use", blob)
}

// ErrFailed is wrapped by the error about a layer that cannot be completed.
var ErrFailed = errors.New("a layer cannot be completed")

// Failed returns DataLoss, which wraps ErrFailed, if one of the layers cannot be completed.
func (z *Layers) Failed(layers []digest.Digest) error {
	for _, name := range layers {
		if l := z.Get(name); l != nil && l.Err() != nil {
			return errdefs.New(codes.DataLoss, "%w: %w", ErrFailed, l.Err())
		}
	}
	return nil
}

// Await waits until layers are complete. The error is DataLoss if a layer cannot be completed.
func (z *Layers) Await(ctx context.Context, layers []digest.Digest) error {
	for _, name := range layers {
		l := z.Get(name)
		if l == nil {
			continue
		}
		end := z.parts.Waits.BeginOpen("layer completion", "layer "+name.String())
		err := awaitLayer(ctx, l)
		end()
		if err != nil {
			return fmt.Errorf("wait until layer %s is complete: %w", name, err)
		}
	}
	return nil
}

func awaitLayer(ctx context.Context, l *fill.Layer) error {
	select {
	case <-l.Done():
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if err := l.Err(); err != nil {
		return errdefs.New(codes.DataLoss, "%w", err)
	}
	return nil
}

// Retired reports whether containers may use a layer that was set aside while it was incomplete.
func (z *Layers) Retired(names []digest.Digest) (bool, error) {
	if z.layers == nil {
		return false, nil
	}
	return z.layers.Retired(names)
}

// Lost reports whether containers of an earlier daemon read zeros where content of their layers is
// missing. That is so if no process has kept the fanotify group.
func (z *Layers) Lost() bool { return z.engine == nil || !z.engine.TookOver() }

// SourceOf returns the digests that a layer of an image is made from.
func SourceOf(l registry.Layer) layer.Source {
	return layer.Source{Blob: l.Blob.Digest, DiffID: l.DiffID}
}
