package image

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"

	"berth/image/layer"
	"berth/image/lazy"
	blobindex "berth/image/lazy/index"
	"berth/image/peers"
	"berth/internal/errdefs"
	"berth/internal/task"
)

// Policies of LazyConfig.
const (
	LazyOff = "off" // pulls fetch whole layers
	// LazyOn: pulls create layers from indexes that this node has made, and from tables of contents
	// that the manifest names by their digests.
	LazyOn = "on"
)

// LazyConfig configures layers that containers use before they are complete. See package lazy.
type LazyConfig struct {
	Policy   string        // empty: LazyOff. Incomplete layers of an earlier Store are filled in any case
	MinBytes int64         // an image with fewer bytes to fetch lazily is fetched whole
	MinTime  time.Duration // and so is one that takes less time at the speed of recent pulls
	Stall    time.Duration // longest wait of a reader; 0: the default of package lazy
	Memory   int64         // bytes of all parts that are being filled; 0: the default of package lazy
	// Inflate starts a process that decompresses parts of a blob, whose tar has tarSize bytes.
	Inflate func(kind blobindex.Compression, tarSize int64) (lazy.Inflater, error)
	// Kept are the files of lazy.Engine.Keep of an earlier daemon, which has ended; or nil. Open
	// owns them.
	Kept []*os.File
}

const (
	// lazyDir has the incomplete layers, in the directory of the EROFS driver's store.
	lazyDir = "lazy"
	// maxStall limits the wait for a byte of one host, as a part of the wait of a reader: there
	// must be time to ask other hosts.
	maxStall = 4
	// incompleteStop limits the wait for the goroutines of incompleteLayers.
	incompleteStop = 5 * time.Second
)

// incompleteLayers are the layers of a Store that are used before they are complete.
type incompleteLayers struct {
	cfg      LazyConfig
	observer Observer
	log      *slog.Logger
	engine   *lazy.Engine    // nil: the kernel cannot, or nothing needs it
	store    *Store          // set before the Engine starts
	layers   *layer.Store    // of the EROFS driver; set with engine
	life     *task.Lifetime  // of goroutines that handle ended layers
	unloaded []digest.Digest // unproven layers that could not be loaded, until start

	mu        sync.Mutex // guards the fields below
	sources   map[digest.Digest]*blobSource
	decisions map[digest.Digest]string // of pulls, by layer
}

func newIncompleteLayers(cfg LazyConfig, observer Observer, log *slog.Logger) *incompleteLayers {
	if cfg.Policy == "" {
		cfg.Policy = LazyOff
	}
	if cfg.Stall <= 0 {
		cfg.Stall = lazy.DefaultStall
	}
	if observer == nil {
		observer = noObserver{}
	}
	return &incompleteLayers{cfg: cfg, observer: observer, log: log, life: task.NewLifetime(),
		sources:   map[digest.Digest]*blobSource{},
		decisions: map[digest.Digest]string{}}
}

// open opens the Engine if it is needed. dir is that of the EROFS driver's store, probeDir is one
// on the same filesystem for temporary files.
func (z *incompleteLayers) open(dir, probeDir string, waits *task.Waits) error {
	needed, err := z.needed(filepath.Join(dir, lazyDir))
	if err != nil || !needed && z.cfg.Policy == LazyOff {
		return errors.Join(err, z.dropKept())
	}
	cfg := lazy.Config{Dir: probeDir, Memory: z.cfg.Memory, Stall: z.cfg.Stall, Needed: needed,
		Room: func() error { return z.layers.HasRoom(0, z.layers.Deleting().Bytes) }, Waits: waits,
		Waited: z.observer.ReadWaited, Log: z.log}
	if len(z.cfg.Kept) == 2 {
		cfg.Group, cfg.Ring = z.cfg.Kept[0], z.cfg.Kept[1]
		z.cfg.Kept = nil
	}
	z.engine, err = lazy.Open(cfg)
	switch {
	case err == nil:
		return z.dropKept()
	case errors.Is(err, errors.ErrUnsupported), !needed:
		z.engine = nil
		z.log.Warn("images are pulled whole: layers cannot be used before they are complete", "error", err)
		return z.dropKept()
	}
	return err
}

// needed reports whether there are incomplete layers, or events of an earlier daemon.
func (z *incompleteLayers) needed(dir string) (bool, error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	return len(entries) > 0 || len(z.cfg.Kept) > 0, nil
}

// dropKept closes the files of an earlier daemon that no Engine has taken.
func (z *incompleteLayers) dropKept() (failed error) {
	for _, f := range z.cfg.Kept {
		failed = errors.Join(failed, f.Close())
	}
	z.cfg.Kept = nil
	return failed
}

// parts returns what the layer store needs.
func (z *incompleteLayers) parts() layer.Lazy {
	fill := func(from layer.Source, x *blobindex.Index, toc *layer.TOC) layer.Filler {
		return z.filler(z.source(from, x.BlobSize), from, x, toc)
	}
	return layer.Lazy{Engine: z.engine, Done: z.ended, Fill: fill}
}

// start begins to fill the layers. The Store is complete.
func (z *incompleteLayers) start(s *Store) {
	z.store = s
	for _, name := range z.unloaded {
		s.endUnloaded(name)
	}
	z.unloaded = nil
	for _, name := range z.names() {
		z.prefer(name)
	}
	if z.engine != nil {
		z.engine.Start()
	}
}

// prefer makes a layer's parts that processes have waited for earlier the first ones to be fetched.
func (z *incompleteLayers) prefer(name digest.Digest) {
	l, src := z.get(name), z.known(name)
	if l != nil && src != nil && z.layers.TOC(name) == nil { // the spans of a table are not those of an own index
		l.Prefer(z.store.indexer.store.Profile(src.blob.Digest))
	}
}

// close ends the filling. The layer store is closed.
func (z *incompleteLayers) close() (failed error) {
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
	return errors.Join(failed, z.dropKept())
}

// source returns the source of an incomplete layer's blob, and creates it if needed.
func (z *incompleteLayers) source(from layer.Source, blobSize int64) *blobSource {
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.sourceLocked(from, blobSize)
}

// sourceLocked is source for a caller that holds the lock.
func (z *incompleteLayers) sourceLocked(from layer.Source, blobSize int64) *blobSource {
	name := from.Name()
	if z.sources[name] == nil {
		z.sources[name] = &blobSource{z: z, name: name, blob: ocispec.Descriptor{Digest: from.Blob, Size: blobSize}}
	}
	return z.sources[name]
}

// use returns the source of a layer that is about to be created. It is kept until done is called,
// and then dropped if the layer is not incomplete.
func (z *incompleteLayers) use(from layer.Source, blobSize int64) (src *blobSource, done func()) {
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
func (z *incompleteLayers) known(name digest.Digest) *blobSource {
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.sources[name]
}

// forgetUnused drops the source of a layer that is not incomplete.
func (z *incompleteLayers) forgetUnused(name digest.Digest) {
	z.mu.Lock()
	src := z.sources[name]
	unused := src != nil && src.users == 0 && z.get(name) == nil
	if unused {
		delete(z.sources, name)
	}
	z.mu.Unlock()
	if unused {
		src.close()
	}
}

// removed forgets a layer that was removed.
func (z *incompleteLayers) removed(name digest.Digest) {
	z.mu.Lock()
	delete(z.decisions, name)
	z.mu.Unlock()
	z.forgetUnused(name)
}

// forget drops the source of a layer that needs none any more.
func (z *incompleteLayers) forget(name digest.Digest) {
	z.mu.Lock()
	src := z.sources[name]
	delete(z.sources, name)
	z.mu.Unlock()
	if src != nil {
		src.close()
	}
}

func (z *incompleteLayers) filler(src *blobSource, from layer.Source, x *blobindex.Index,
	toc *layer.TOC) layer.Filler {
	kind, tarSize := x.Kind, x.TarSize // not x, which has tree and record
	f := layer.Filler{Source: src, Inflater: func() (lazy.Inflater, error) { return z.cfg.Inflate(kind, tarSize) }}
	if toc != nil {
		f.Prove = z.prover(from, x.BlobSize, toc)
	}
	return f
}

// get returns an incomplete layer, or nil.
func (z *incompleteLayers) get(name digest.Digest) *lazy.Layer {
	if z.layers == nil {
		return nil
	}
	return z.layers.Lazy(name)
}

// ended is layer.Lazy.Done. It is called by the layer store, so the work is done elsewhere.
func (z *incompleteLayers) ended(from layer.Source, l *lazy.Layer, toc *layer.TOC, err error) {
	z.life.Spawn(func() {
		handle := func() error { return z.handleEnd(from, l, toc, err) }
		if failed := task.Guard(z.log, "end the filling", "layer "+from.DiffID.String(), handle); failed != nil {
			z.log.Warn("handle the end of an incomplete layer", "layer", from.DiffID, "error", failed)
		}
	})
}

func (z *incompleteLayers) handleEnd(from layer.Source, l *lazy.Layer, toc *layer.TOC, err error) error {
	z.forget(from.Name())
	if err != nil && toc != nil {
		z.store.rejectTable(from, toc.Name, err) // first: the rest may wait for the disk
	}
	if err != nil {
		return z.store.quarantine(z.life.Context(), from)
	}
	z.log.Info("layer is complete", "layer", from.DiffID, "blob", from.Blob)
	z.store.announce(from)
	if toc != nil {
		return nil // the spans are not those of an index that this node has
	}
	return z.store.indexer.store.AddProfile(from.Blob, l.Faulted())
}

// quarantine removes the index and the images of a layer that cannot be completed, so that the next
// pull fetches it whole. Containers keep the layer.
func (s *Store) quarantine(ctx context.Context, from layer.Source) error {
	err := s.removeIndex(ctx, from.Blob)
	release, lockErr := s.lockWriter(ctx)
	if lockErr != nil {
		return errors.Join(err, lockErr)
	}
	defer release()
	if s.failedLayer([]digest.Digest{from.Name()}) == nil {
		return err // it was removed, and perhaps created again
	}
	for _, img := range s.index.Load().images {
		if !slices.Contains(img.Layers, from.Name()) {
			continue
		}
		s.log.Error("image removed: one of its layers cannot be completed; it must be pulled again", "image", img.ID,
			"tags", img.RepoTags, "layer", from.DiffID)
		err = errors.Join(err, s.remove(img.ID))
	}
	return err
}

// removeIndex removes an index. It tries again while the index is in use, which never takes long.
func (s *Store) removeIndex(ctx context.Context, blob digest.Digest) error {
	const attempts, pause = 100, 20 * time.Millisecond
	for range attempts {
		if err := s.indexer.store.Remove(blob); err != nil || !s.indexer.store.Has(blob) {
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

// errFailedLayer is wrapped by the error about a layer that cannot be completed.
var errFailedLayer = errors.New("a layer cannot be completed")

// failedLayer returns DataLoss, which wraps errFailedLayer, if one of the layers cannot be
// completed.
func (s *Store) failedLayer(layers []digest.Digest) error {
	for _, name := range layers {
		if l := s.incomplete.get(name); l != nil && l.Err() != nil {
			return errdefs.New(codes.DataLoss, "%w: %w", errFailedLayer, l.Err())
		}
	}
	return nil
}

// announce tells other nodes that this one has a layer.
func (s *Store) announce(from layer.Source) {
	p := s.peers.Load()
	if p == nil {
		return
	}
	for _, k := range s.SharedLayers() {
		if (layer.Source{Blob: k.Blob, DiffID: k.DiffID}) == from {
			p.Have(peers.Key{Registry: k.Registry, Blob: k.Blob, DiffID: k.DiffID})
		}
	}
}

// awaitComplete waits until layers are complete. The error is DataLoss if one cannot be completed.
func (s *Store) awaitComplete(ctx context.Context, layers []digest.Digest) error {
	for _, name := range layers {
		l := s.incomplete.get(name)
		if l == nil {
			continue
		}
		end := s.cfg.Waits.BeginOpen("layer completion", "layer "+name.String())
		err := awaitLayer(ctx, l)
		end()
		if err != nil {
			return fmt.Errorf("wait until layer %s is complete: %w", name, err)
		}
	}
	return nil
}

func awaitLayer(ctx context.Context, l *lazy.Layer) error {
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

// LayersLost reports whether containers of an earlier daemon read zeros where the content of their
// layers is missing: no process has kept the events of their layers.
func (s *Store) LayersLost() bool {
	return s.incomplete.engine == nil || !s.incomplete.engine.TookOver()
}
