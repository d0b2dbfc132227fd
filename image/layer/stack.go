package layer

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"

	"berth/image/unpack"
	"berth/internal/errdefs"
	"berth/internal/rootfs"
)

// Stack returns the layers to mount for the chain of diffIDs, lowest first: the
// layers, and the joins between them, which it makes if they are not there. A second
// call is cheap. It is to be called when all layers of an image are there, so
// that an image that cannot work fails its pull, and again for each container.
//
// NotFound: a layer is not there. InvalidArgument: a hard link to a file that no
// layer below has; or more layers than overlayfs can mount. ResourceExhausted: making the joins
// takes too long.
func (s *Store) Stack(ctx context.Context, diffIDs []digest.Digest) ([]rootfs.Layer, error) {
	if len(diffIDs) == 0 {
		return nil, errdefs.InvalidArgument("an image without layers cannot be mounted")
	}
	if len(diffIDs) > rootfs.MaxLayers {
		return nil, errdefs.InvalidArgument("an image of %d layers, of which %d can be mounted", len(diffIDs), rootfs.MaxLayers)
	}
	dirs, err := s.stack(ctx, diffIDs)
	if err != nil {
		return nil, err
	}
	if len(dirs) > rootfs.MaxLayers {
		return nil, errdefs.InvalidArgument("an image of %d layers that needs %d on disk, of which %d can be mounted", len(diffIDs), len(dirs), rootfs.MaxLayers)
	}
	layers := make([]rootfs.Layer, 0, len(dirs))
	for _, dir := range dirs {
		layers = append(layers, s.driver.Layer(dir))
	}
	return layers, nil
}

// stack returns the directories of the layers and joins to mount.
func (s *Store) stack(ctx context.Context, diffIDs []digest.Digest) ([]string, error) {
	var dirs []string
	var top Info
	effort := newEffort(ctx, s.effort)
	for i, diffID := range diffIDs {
		var err error
		if top, err = s.Info(diffID); err != nil {
			return nil, err
		}
		below := dirs
		if top.Opaque {
			dirs = nil // overlayfs does not look at this mark on a layer's root
		}
		dirs = append(slices.Clip(dirs), s.layerDir(diffID))
		if !top.mayNeedJoin(i == 0) {
			continue
		}
		j, err := s.join(ctx, effort, diffIDs[:i+1], below)
		if err != nil {
			return nil, fmt.Errorf("layer %s: %w", diffID, err)
		}
		if !j.empty {
			dirs = append(dirs, s.joinDir(j.ChainID))
		}
	}
	if len(dirs) == 1 && top.Whiteouts > 0 {
		dirs = []string{s.emptyDir(), dirs[0]} // only overlayfs hides whiteouts, and it wants two layers
	}
	return dirs, nil
}

// join returns the join for the chain of diffIDs, whose last is to be joined
// with the directories below it.
func (s *Store) join(ctx context.Context, effort *Effort, diffIDs []digest.Digest, below []string) (*join, error) {
	chainID := identity.ChainID(diffIDs)
	if j := s.joins.get(chainID); j != nil {
		return j, nil
	}
	owned, err := s.joins.acquire(ctx, chainID)
	if err != nil {
		return nil, fmt.Errorf("wait for the other maker of join %s: %w", chainID, err)
	}
	defer owned.release()
	if j := owned.value(); j != nil {
		return j, nil
	}
	j := &join{ChainID: chainID, Layers: slices.Clone(diffIDs), Kind: s.driver.Kind()}
	err = s.publish(s.joinDir(chainID), joinKind, func(dir string) (any, error) {
		top, err := s.part(diffIDs[len(diffIDs)-1])
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
		j.empty = true
	case err != nil:
		return nil, coded(fmt.Errorf("join with the layers below: %w", err))
	}
	owned.set(j)
	return j, nil
}

// part reads the record of a layer.
func (s *Store) part(diffID digest.Digest) (Part, error) {
	dir := s.layerDir(diffID)
	var r record
	if err := readRecord(dir, layerKind, &r); err != nil {
		return Part{}, fmt.Errorf("read record of layer %s: %w", diffID, err)
	}
	return Part{dir, unpack.Contents{Summary: r.Summary, Links: r.Links, Implied: r.Implied}}, nil
}

// removeJoins removes the joins that diffID takes part in.
func (s *Store) removeJoins(diffID digest.Digest) error {
	for _, j := range s.joins.all() {
		if !slices.Contains(j.Layers, diffID) {
			continue
		}
		if err := s.removeJoin(j.ChainID); err != nil {
			return fmt.Errorf("remove join %s: %w", j.ChainID, err)
		}
	}
	return nil
}

func (s *Store) removeJoin(chainID digest.Digest) error {
	owned, err := s.joins.acquire(context.Background(), chainID)
	if err != nil {
		return err
	}
	defer owned.release()
	j := owned.value()
	if j == nil {
		return nil
	}
	owned.set(nil)
	if j.empty {
		return nil
	}
	if err := s.trash.take(s.joinDir(chainID), j.Usage); err != nil {
		owned.set(j)
		return err
	}
	return nil
}

func (s *Store) joinDir(chainID digest.Digest) string {
	return filepath.Join(s.root, joinsDir, chainID.Encoded())
}
