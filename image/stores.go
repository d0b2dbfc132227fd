package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/opencontainers/go-digest"

	"berth/image/erofs"
	"berth/image/layer"
	"berth/image/unpack"
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
	made   *layer.Store   // where layers are made
	usable []*layer.Store // those that can be mounted, made first
	all    []*layer.Store
}

// Drivers of Config.
const (
	driverAuto = "auto" // EROFS where it can be mounted
)

// openStores opens the stores. Layers are made by the driver of that name.
func openStores(cfg Config, log *slog.Logger) (_ *stores, err error) {
	s := &stores{}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	directory, err := layer.Open(cfg.Root, layer.NewDirectory(cfg.Unpack), cfg.Reserve, log)
	if err != nil {
		return nil, err
	}
	s.made, s.usable, s.all = directory, []*layer.Store{directory}, []*layer.Store{directory}
	choice := cfg.Driver
	switch rootfs.Kind(choice) {
	case "":
		choice = string(rootfs.Directory)
	case rootfs.Directory, rootfs.EROFS, driverAuto:
	default:
		return nil, errdefs.InvalidArgument("layer driver %q is not known", choice)
	}
	root := filepath.Join(cfg.Root, erofsDir)
	if choice == string(rootfs.Directory) {
		if _, err := os.Lstat(root); errors.Is(err, fs.ErrNotExist) {
			return s, nil // it never was another
		}
	}
	lacks := erofs.Probe(filepath.Join(cfg.Root, "tmp"))
	if lacks != nil && choice == string(rootfs.EROFS) {
		return nil, errdefs.FailedPrecondition("layer driver %q: %w", choice, lacks)
	}
	if lacks != nil && choice == driverAuto {
		log.Info("layers are kept as directories: EROFS images can't be mounted from files", "reason", lacks)
		if _, err := os.Lstat(root); errors.Is(err, fs.ErrNotExist) {
			return s, nil
		}
	}
	images, err := layer.Open(root, layer.NewEROFS(cfg.Pack), cfg.Reserve, log)
	if err != nil {
		return nil, err
	}
	s.all = append(s.all, images)
	switch {
	case lacks != nil: // its images are pulled again, and its layers collected
		log.Warn("layers of another driver can't be mounted", "driver", rootfs.EROFS, "error", lacks)
	case choice == string(rootfs.Directory):
		s.usable = append(s.usable, images)
	default:
		s.made, s.usable = images, []*layer.Store{images, directory}
	}
	return s, nil
}

// holding returns the store that has all the layers of an image, or the one in which the missing ones are to be made.
func (s *stores) holding(names []digest.Digest) *layer.Store {
	for _, store := range s.usable {
		if hasAll(store, names) {
			return store
		}
	}
	return s.made
}

// has reports whether an image can be used.
func (s *stores) has(names []digest.Digest) error {
	store := s.holding(names)
	for _, name := range names {
		if !store.Has(name) {
			return fmt.Errorf("layer %s is missing", name)
		}
	}
	return nil
}

func hasAll(store *layer.Store, names []digest.Digest) bool {
	for _, name := range names {
		if !store.Has(name) {
			return false
		}
	}
	return true
}

// Stack is layer.Store's.
func (s *stores) Stack(ctx context.Context, names []digest.Digest) ([]rootfs.Layer, error) {
	return s.holding(names).Stack(ctx, names)
}

// Create makes a layer.
func (s *stores) Create(ctx context.Context, from layer.Source, blob io.Reader, limits unpack.Limits) error {
	return s.made.Create(ctx, from, blob, limits)
}

// HasRoom is layer.Store's.
func (s *stores) HasRoom(bytes uint64) error { return s.made.HasRoom(bytes) }

// Usage is what all take.
func (s *stores) Usage() (sum layer.Usage) {
	for _, store := range s.all {
		sum = sum.Add(store.Usage())
	}
	return sum
}

// List returns the names of all layers, those that can't be mounted included.
func (s *stores) List() (names []digest.Digest) {
	seen := map[digest.Digest]bool{}
	for _, store := range s.all {
		for _, name := range store.List() {
			if !seen[name] {
				seen[name] = true
				names = append(names, name)
			}
		}
	}
	return names
}

// Remove removes a layer of every kind.
func (s *stores) Remove(name digest.Digest) (failed error) {
	for _, store := range s.all {
		failed = errors.Join(failed, store.Remove(name))
	}
	return failed
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
