package layer

import (
	"os"
	"path/filepath"

	"github.com/opencontainers/go-digest"

	"berth/internal/errdefs"
)

// Packed describes the files of a packed layer, from which the index of its blob is made.
type Packed struct {
	Info
	TreePath   string // the tree file
	RecordPath string // the record of the tar
	DataSize   int64  // of the data file
}

// Packed returns the files of a layer. The layer may be removed meanwhile. Errors: NotFound;
// FailedPrecondition if the driver is no Merger, or if the layer's tar cannot be restored.
func (s *Store) Packed(name digest.Digest) (Packed, error) {
	info, err := s.Info(name)
	if err != nil {
		return Packed{}, err
	}
	if s.merger == nil || info.Record == 0 {
		return Packed{}, errdefs.FailedPrecondition("layer %s has no record of its tar, or is a directory", name)
	}
	dir := s.layerDir(name)
	data, err := os.Lstat(filepath.Join(dir, dataFile))
	if err != nil {
		return Packed{}, err
	}
	return Packed{Info: info, TreePath: filepath.Join(dir, treeFile), RecordPath: filepath.Join(dir, tarFile),
		DataSize: data.Size()}, nil
}
