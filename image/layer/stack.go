package layer

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	"golang.org/x/sys/unix"

	"berth/image/unpack"
	"berth/internal/errdefs"
	"berth/internal/rootfs"
)

// Stack returns the layers to mount for a chain of layers, named lowest first. It creates the
// missing joins or the merged image of the chain. A second call is cheap. A pull calls Stack when
// all layers exist, so that a broken image fails its pull; each container calls it again.
//
// The error is NotFound for a missing layer. It is InvalidArgument if a hard link has no target in
// the layers below, or if overlayfs cannot mount so many layers. It is FailedPrecondition if
// stacking takes too much effort.
func (s *Store) Stack(ctx context.Context, names []digest.Digest) ([]rootfs.Layer, error) {
	if len(names) == 0 {
		return nil, errdefs.InvalidArgument("image has no layers")
	}
	if len(names) > rootfs.MaxLayers {
		return nil, errdefs.InvalidArgument("image has %d layers, more than the %d that can be mounted",
			len(names), rootfs.MaxLayers)
	}
	if s.merger != nil {
		return s.merged(ctx, names)
	}
	dirs, err := s.stack(ctx, names)
	if err != nil {
		return nil, err
	}
	if len(dirs) > rootfs.MaxLayers {
		return nil, errdefs.InvalidArgument("image has %d layers and needs %d on disk, more than the %d that can be mounted", len(names), len(dirs), rootfs.MaxLayers)
	}
	layers := make([]rootfs.Layer, 0, len(dirs))
	for _, dir := range dirs {
		layers = append(layers, s.joiner.Layer(dir))
	}
	return layers, nil
}

// stack returns the directories of the layers and joins to mount.
func (s *Store) stack(ctx context.Context, names []digest.Digest) ([]string, error) {
	var dirs []string
	var top Info
	effort := newEffort(ctx, s.effort)
	for i, name := range names {
		var err error
		if top, err = s.Info(name); err != nil {
			return nil, err
		}
		below := dirs
		if top.Opaque {
			dirs = nil // overlayfs ignores the opaque mark on the root of a layer
		}
		dirs = append(slices.Clip(dirs), s.layerDir(name))
		if !top.mayNeedJoin(i == 0) {
			continue
		}
		j, err := s.join(ctx, effort, names[:i+1], below)
		if err != nil {
			return nil, fmt.Errorf("layer %s: %w", name, err)
		}
		if !j.Empty {
			dirs = append(dirs, s.joinDir(j.ChainID))
		}
	}
	if len(dirs) == 1 && top.Whiteouts > 0 {
		dirs = []string{s.emptyDir(), dirs[0]} // only overlayfs hides whiteouts, and it needs two layers
	}
	return dirs, nil
}

// join returns the join for a chain of layers, and creates it if needed. below are the directories
// below the topmost layer.
func (s *Store) join(ctx context.Context, effort *Effort, names []digest.Digest, below []string) (*join, error) {
	chainID := identity.ChainID(names)
	if j := s.joins.Get(chainID); j != nil {
		return j, nil
	}
	owned, err := s.joins.Acquire(ctx, chainID)
	if err != nil {
		return nil, fmt.Errorf("wait for concurrent creation of join %s: %w", chainID, err)
	}
	defer owned.Release()
	if j := owned.Value(); j != nil {
		return j, nil
	}
	j := &join{ChainID: chainID, Layers: slices.Clone(names), Kind: s.driver.Kind(), onDisk: true}
	had := effort.left.Load()
	err = s.publish(s.joinDir(chainID), joinKind, func(dir string) (any, error) {
		top, err := s.part(names[len(names)-1])
		if err != nil {
			return nil, err
		}
		usage, needed, err := s.joiner.Join(effort, dir, top, below)
		if err == nil && !needed {
			err = errNothing
		}
		j.Usage = usage
		return j, err
	})
	switch {
	case errors.Is(err, errNothing):
		j.Empty, j.Usage = true, Usage{}
		j.onDisk = had-effort.left.Load() > longEffort && s.recordEmpty(j)
	case err != nil:
		return nil, coded(fmt.Errorf("join with the layers below: %w", err))
	}
	owned.Set(j)
	return j, nil
}

// recordEmpty records that a chain needs no join, and reports whether the record was written. If
// not, the next daemon repeats the check.
func (s *Store) recordEmpty(j *join) bool {
	err := s.publish(s.joinDir(j.ChainID), joinKind, func(string) (any, error) { return j, nil })
	if err != nil {
		s.log.Warn("record that layers need no join", "chain", j.ChainID, "error", err)
	}
	return err == nil
}

// part reads the record of a layer for Join.
func (s *Store) part(name digest.Digest) (Part, error) {
	dir := s.layerDir(name)
	var r layerRecord
	if err := readRecord(dir, layerKind, &r); err != nil {
		return Part{}, fmt.Errorf("read record of layer %s: %w", name, err)
	}
	return Part{dir, unpack.Contents{Summary: r.Summary, Links: r.Links, Implied: r.Implied}}, nil
}

// removeJoins removes all joins of the layer name.
func (s *Store) removeJoins(name digest.Digest) error {
	for _, j := range s.joins.All() {
		if !slices.Contains(j.Layers, name) {
			continue
		}
		if err := s.removeJoin(j.ChainID); err != nil {
			return fmt.Errorf("remove join %s: %w", j.ChainID, err)
		}
	}
	return nil
}

// merged returns the mounted merged image of a chain of layers.
func (s *Store) merged(ctx context.Context, names []digest.Digest) ([]rootfs.Layer, error) {
	chainID := identity.ChainID(names)
	j := s.joins.Get(chainID)
	if j == nil || j.mount.Load() == nil {
		var err error
		if j, err = s.mountMerged(ctx, chainID, names); err != nil {
			return nil, err
		}
	}
	l := s.imageOf(j)
	l.Mount = j.mount.Load()
	return []rootfs.Layer{l}, nil
}

// imageOf returns the merged image of a chain, without its mount.
func (s *Store) imageOf(j *join) rootfs.Layer {
	var data []string
	for _, name := range j.Data {
		data = append(data, s.layerDir(name))
	}
	return s.merger.Image(s.joinDir(j.ChainID), data)
}

// mountMerged mounts the merged image of a chain, and creates the image if needed. The mount is
// detached. The Store closes its mount when it removes the image or is closed. Containers keep
// their own.
func (s *Store) mountMerged(ctx context.Context, chainID digest.Digest, names []digest.Digest) (*join, error) {
	owned, err := s.joins.Acquire(ctx, chainID)
	if err != nil {
		return nil, fmt.Errorf("wait for concurrent creation of image %s: %w", chainID, err)
	}
	defer owned.Release()
	j := owned.Value()
	found := j != nil
	if !found {
		if j, err = s.merge(ctx, owned, names); err != nil {
			return nil, err
		}
	}
	if j.mount.Load() != nil {
		return j, nil
	}
	mount, err := s.imageOf(j).Open()
	if err != nil && found && isDamaged(err) {
		s.log.Error("merged image is damaged, creating it again", "chain", chainID, "error", err)
		if j, err = s.merge(ctx, owned, names); err != nil {
			return nil, err
		}
		mount, err = s.imageOf(j).Open()
	}
	if err != nil {
		return nil, err
	}
	j.mount.Store(mount)
	return j, nil
}

// isDamaged reports whether a mount failed because of the image, and not for lack of resources.
func isDamaged(err error) bool {
	for _, errno := range []error{unix.EUCLEAN, unix.EBADMSG, unix.EINVAL, unix.EOPNOTSUPP, unix.EIO, unix.ENOENT} {
		if errors.Is(err, errno) {
			return true
		}
	}
	return false
}

// merge creates the merged image of a chain and replaces an existing one. It leaves the reserve
// free.
func (s *Store) merge(ctx context.Context, chain *owned[join], names []digest.Digest) (*join, error) {
	j := &join{ChainID: chain.Key(), Layers: slices.Clone(names), Kind: s.merger.Kind(), onDisk: true}
	dirs := make([]string, 0, len(names))
	for _, name := range names {
		if _, err := s.Info(name); err != nil {
			return nil, err
		}
		dirs = append(dirs, s.layerDir(name))
	}
	guarded, stop, err := s.guard(ctx)
	if err != nil {
		return nil, fmt.Errorf("merge layers: %w", err)
	}
	defer stop()
	err = s.publish(s.joinDir(chain.Key()), joinKind, func(dir string) (any, error) {
		usage, used, err := s.merger.Merge(newEffort(guarded, s.effort), dir, dirs)
		j.Usage = usage
		for _, i := range used {
			j.Data = append(j.Data, names[i])
		}
		return j, err
	})
	if err != nil {
		return nil, coded(fmt.Errorf("merge layers: %w", err))
	}
	chain.Set(j)
	return j, nil
}

// IsStacked reports whether Stack of a chain is cheap, because it need not create a merged image.
func (s *Store) IsStacked(names []digest.Digest) bool {
	if s.merger != nil {
		return s.joins.Get(identity.ChainID(names)) != nil
	}
	return true // missing joins are cheap
}

// Merged returns the IDs of the chains with a merged image. The caller removes the images that
// nothing needs.
func (s *Store) Merged() (chains []digest.Digest) {
	if s.merger != nil {
		for _, j := range s.joins.All() {
			chains = append(chains, j.ChainID)
		}
	}
	return chains
}

// RemoveMerged removes the merged image of a chain, but not the layers. The caller ensures that
// nothing uses it. A missing image is no error.
func (s *Store) RemoveMerged(chainID digest.Digest) error {
	if s.merger == nil {
		return nil // the joins of a chain serve longer chains too
	}
	if err := s.removeJoin(chainID); err != nil {
		return fmt.Errorf("remove image of chain %s: %w", chainID, err)
	}
	return nil
}

// unmount closes the Store's mount of a merged image.
func (j *join) unmount() error {
	if mount := j.mount.Swap(nil); mount != nil {
		return mount.Close()
	}
	return nil
}

func (s *Store) removeJoin(chainID digest.Digest) error {
	owned, err := s.joins.Acquire(context.Background(), chainID)
	if err != nil {
		return err
	}
	defer owned.Release()
	j := owned.Value()
	if j == nil {
		return nil
	}
	owned.Set(nil)
	if !j.onDisk {
		return nil
	}
	if err := s.trash.Take(s.joinDir(chainID), j.Usage); err != nil {
		owned.Set(j)
		return err
	}
	return j.unmount()
}

func (s *Store) joinDir(chainID digest.Digest) string {
	return filepath.Join(s.root, joinsDir, chainID.Encoded())
}
