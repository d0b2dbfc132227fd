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

// Stack returns the layers to mount for a chain of layers, named lowest first: the
// layers, and the joins between them, which it makes if they are not there. A second
// call is cheap. It is to be called when all layers of an image are there, so
// that an image that cannot work fails its pull, and again for each container.
//
// NotFound: a layer is not there. InvalidArgument: a hard link to a file that no
// layer below has; or more layers than overlayfs can mount. ResourceExhausted: making the joins
// takes too long.
func (s *Store) Stack(ctx context.Context, names []digest.Digest) ([]rootfs.Layer, error) {
	if len(names) == 0 {
		return nil, errdefs.InvalidArgument("an image without layers cannot be mounted")
	}
	if len(names) > rootfs.MaxLayers {
		return nil, errdefs.InvalidArgument("an image of %d layers, of which %d can be mounted", len(names), rootfs.MaxLayers)
	}
	if driver, ok := s.driver.(Merger); ok {
		return s.merged(ctx, driver, names)
	}
	dirs, err := s.stack(ctx, names)
	if err != nil {
		return nil, err
	}
	if len(dirs) > rootfs.MaxLayers {
		return nil, errdefs.InvalidArgument("an image of %d layers that needs %d on disk, of which %d can be mounted", len(names), len(dirs), rootfs.MaxLayers)
	}
	layers := make([]rootfs.Layer, 0, len(dirs))
	for _, dir := range dirs {
		layers = append(layers, s.driver.Layer(dir))
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
			dirs = nil // overlayfs does not look at this mark on a layer's root
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
		dirs = []string{s.emptyDir(), dirs[0]} // only overlayfs hides whiteouts, and it wants two layers
	}
	return dirs, nil
}

// join returns the join for a chain of layers, whose last is to be joined
// with the directories below it.
func (s *Store) join(ctx context.Context, effort *Effort, names []digest.Digest, below []string) (*join, error) {
	chainID := identity.ChainID(names)
	if j := s.joins.Get(chainID); j != nil {
		return j, nil
	}
	owned, err := s.joins.Acquire(ctx, chainID)
	if err != nil {
		return nil, fmt.Errorf("wait for the other maker of join %s: %w", chainID, err)
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
		usage, needed, err := s.driver.Join(effort, dir, top, below)
		if err == nil && !needed {
			err = errNothing
		}
		j.Usage = usage
		return j, err
	})
	switch {
	case err == errNothing:
		j.Empty, j.Usage = true, Usage{}
		j.onDisk = had-effort.left.Load() > longEffort && s.note(j)
	case err != nil:
		return nil, coded(fmt.Errorf("join with the layers below: %w", err))
	}
	owned.Set(j)
	return j, nil
}

// note writes down that a chain needs no join, and reports whether that is on disk: it has to be found out
// again by the next daemon if not.
func (s *Store) note(j *join) bool {
	err := s.publish(s.joinDir(j.ChainID), joinKind, func(string) (any, error) { return j, nil })
	if err != nil {
		s.log.Warn("that layers need no join is not written down", "chain", j.ChainID, "error", err)
	}
	return err == nil
}

// part reads the record of a layer.
func (s *Store) part(name digest.Digest) (Part, error) {
	dir := s.layerDir(name)
	var r record
	if err := readRecord(dir, layerKind, &r); err != nil {
		return Part{}, fmt.Errorf("read record of layer %s: %w", name, err)
	}
	return Part{dir, unpack.Contents{Summary: r.Summary, Links: r.Links, Implied: r.Implied}}, nil
}

// removeJoins removes the joins that name takes part in.
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

// merged returns the image of a chain of layers, mounted.
func (s *Store) merged(ctx context.Context, driver Merger, names []digest.Digest) ([]rootfs.Layer, error) {
	chainID := identity.ChainID(names)
	j := s.joins.Get(chainID)
	if j == nil || j.mount.Load() == nil {
		var err error
		if j, err = s.mountMerged(ctx, driver, chainID, names); err != nil {
			return nil, err
		}
	}
	l := s.imageOf(j)
	l.Mount = j.mount.Load()
	return []rootfs.Layer{l}, nil
}

// imageOf is the image of a chain as it is on disk.
func (s *Store) imageOf(j *join) rootfs.Layer {
	l := s.driver.Layer(s.joinDir(j.ChainID))
	for _, name := range j.Data {
		l.Data = append(l.Data, filepath.Join(s.layerDir(name), dataFile))
	}
	return l
}

// mountMerged mounts the image of a chain, which it makes if it is not there. The mount has no place; it goes with the image, or
// with this Store, and lives on where a container has it.
func (s *Store) mountMerged(ctx context.Context, driver Merger, chainID digest.Digest, names []digest.Digest) (*join, error) {
	owned, err := s.joins.Acquire(ctx, chainID)
	if err != nil {
		return nil, fmt.Errorf("wait for the other maker of image %s: %w", chainID, err)
	}
	defer owned.Release()
	j := owned.Value()
	found := j != nil
	if !found {
		if j, err = s.merge(ctx, driver, owned, names); err != nil {
			return nil, err
		}
	}
	if j.mount.Load() != nil {
		return j, nil
	}
	mount, err := s.imageOf(j).Open()
	if err != nil && found && isDamaged(err) {
		s.log.Error("image of layers is damaged, and made anew", "chain", chainID, "error", err)
		if j, err = s.merge(ctx, driver, owned, names); err != nil {
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

// isDamaged tells what the kernel says of an image that is not what was written from what it says for want of something.
func isDamaged(err error) bool {
	for _, errno := range []error{unix.EUCLEAN, unix.EBADMSG, unix.EINVAL, unix.EOPNOTSUPP, unix.EIO, unix.ENOENT} {
		if errors.Is(err, errno) {
			return true
		}
	}
	return false
}

// merge makes the image of the chain that is owned, in place of one that is there. No more is written than the reserve leaves.
func (s *Store) merge(ctx context.Context, driver Merger, chain *owned[join], names []digest.Digest) (*join, error) {
	j := &join{ChainID: chain.Key(), Layers: slices.Clone(names), Kind: driver.Kind(), onDisk: true}
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
		usage, used, err := driver.Merge(newEffort(guarded, s.effort), dir, dirs)
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

// IsStacked reports whether Stack has nothing left to make for a chain of layers.
func (s *Store) IsStacked(names []digest.Digest) bool {
	if _, merges := s.driver.(Merger); merges {
		return s.joins.Get(identity.ChainID(names)) != nil
	}
	return true // joins are for parts of a chain; what is missing is made
}

// Merged returns the IDs of the chains of layers that there are images of (Merger). They are to be removed when nobody needs them
// any more.
func (s *Store) Merged() (chains []digest.Digest) {
	if _, merges := s.driver.(Merger); merges {
		for _, j := range s.joins.All() {
			chains = append(chains, j.ChainID)
		}
	}
	return chains
}

// RemoveMerged removes the image of a chain of layers, but not the layers. The caller sees to it that nothing uses it. It is no error
// if it is not there.
func (s *Store) RemoveMerged(chainID digest.Digest) error {
	if _, merges := s.driver.(Merger); !merges {
		return nil // a join of that ID serves longer chains, too
	}
	if err := s.removeJoin(chainID); err != nil {
		return fmt.Errorf("remove the image of chain %s: %w", chainID, err)
	}
	return nil
}

// unmount ends the mount of an image that the Store has.
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
