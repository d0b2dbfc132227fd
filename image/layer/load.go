package layer

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"

	"berth/checkpoint/record"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/rootfs"
)

// Folders of a Store.
const (
	layersDir = "layers"
	joinsDir  = "joins"
	tmpDir    = "tmp"
	trashDir  = "trash"
)

// load reads the records, moves unusable layers to the set-aside folders and discards layers under
// construction.
func (s *Store) load() error {
	if err := s.discardAll(tmpDir); err != nil {
		return err
	}
	if err := s.dropLinks(); err != nil {
		return err
	}
	if err := s.loadDir(layersDir, s.loadLayer); err != nil {
		return err
	}
	if err := s.loadLazy(); err != nil {
		return err
	}
	return s.loadDir(joinsDir, s.loadJoin)
}

func (s *Store) loadLayer(path string) error {
	var info Info
	if err := readRecord(path, layerKind, &info); err != nil {
		return err
	}
	if err := info.check(filepath.Base(path)); err != nil {
		return err
	}
	if err := s.checkKind(info.Kind); err != nil {
		return err
	}
	s.layers.Add(info.Name, &info)
	return nil
}

func (s *Store) loadJoin(path string) error {
	var j join
	if err := readRecord(path, joinKind, &j); err != nil {
		return err
	}
	if len(j.Layers) == 0 || identity.ChainID(j.Layers) != j.ChainID || j.ChainID.Encoded() != filepath.Base(path) {
		return fmt.Errorf("record belongs to %q", j.ChainID)
	}
	for _, name := range j.Layers {
		if !s.Has(name) {
			return fmt.Errorf("layer %s is missing", name)
		}
	}
	if err := s.checkKind(j.Kind); err != nil {
		return err
	}
	j.onDisk = true
	s.joins.Add(j.ChainID, &j)
	return nil
}

func (s *Store) checkKind(kind rootfs.Kind) error {
	if kind != s.driver.Kind() {
		return fmt.Errorf("kind is %q, the driver's is %q", kind, s.driver.Kind())
	}
	return nil
}

// loadDir calls load for each entry of a folder and moves unusable entries to the set-aside folder.
// It fails if an error leaves open whether the entry is unusable.
func (s *Store) loadDir(folder string, load func(path string) error) error {
	entries, err := os.ReadDir(filepath.Join(s.root, folder))
	if err != nil {
		return err
	}
	for _, e := range entries {
		path := filepath.Join(s.root, folder, e.Name())
		if e.Name() == record.SetAsideDir {
			s.aside.Store(true)
			continue
		}
		err := load(path)
		switch {
		case err == nil:
		case mayBeGood(err):
			return fmt.Errorf("read the record in %s: %w", path, err)
		default:
			if err := s.setAside(path, err); err != nil && !errdefs.IsUnwritable(err) {
				return err
			}
		}
	}
	return nil
}

// setAside moves an unusable layer to the set-aside folder. It does not delete the layer, because
// containers of an earlier daemon may run on it, see DropSetAside.
func (s *Store) setAside(path string, reason error) error {
	moved, err := record.SetAside(path)
	s.log.Error("unusable layer set aside; its images must be pulled again", "path", moved,
		"error", errors.Join(reason, err))
	if err != nil {
		return fmt.Errorf("set %s aside: %w", path, err)
	}
	s.aside.Store(true)
	return nil
}

// DropSetAside deletes the layers in the set-aside folders, except for the given chains of layers
// that containers may run on. It is cheap if the folders are empty.
func (s *Store) DropSetAside(inUse [][]digest.Digest) error {
	if !s.aside.Swap(false) {
		return nil
	}
	needed := map[string]bool{}
	for _, chain := range inUse {
		for i, name := range chain {
			needed[name.Encoded()] = true
			needed[identity.ChainID(chain[:i+1]).Encoded()] = true
		}
	}
	var failed []error
	for _, folder := range []string{layersDir, joinsDir, lazyDir} {
		left, err := s.dropSetAside(filepath.Join(s.root, folder, record.SetAsideDir), needed)
		if left || err != nil {
			s.aside.Store(true) // try again next time
		}
		if err != nil {
			failed = append(failed, fmt.Errorf("delete layers set aside: %w", err))
		}
	}
	return errors.Join(failed...)
}

// dropSetAside empties one folder and reports whether entries remain. It continues after a failed
// deletion.
func (s *Store) dropSetAside(folder string, needed map[string]bool) (left bool, err error) {
	entries, err := os.ReadDir(folder)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return true, err
	}
	var failed []error
	for _, e := range entries {
		name, _, _ := strings.Cut(e.Name(), ".")
		if needed[name] {
			left = true
			continue
		}
		if err := s.trash.Take(filepath.Join(folder, e.Name()), Usage{}); err != nil {
			failed = append(failed, err)
		}
	}
	if left || len(failed) > 0 {
		return true, errors.Join(failed...)
	}
	failpoint.Reach("layer.remove-aside")
	err = os.Remove(folder)
	failpoint.Reach("layer.aside-removed")
	if errors.Is(err, fs.ErrExist) { // not empty: setAside ran meanwhile
		return true, nil
	}
	return false, err
}

// discardAll moves the content of a folder to the trash. On an unwritable filesystem the content
// stays until the next start, and Open succeeds.
func (s *Store) discardAll(folder string) error {
	entries, err := os.ReadDir(filepath.Join(s.root, folder))
	if err != nil {
		return err
	}
	for _, e := range entries {
		path := filepath.Join(s.root, folder, e.Name())
		err := s.trash.Take(path, Usage{})
		if errdefs.IsUnwritable(err) {
			s.log.Warn("leftovers of a pull stay until the next start", "path", path, "error", err)
			continue
		}
		if err != nil {
			return err
		}
	}
	return nil
}
