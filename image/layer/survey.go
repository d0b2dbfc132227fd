package layer

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"

	"berth/checkpoint/record"
	"berth/image/unpack/checksum"
	"berth/internal/diskusage"
	"berth/internal/rootfs"
	"berth/internal/safefs"
)

// Survey lists the content of a Store's directory.
type Survey struct {
	Layers   map[digest.Digest]Stored // by name
	Joins    []Stored
	Damaged  map[string]error // unusable entries in the place of a layer or join, by path
	SetAside []string         // paths of the entries of the set-aside folders
	Making   []string         // paths of layers under construction, or abandoned by a crash
	Trash    []string         // paths of layers under deletion
	Other    []string         // paths of entries that are not a Store's
}

// Stored is a layer or join on disk, according to its record.
type Stored struct {
	Dir    string
	Kind   rootfs.Kind
	Layers []digest.Digest // a layer's name, or the names of a join's layers
	Usage  Usage           // as counted at creation, without files that a join shares with layers
	Sum    checksum.Sum    // as computed at creation; zero for layers of berth up to 0.2.0
	Tree   digest.Digest   // digest of the tree file at creation; empty: unknown
	// Incomplete means that parts of the content are missing. Usage and Sum already describe the
	// complete layer.
	Incomplete bool
}

// Inspect reads the directory of a Store without changing anything. The Store may be open. A
// missing directory is empty. Layers that vanish meanwhile are omitted.
func Inspect(root string) (*Survey, error) {
	s := NewSurvey()
	folders := map[string]func(path string){
		layersDir: s.addLayer,
		joinsDir:  s.addJoin,
		lazyDir:   s.addLazy,
		tmpDir:    func(path string) { s.Making = append(s.Making, path) },
		trashDir:  func(path string) { s.Trash = append(s.Trash, path) },
	}
	for dir, add := range folders {
		entries, err := os.ReadDir(filepath.Join(root, dir))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("inspect layers: %w", err)
		}
		for _, e := range entries {
			add(filepath.Join(root, dir, e.Name()))
		}
	}
	return s, nil
}

// NewSurvey returns the Survey of an empty Store.
func NewSurvey() *Survey {
	return &Survey{Layers: map[digest.Digest]Stored{}, Damaged: map[string]error{}}
}

// Add adds the content of another Store. If both have a layer, the first counts.
func (s *Survey) Add(t *Survey) {
	for name, stored := range t.Layers {
		if _, there := s.Layers[name]; !there {
			s.Layers[name] = stored
		}
	}
	maps.Copy(s.Damaged, t.Damaged)
	s.Joins = append(s.Joins, t.Joins...)
	s.SetAside, s.Making = append(s.SetAside, t.SetAside...), append(s.Making, t.Making...)
	s.Trash, s.Other = append(s.Trash, t.Trash...), append(s.Other, t.Other...)
}

// Usage returns the disk usage of all layers and joins.
func (s *Survey) Usage() (sum Usage) {
	for _, stored := range s.Layers {
		sum = sum.Add(stored.Usage)
	}
	for _, stored := range s.Joins {
		sum = sum.Add(stored.Usage)
	}
	return sum
}

// addSetAside adds the content of path if it is a set-aside folder.
func (s *Survey) addSetAside(path string) bool {
	if filepath.Base(path) != record.SetAsideDir {
		return false
	}
	entries, err := os.ReadDir(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.Damaged[path] = err
	}
	for _, e := range entries {
		s.SetAside = append(s.SetAside, filepath.Join(path, e.Name()))
	}
	return true
}

func (s *Survey) addLayer(path string) {
	var info Info
	if s.addSetAside(path) || isLink(path) || !s.read(path, layerKind, &info) {
		return
	}
	if err := info.check(filepath.Base(path)); err != nil {
		s.Damaged[path] = err
		return
	}
	s.Layers[info.Name] = Stored{Dir: path, Kind: info.Kind, Layers: []digest.Digest{info.Name}, Usage: info.Usage,
		Sum: info.Sum, Tree: info.Tree}
}

// addLazy adds an incomplete layer.
func (s *Survey) addLazy(path string) {
	var info Info
	if s.addSetAside(path) || isLink(path) || !s.read(path, layerKind, &info) {
		return
	}
	if err := info.check(filepath.Base(path)); err != nil {
		s.Damaged[path] = err
		return
	}
	if _, complete := s.Layers[info.Name]; !complete { // it may become complete meanwhile
		s.Layers[info.Name] = Stored{Dir: path, Kind: info.Kind, Layers: []digest.Digest{info.Name}, Usage: info.Usage,
			Sum: info.Sum, Tree: info.Tree, Incomplete: true}
	}
}

func (s *Survey) addJoin(path string) {
	var j join
	if s.addSetAside(path) || !s.read(path, joinKind, &j) {
		return
	}
	if len(j.Layers) == 0 || identity.ChainID(j.Layers) != j.ChainID || j.ChainID.Encoded() != filepath.Base(path) {
		s.Damaged[path] = fmt.Errorf("record belongs to %q", j.ChainID)
		return
	}
	s.Joins = append(s.Joins, Stored{Dir: path, Kind: j.Kind, Layers: j.Layers, Usage: j.Usage})
}

// read decodes the record in a directory and reports whether it is usable.
func (s *Survey) read(path, kind string, value any) bool {
	err := readRecord(path, kind, value)
	if err == nil {
		return true
	}
	if _, gone := os.Lstat(path); !errors.Is(gone, fs.ErrNotExist) {
		s.Damaged[path] = err
	}
	return false
}

// SumNow computes the checksum of a layer again. It reads all of it.
func (s Stored) SumNow(ctx context.Context) (checksum.Sum, error) {
	if s.Kind == rootfs.EROFS {
		return s.sumPacked(ctx)
	}
	root, err := safefs.OpenRoot(filepath.Join(s.Dir, treeDir))
	if err != nil {
		return checksum.Sum{}, err
	}
	defer root.Close()
	found, err := checksum.OfDirectory(ctx, root, func() {})
	return found.Sum, err
}

func (s Stored) sumPacked(ctx context.Context) (checksum.Sum, error) {
	root, err := filesOf(s.Dir).Read()
	if err != nil {
		return checksum.Sum{}, err
	}
	data, err := os.Open(filepath.Join(s.Dir, dataFile))
	if err != nil {
		return checksum.Sum{}, err
	}
	defer data.Close() // read only
	found, err := checksum.OfPacked(ctx, root, data, func() {})
	return found.Sum, err
}

// TreeNow computes the digest of the tree file again. It does not read a file that is longer than
// the layer was.
func (s Stored) TreeNow(ctx context.Context) (digest.Digest, error) {
	return new(EROFS).TreeDigest(ctx, s.Dir, int64(s.Usage.Bytes))
}

// Count counts the disk usage of a layer again.
func (s Stored) Count(ctx context.Context) (Usage, error) {
	if s.Kind == rootfs.EROFS {
		return s.countPacked()
	}
	root, err := safefs.OpenRoot(filepath.Join(s.Dir, treeDir))
	if err != nil {
		return Usage{}, err
	}
	defer root.Close()
	block, err := diskusage.BlockSize(root)
	if err != nil {
		return Usage{}, err
	}
	sum, err := diskusage.Nominal(ctx, root, block)
	if err != nil {
		return Usage{}, err
	}
	used, err := s.count(tarFile)
	return sum.Add(used), err
}

func (s Stored) countPacked() (sum Usage, err error) {
	for _, name := range []string{dataFile, treeFile, tarFile} {
		u, err := s.count(name)
		if err != nil {
			return Usage{}, err
		}
		sum = sum.Add(u)
	}
	return sum, nil
}

// count counts a file of the layer. Layers of berth up to 0.2.0 have no record of their tar.
func (s Stored) count(name string) (Usage, error) {
	f, err := os.Open(filepath.Join(s.Dir, name))
	if name == tarFile && errors.Is(err, fs.ErrNotExist) {
		return Usage{}, nil
	}
	if err != nil {
		return Usage{}, err
	}
	u, err := usageOf(f)
	return u, errors.Join(err, f.Close())
}
