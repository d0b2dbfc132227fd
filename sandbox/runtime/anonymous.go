package runtime

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"berth/checkpoint/process/dump"
	"berth/image/unpack"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/rootfs"
	"berth/internal/safefs"
	"berth/internal/task"
	"berth/internal/trace"
	"berth/internal/userns"
	"berth/oci"
	"berth/sandbox/state"
)

// MakeVolumes makes the directories of a container's anonymous volumes and returns the volumes.
// Each directory has the content, owner and mode of the image at its path. root is the container's
// root filesystem, whose writable layer is empty. For a restored container, Restores.FillLayer
// makes the directories from its checkpoint.
//
// The image is hostile. The daemon reads the image through a separate mount, with the image as the
// root of every path. berth-unpack writes the files.
func (k Launcher) MakeVolumes(
	ctx context.Context, c *state.Container, root rootfs.Spec,
) ([]oci.AnonymousVolume, error) {
	if k.IgnoreVolumes || len(c.Image.Config.Volumes) == 0 {
		return nil, nil
	}
	defer trace.Begin(ctx, "volumes").End()
	idMap := root.IDMap
	root.Upper, root.Work, root.IDMap = "", "", nil
	image, err := root.Mount()
	if err != nil {
		return nil, fmt.Errorf("mount image %s: %w", c.Image.ID, err)
	}
	defer image.Close() // unmounts
	volumes, ignored, err := oci.PlaceVolumes(c.Image.Config.Volumes, c.Config.GetMounts(), resolver(image))
	if err != nil {
		return nil, fmt.Errorf("volumes of image %s: %w", c.Image.ID, err)
	}
	if len(ignored) > 0 {
		k.Log.Warn("volumes of an image are ignored, because no directory of a container can be there",
			"container", c.ID, "image", c.Image.ID, "paths", errdefs.Clip(strings.Join(ignored, " ")))
	}
	if len(volumes) == 0 || c.Restore != nil {
		return volumes, nil
	}
	dir := k.Node.Volumes(c.ID)
	if err := rootfs.MakeDir(dir, 0o700, 0, 0); err != nil {
		return nil, fmt.Errorf("make volumes of container %s: %w", c.ID, err)
	}
	for _, v := range volumes {
		if err := k.makeVolume(ctx, image, v.Path, filepath.Join(dir, v.Name), idMap); err != nil {
			return nil, fmt.Errorf("make volume %s of container %s: %w", v.Path, c.ID, err)
		}
	}
	return volumes, k.SELinux.LabelOwn(dir, c.Labels)
}

// maxSteps limits the names on the paths of an image's volumes. Symlinks, at most forty in a path,
// can make a path tens of thousands of names long.
const maxSteps = 1 << 16

// resolver returns a function that resolves paths with the image as the root.
func resolver(image *os.File) func(string) (string, error) {
	steps := maxSteps
	m := safefs.Maker{Step: func(cost int) error {
		if steps -= cost; steps < 0 {
			return errdefs.InvalidArgument("the paths lead through too many symlinks and directories")
		}
		return nil
	}}
	return func(path string) (string, error) {
		resolved, err := m.Resolve(image, path)
		return "/" + resolved, err
	}
}

// makeVolume makes the directory dir of a volume from the directory at path of the image, if there
// is one. Most volumes are empty in the image.
func (k Launcher) makeVolume(ctx context.Context, image *os.File, path, dir string, idMap *rootfs.IDMap) error {
	source, err := safefs.Open(image, path, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		uid, gid := idMap.Owner(0, 0)
		return rootfs.MakeDir(dir, 0o755, uid, gid)
	}
	if err != nil {
		return err
	}
	defer source.Close() // it was only read
	empty, err := isEmpty(source)
	if err != nil {
		return err
	}
	if empty {
		var st unix.Stat_t
		if err := unix.Fstat(int(source.Fd()), &st); err != nil {
			return os.NewSyscallError("fstat", err)
		}
		uid, gid := idMap.Owner(st.Uid, st.Gid)
		return rootfs.MakeDir(dir, st.Mode&unpack.ModeBits, uid, gid)
	}
	if err := rootfs.MakeDir(dir, 0o700, 0, 0); err != nil {
		return err
	}
	var mappings *userns.Mappings
	if idMap != nil {
		mappings = &idMap.Mappings
	}
	return k.copyVolume(ctx, image, path, dir, mappings)
}

// isEmpty reports whether a directory of an image has neither files nor extended attributes to
// copy.
func isEmpty(f *os.File) (bool, error) {
	if _, err := f.Readdirnames(1); !errors.Is(err, io.EOF) {
		return false, err
	}
	dir, err := safefs.OpenDir(f, "")
	if err != nil {
		return false, err
	}
	defer dir.Close() // it was only read
	attributes, err := dir.Listxattr("")
	if errors.Is(err, unix.EOPNOTSUPP) {
		return true, nil
	}
	return !slices.ContainsFunc(attributes, unpack.KeepXattr), err
}

// copyVolume copies the directory at path of the image, with its attributes, to an empty directory.
// A read of an incomplete layer may hang. When ctx ends, the copy does not wait for it.
func (k Launcher) copyVolume(ctx context.Context, image *os.File, path, to string, m *userns.Mappings) error {
	tree, err := os.Open(to)
	if err != nil {
		return err
	}
	defer tree.Close() // a volume need not survive a crash
	read, write := io.Pipe()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		return k.Tasks.DetachStep(ctx, task.Timeout, "read of a volume", "image directory "+path, func() error {
			err := packVolume(ctx, image, path, m, write)
			if errors.Is(err, io.ErrClosedPipe) {
				return nil // Unpack needs no more, and knows why
			}
			return errors.Join(err, write.CloseWithError(err))
		})
	})
	group.Go(func() error {
		failpoint.Reach("volume.copy")
		_, err := k.Unpacker.Unpack(ctx, tree, volumeTar{read}, unpack.Job{Algorithm: digest.SHA256})
		failpoint.Reach("volume.copied")
		return err
	})
	return group.Wait()
}

// packVolume writes a directory of the image to a tar.
func packVolume(ctx context.Context, image *os.File, path string, m *userns.Mappings, to io.Writer) error {
	from, err := safefs.Open(image, path, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer from.Close() // it was only read
	return dump.Volume(ctx, from, m, to)
}

// volumeTar implements unpack.Stopper: reading the image may take long.
type volumeTar struct{ *io.PipeReader }

// Stop makes Read and the writer's Write fail.
func (t volumeTar) Stop() { _ = t.Close() } // it never fails
