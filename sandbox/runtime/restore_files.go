package runtime

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/opencontainers/go-digest"

	"berth/checkpoint/process"
	"berth/checkpoint/process/archive"
	"berth/image/unpack"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/rootfs"
	"berth/internal/safefs"
	"berth/sandbox/state"
)

// FillLayer writes the files of a container's checkpoint into its empty writable layer and its
// anonymous volumes.
func (k Restores) FillLayer(ctx context.Context, c *state.Container, root rootfs.Spec) error {
	dir := k.Dirs.CheckpointOf(c.PodID, c.Restore)
	hidden, err := whiteouts(dir)
	if err != nil {
		return err
	}
	upper, err := os.Open(root.Upper)
	if err != nil {
		return fmt.Errorf("open writable layer of %s: %w", c.ID, err)
	}
	defer upper.Close() // the layer need not survive a crash
	result, err := k.unpack(ctx, upper, hidden, filepath.Join(dir, archive.RootfsDiffFile))
	if err != nil {
		return fmt.Errorf("fill writable layer of %s: %w", c.ID, err)
	}
	if len(result.Links) > 0 || result.Opaque {
		return errdefs.FailedPrecondition("%s of the checkpoint depends on the image in a way that cannot be restored",
			archive.RootfsDiffFile)
	}
	if err := unpack.MarkOpaque(upper, result.Opaques); err != nil {
		return fmt.Errorf("fill writable layer of %s: %w", c.ID, err)
	}
	if len(c.Anonymous) == 0 {
		return nil
	}
	return k.fillVolumes(ctx, c.ID, filepath.Join(dir, archive.VolumesFile))
}

// fillVolumes makes the directories of a container's anonymous volumes from the tar at path.
func (k Restores) fillVolumes(ctx context.Context, id, path string) error {
	dir := k.Dirs.Volumes(id)
	if err := rootfs.MakeDir(dir, 0o700, 0, 0); err != nil {
		return fmt.Errorf("make volumes of %s: %w", id, err)
	}
	volumes, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("open volumes of %s: %w", id, err)
	}
	defer volumes.Close() // volumes need not survive a crash
	none, err := newWhiteoutReader(nil)
	if err != nil {
		return err
	}
	if _, err := k.unpack(ctx, volumes, none, path); err != nil {
		return fmt.Errorf("fill volumes of %s: %w", id, err)
	}
	return nil
}

// FillShm writes the checkpointed content of /dev/shm into the pod's /dev/shm. name is the
// container's directory with this content, or "." for the pod's.
func (k Restores) FillShm(ctx context.Context, podID, name string) error {
	shm, err := os.Open(k.Dirs.Shm(podID))
	if err != nil {
		return fmt.Errorf("open /dev/shm of pod %s: %w", podID, err)
	}
	defer shm.Close() // a tmpfs loses nothing
	content := filepath.Join(k.Dirs.Checkpoint(podID), name, archive.ShmFile)
	none, err := newWhiteoutReader(nil)
	if err != nil {
		return err
	}
	if _, err := k.unpack(ctx, shm, none, content); err != nil {
		return fmt.Errorf("fill /dev/shm of pod %s: %w", podID, err)
	}
	return nil
}

// unpack unpacks a tar of a checkpoint into an empty directory, after the whiteouts. A missing tar
// is empty.
func (k Restores) unpack(
	ctx context.Context, tree *os.File, hidden *whiteoutReader, path string,
) (unpack.Result, error) {
	var rest io.Reader = bytes.NewReader(make([]byte, 1024)) // the end of an archive
	file, err := os.Open(path)
	switch {
	case err == nil:
		defer file.Close() // it was only read
		rest = file
	case !errors.Is(err, fs.ErrNotExist):
		return unpack.Result{}, err
	case len(hidden.names) == 0:
		return unpack.Result{}, nil
	}
	failpoint.Reach("restore.unpack")
	result, err := k.Unpacker.Unpack(ctx, tree, io.MultiReader(hidden, rest), unpack.Job{Algorithm: digest.SHA256})
	failpoint.Reach("restore.unpacked")
	return result, err
}

// Names of whiteouts in the tar of a layer (image-spec, layer.md).
const (
	whiteout       = ".wh."
	opaqueWhiteout = ".wh..wh..opq"
)

// maxDeleted limits the deleted files of a checkpoint.
const maxDeleted = 1 << 20

// whiteouts returns the deleted files of a checkpoint as entries of a tar without its end, after a
// comment. A deleted file of the name .wh..wh..opq hides all files of the image in its directory.
func whiteouts(dir string) (*whiteoutReader, error) {
	var names []string
	err := process.ReadJSON(dir, archive.DeletedFilesFile, &names)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if len(names) > maxDeleted {
		return nil, errdefs.InvalidArgument("%s of the checkpoint has more than %d files", archive.DeletedFilesFile, maxDeleted)
	}
	for i, file := range names {
		parent, base := safefs.Split(safefs.Clean(file))
		if base == "" {
			return nil, errdefs.InvalidArgument("%s of the checkpoint has the root directory", archive.DeletedFilesFile)
		}
		if base != opaqueWhiteout {
			base = whiteout + base
		}
		names[i] = safefs.Join(parent, base)
	}
	return newWhiteoutReader(names)
}

// newWhiteoutReader returns the entries with these names after a comment. The entries after the
// comment must never come first. An unpacker detects a compression by the first bytes, and the
// first name in a tar can begin like a gzip file.
func newWhiteoutReader(names []string) (*whiteoutReader, error) {
	r := &whiteoutReader{names: names}
	r.tar = tar.NewWriter(&r.buffer)
	comment := &tar.Header{Typeflag: tar.TypeXGlobalHeader, PAXRecords: map[string]string{"comment": "berth"}}
	// Flush pads the comment. Otherwise the next entry would do that, but there may be none.
	if err := errors.Join(r.tar.WriteHeader(comment), r.tar.Flush()); err != nil {
		return nil, fmt.Errorf("begin a tar of whiteouts: %w", err)
	}
	return r, nil
}

// whiteoutReader makes the entries of whiteouts while it is read.
type whiteoutReader struct {
	names  []string // of entries that have not been made
	buffer bytes.Buffer
	tar    *tar.Writer
}

func (r *whiteoutReader) Read(p []byte) (int, error) {
	for r.buffer.Len() == 0 {
		if len(r.names) == 0 {
			return 0, io.EOF
		}
		header := &tar.Header{Typeflag: tar.TypeReg, Name: r.names[0], Mode: 0o600}
		r.names = r.names[1:]
		if err := r.tar.WriteHeader(header); err != nil {
			return 0, errdefs.InvalidArgument("%s of the checkpoint: %w", archive.DeletedFilesFile, err)
		}
	}
	return r.buffer.Read(p)
}
