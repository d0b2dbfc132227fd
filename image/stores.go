package image

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"

	"github.com/opencontainers/go-digest"

	"berth/image/erofs"
	"berth/image/layer"
	"berth/image/lazy"
	"berth/internal/cleanup"
	"berth/internal/errdefs"
	"berth/internal/rootfs"
	"berth/internal/task"
)

// erofsDir is the directory of the EROFS driver's store, inside the directory driver's store.
const erofsDir = "erofs"

// LayerRoots returns the directories of the layer stores in the image store at root, for
// layer.Inspect.
func LayerRoots(root string) []string { return []string{root, filepath.Join(root, erofsDir)} }

// stores are the layer stores of all drivers. One driver makes new layers, and existing layers of
// the other driver stay in use. All layers of an image have the same form, so a layer may exist in
// both forms.
type stores struct {
	log     *slog.Logger
	waits   *task.Waits
	choice  string         // Config.Driver
	primary *layer.Store   // makes new layers
	usable  []*layer.Store // the open stores, primary first
	all     []*layer.Store // the open stores, directories first
	// unmountable lists EROFS layers that this kernel cannot mount; nil if none exist. Store.load
	// removes their images before removeUnmountable removes the layers.
	unmountable *layer.Survey
	root        string // Config.Root
	lazy        *lazy.Layers
	// reclaim is Reserve.Reclaim of all stores; nil while they are being opened.
	reclaim func() (freeing uint64)
	// reclaimable is Reserve.Reclaimable of all stores. It is set together with reclaim.
	reclaimable func() uint64
}

// driverAuto is the value of Config.Driver that selects EROFS where the kernel can mount it.
const driverAuto = "auto"

// openStores opens the stores. The driver that cfg names makes new layers.
func openStores(cfg Config, log *slog.Logger) (_ *stores, err error) {
	s := &stores{log: log, waits: cfg.Waits, choice: cfg.Driver, root: cfg.Root, lazy: cfg.Lazy}
	if s.choice == "" {
		s.choice = string(rootfs.Directory)
	}
	if !slices.Contains([]string{string(rootfs.Directory), string(rootfs.EROFS), driverAuto}, s.choice) {
		return nil, errdefs.InvalidArgument("unknown layer driver %q", cfg.Driver)
	}
	undo := cleanup.New()
	defer undo.Run(&err)
	undo.Add("close layer stores", s.close)
	directory, err := s.open(cfg.Root, layer.NewDirectory(cfg.Unpack), cfg.Reserve)
	if err != nil {
		return nil, err
	}
	s.primary, s.usable = directory, []*layer.Store{directory}
	if err := s.openEROFS(cfg, directory); err != nil {
		return nil, err
	}
	if !s.lazy.Works() {
		err = s.lazy.DropKept()
	}
	undo.Release()
	return s, err
}

// open opens one store.
func (s *stores) open(root string, driver layer.Driver, reserve layer.Reserve) (*layer.Store, error) {
	return s.added(layer.Open(root, driver, s.reclaiming(reserve), s.waits, s.log))
}

// openMerger opens the EROFS driver's store, with incomplete layers if they are needed.
func (s *stores) openMerger(root string, driver layer.Merger, reserve layer.Reserve) (*layer.Store, error) {
	if err := s.lazy.Open(root, s.spool()); err != nil {
		return nil, err
	}
	placed, aside, err := layer.Unproven(root)
	if err != nil {
		return nil, err
	}
	var store *layer.Store
	if !s.lazy.Works() {
		store, err = s.open(root, driver, reserve)
	} else {
		store, err = s.added(layer.OpenLazy(root, driver, s.reclaiming(reserve), s.lazy.Hooks(), s.waits, s.log))
		s.lazy.Opened(store)
	}
	if err == nil {
		isThere := func(name digest.Digest) bool {
			return slices.ContainsFunc(s.all, func(o *layer.Store) bool { return o.Has(name) })
		}
		s.lazy.NoteUnloaded(store, isThere, placed, aside)
	}
	return store, err
}

// reclaiming sets Reserve.Reclaim and Reserve.Reclaimable.
func (s *stores) reclaiming(reserve layer.Reserve) layer.Reserve {
	reserve.Reclaim = func() uint64 {
		if s.reclaim == nil {
			return 0
		}
		return s.reclaim()
	}
	reserve.Reclaimable = func() uint64 {
		if s.reclaimable == nil {
			return 0
		}
		return s.reclaimable()
	}
	return reserve
}

func (s *stores) added(store *layer.Store, err error) (*layer.Store, error) {
	if err != nil {
		return nil, err
	}
	s.all = append(s.all, store)
	return store, nil
}

// openEROFS opens the store of the EROFS driver if it will be used or was used before. On a kernel
// without EROFS support the existing layers are unmountable. After another failure of the probe,
// for example on a full disk, the existing layers stay in use. "auto" then creates no EROFS layers
// until the next start.
func (s *stores) openEROFS(cfg Config, directory *layer.Store) error {
	root := filepath.Join(cfg.Root, erofsDir)
	_, err := os.Lstat(root)
	never := errors.Is(err, fs.ErrNotExist)
	if never && s.choice == string(rootfs.Directory) {
		return nil
	}
	probe := cfg.Probe
	if probe == nil {
		probe = erofs.Probe
	}
	lacks := probe(filepath.Join(cfg.Root, "tmp"))
	cannot := errors.Is(lacks, errors.ErrUnsupported)
	switch {
	case cannot && s.choice == string(rootfs.EROFS):
		return errdefs.FailedPrecondition("layer driver %q: %w", s.choice, lacks)
	case cannot && never:
		s.log.Info("layers are stored as directories: the kernel cannot mount EROFS images from files", "reason", lacks)
		return nil
	case cannot:
		s.unmountable, err = layer.Inspect(root)
		return err
	case lacks != nil:
		s.log.Warn("EROFS probe failed; existing EROFS layers stay in use, no new ones until the next start", "error", lacks)
	}
	if lacks != nil && never && s.choice != string(rootfs.EROFS) {
		return nil
	}
	images, err := s.openMerger(root, layer.NewEROFS(cfg.Pack, cfg.MergeMemory), cfg.Reserve)
	switch {
	case err != nil:
		return err
	case s.choice == string(rootfs.EROFS), s.choice == driverAuto && lacks == nil:
		s.primary, s.usable = images, []*layer.Store{images, directory}
	default:
		s.usable = append(s.usable, images)
	}
	return nil
}

// holding returns the stores that have all layers of an image, best first. An image stays with the
// driver that pulled it, even if another store has all its layers.
func (s *stores) holding(names []digest.Digest) []*layer.Store {
	var stacked, rest []*layer.Store
	for _, store := range s.usable {
		switch {
		case !hasAll(store, names):
		case store.IsStacked(names):
			stacked = append(stacked, store)
		default:
			rest = append(rest, store)
		}
	}
	return append(stacked, rest...)
}

// storeFor returns the store that has all layers of an image, or else the store for new layers.
func (s *stores) storeFor(names []digest.Digest) *layer.Store {
	if holding := s.holding(names); len(holding) > 0 {
		return holding[0]
	}
	return s.primary
}

// fallback returns the store for an image that is too large for the driver of the given store, or
// nil.
func (s *stores) fallback(store *layer.Store) *layer.Store {
	if s.choice != driverAuto || store.Kind() == rootfs.Directory {
		return nil
	}
	return s.all[0]
}

// has returns an error if a layer of an image is missing.
func (s *stores) has(names []digest.Digest) error {
	store := s.storeFor(names)
	for _, name := range names {
		if !store.Has(name) {
			return fmt.Errorf("layer %s is missing", name)
		}
	}
	return nil
}

// isUnmountable reports whether all layers of an image exist in a form that this kernel cannot
// mount.
func (s *stores) isUnmountable(names []digest.Digest) bool {
	if s.unmountable == nil {
		return false
	}
	for _, name := range names {
		if _, ok := s.unmountable.Layers[name]; !ok {
			return false
		}
	}
	return true
}

// removeUnmountable deletes the layers that this kernel cannot mount, in the background. The caller
// has removed the records of their images, so a crash leaves no record without layers.
func (s *stores) removeUnmountable() {
	if s.unmountable == nil {
		return
	}
	if err := s.all[0].Discard(filepath.Join(s.root, erofsDir), s.unmountable.Usage()); err != nil {
		s.log.Warn("delete EROFS layers that this kernel cannot mount; the next start tries again", "error", err)
		return
	}
	s.unmountable = nil
}

func hasAll(store *layer.Store, names []digest.Digest) bool {
	for _, name := range names {
		if !store.Has(name) {
			return false
		}
	}
	return true
}

// Stack calls layer.Store.Stack of the best store that has the layers.
func (s *stores) Stack(ctx context.Context, names []digest.Digest) ([]rootfs.Layer, error) {
	holding := s.holding(names)
	if len(holding) == 0 {
		return s.primary.Stack(ctx, names) // its error names the missing layer
	}
	var failed error
	for _, store := range holding {
		layers, err := store.Stack(ctx, names)
		if err == nil {
			return layers, nil
		}
		failed = cmp.Or(failed, err)
	}
	return nil, failed
}

// keep returns the files that a container on an image's layers must hold open, or nil.
func (s *stores) keep(names []digest.Digest) []*os.File {
	for _, store := range s.usable {
		if files := store.Keep(names); files != nil {
			return files
		}
	}
	return nil
}

// Usage returns the disk usage of all stores.
func (s *stores) Usage() (sum layer.Usage) {
	for _, store := range s.all {
		sum = sum.Add(store.Usage())
	}
	return sum
}

// bytes returns the disk usage of a layer in all forms.
func (s *stores) bytes(name digest.Digest) (bytes uint64) {
	for _, store := range s.all {
		if info, err := store.Info(name); err == nil {
			bytes += info.Bytes
		}
	}
	return bytes
}

// deleting returns the bytes of layers under deletion.
func (s *stores) deleting() (bytes uint64) {
	for _, store := range s.all {
		bytes += store.Deleting().Bytes
	}
	return bytes
}

// deletions calls layer.Store.Deletions for all stores.
func (s *stores) deletions() (wait func(ctx context.Context)) {
	var waits []func(ctx context.Context)
	for _, store := range s.all {
		waits = append(waits, store.Deletions())
	}
	return func(ctx context.Context) {
		for _, wait := range waits {
			wait(ctx)
		}
	}
}

// list returns all layers in all forms.
func (s *stores) list() (layers []form) {
	for _, store := range s.all {
		for _, name := range store.List() {
			layers = append(layers, form{store.Kind(), name})
		}
	}
	return layers
}

// remove removes a layer in one form.
func (s *stores) remove(layer form) error {
	err := s.of(layer.kind).Remove(layer.name)
	s.lazy.Removed(layer.name)
	return err
}

// merged returns the layer chains with a merged image.
func (s *stores) merged() (chains []form) {
	for _, store := range s.all {
		for _, chain := range store.Merged() {
			chains = append(chains, form{store.Kind(), chain})
		}
	}
	return chains
}

// removeMerged removes the merged image of a layer chain.
func (s *stores) removeMerged(chain form) error { return s.of(chain.kind).RemoveMerged(chain.name) }

// of returns the open store of a kind.
func (s *stores) of(kind rootfs.Kind) *layer.Store {
	return s.all[slices.IndexFunc(s.all, func(store *layer.Store) bool { return store.Kind() == kind })]
}

// DropSetAside calls layer.Store.DropSetAside for all stores.
func (s *stores) DropSetAside(inUse [][]digest.Digest) (failed error) {
	for _, store := range s.all {
		failed = errors.Join(failed, store.DropSetAside(inUse))
	}
	return failed
}

func (s *stores) close() (failed error) {
	for _, store := range s.all {
		failed = errors.Join(failed, store.Close())
	}
	return errors.Join(failed, s.lazy.Close())
}

// spoolDir is the directory of unfinished layers, which the next start empties.
const spoolDir = "tmp"

func (s *stores) spool() string { return filepath.Join(s.root, spoolDir) }
