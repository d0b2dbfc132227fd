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
	"berth/internal/cleanup"
	"berth/internal/errdefs"
	"berth/internal/rootfs"
)

// erofsDir is where layers of the EROFS driver are; those of the directory driver are beside it.
const erofsDir = "erofs"

// LayerRoots are the directories of layer stores below that of an image store: Inspect takes them.
func LayerRoots(root string) []string { return []string{root, filepath.Join(root, erofsDir)} }

// stores are the layers of all kinds. New ones are made by one driver; those that another made stay in use as long as they can
// be mounted. The layers of one image are all of one kind, so a layer may be there in two.
type stores struct {
	log    *slog.Logger
	choice string         // of Config
	made   *layer.Store   // where layers are made
	usable []*layer.Store // those that can be mounted, made first
	all    []*layer.Store // that of directories first
	// unmountable are the layers that another kernel left and that this one cannot mount; nil if there are none.
	// Store.load removes their images, then removeUnmountable the layers.
	unmountable *layer.Survey
	root        string // of Config
}

// driverAuto is a driver of Config: EROFS where it can be mounted.
const driverAuto = "auto"

// openStores opens the stores. Layers are made by the driver that cfg names.
func openStores(cfg Config, log *slog.Logger) (_ *stores, err error) {
	s := &stores{log: log, choice: cfg.Driver, root: cfg.Root}
	if s.choice == "" {
		s.choice = string(rootfs.Directory)
	}
	if !slices.Contains([]string{string(rootfs.Directory), string(rootfs.EROFS), driverAuto}, s.choice) {
		return nil, errdefs.InvalidArgument("layer driver %q is not known", cfg.Driver)
	}
	undo := cleanup.New()
	defer undo.Run(&err)
	undo.Add("close layer stores", s.close)
	directory, err := s.open(cfg.Root, layer.NewDirectory(cfg.Unpack), cfg.Reserve)
	if err != nil {
		return nil, err
	}
	s.made, s.usable = directory, []*layer.Store{directory}
	if err := s.openImages(cfg, directory); err != nil {
		return nil, err
	}
	undo.Release()
	return s, nil
}

// open opens one store.
func (s *stores) open(root string, driver layer.Driver, reserve layer.Reserve) (*layer.Store, error) {
	store, err := layer.Open(root, driver, reserve, s.log)
	if err != nil {
		return nil, err
	}
	s.all = append(s.all, store)
	return store, nil
}

// openImages opens the store of the EROFS driver if it will be used or was used before. A kernel that does not support EROFS layers
// makes the ones on disk unmountable: they are to be removed. If the probe fails for another reason, on a full disk
// for example, the existing layers stay in use, and "auto" makes no new ones until the next start.
func (s *stores) openImages(cfg Config, directory *layer.Store) error {
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
		s.log.Info("layers are kept as directories: EROFS images can't be mounted from files", "reason", lacks)
		return nil
	case cannot:
		s.unmountable, err = layer.Inspect(root)
		return err
	case lacks != nil:
		s.log.Warn("whether layers can be EROFS images is not known", "error", lacks)
	}
	if lacks != nil && never && s.choice != string(rootfs.EROFS) {
		return nil
	}
	images, err := s.open(root, layer.NewEROFS(cfg.Pack, cfg.MergeMemory), cfg.Reserve)
	switch {
	case err != nil:
		return err
	case s.choice == string(rootfs.EROFS), s.choice == driverAuto && lacks == nil:
		s.made, s.usable = images, []*layer.Store{images, directory}
	default:
		s.usable = append(s.usable, images)
	}
	return nil
}

// holding returns the stores that have all the layers of an image, the best first: an image stays with the driver by which it
// was pulled, though the layers of others may make it one of another driver too.
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

// home returns the store that has all the layers of an image, or the one in which the missing ones are to be made.
func (s *stores) home(names []digest.Digest) *layer.Store {
	if holding := s.holding(names); len(holding) > 0 {
		return holding[0]
	}
	return s.made
}

// other returns the store in which to make an image whose layers are too much for the driver of the given one, or nil.
func (s *stores) other(store *layer.Store) *layer.Store {
	if s.choice != driverAuto || store.Kind() == rootfs.Directory {
		return nil
	}
	return s.all[0]
}

// has reports whether an image can be used.
func (s *stores) has(names []digest.Digest) error {
	store := s.home(names)
	for _, name := range names {
		if !store.Has(name) {
			return fmt.Errorf("layer %s is missing", name)
		}
	}
	return nil
}

// isUnmountable reports whether all layers of an image are there, but in a form that this kernel cannot mount.
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

// removeUnmountable deletes the layers that this kernel cannot mount in the background. It is called after the records of their
// images have been removed, so that a crash in between leaves no record without its layers.
func (s *stores) removeUnmountable() {
	if s.unmountable == nil {
		return
	}
	if err := s.all[0].Discard(filepath.Join(s.root, erofsDir)); err != nil {
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

// Stack is layer.Store's, of the first store that can.
func (s *stores) Stack(ctx context.Context, names []digest.Digest) ([]rootfs.Layer, error) {
	holding := s.holding(names)
	if len(holding) == 0 {
		return s.made.Stack(ctx, names) // which tells what is missing
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

// Usage is what all take.
func (s *stores) Usage() (sum layer.Usage) {
	for _, store := range s.all {
		sum = sum.Add(store.Usage())
	}
	return sum
}

// deleting is how many bytes those layers take that are being deleted.
func (s *stores) deleting() (bytes uint64) {
	for _, store := range s.all {
		bytes += store.Deleting().Bytes
	}
	return bytes
}

// list returns all layers, in each form that there is.
func (s *stores) list() (layers []form) {
	for _, store := range s.all {
		for _, name := range store.List() {
			layers = append(layers, form{store.Kind(), name})
		}
	}
	return layers
}

// remove removes a layer of one form.
func (s *stores) remove(layer form) error { return s.of(layer.kind).Remove(layer.name) }

// merged returns the chains of layers that there are images of, see layer.Store.
func (s *stores) merged() (chains []form) {
	for _, store := range s.all {
		for _, chain := range store.Merged() {
			chains = append(chains, form{store.Kind(), chain})
		}
	}
	return chains
}

// removeMerged removes the image of a chain of layers.
func (s *stores) removeMerged(chain form) error { return s.of(chain.kind).RemoveMerged(chain.name) }

// of returns the store of a kind that there is one of.
func (s *stores) of(kind rootfs.Kind) *layer.Store {
	return s.all[slices.IndexFunc(s.all, func(store *layer.Store) bool { return store.Kind() == kind })]
}

// DropSetAside is layer.Store's.
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
	return failed
}
