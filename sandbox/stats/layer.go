package stats

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"berth/internal/diskusage"
	"berth/internal/safefs"
)

const (
	// quickTimeout limits the walk of one writable layer while other layers wait. A layer that
	// takes longer is left to the goroutine for slow layers.
	quickTimeout = 30 * time.Second
	// walkTimeout limits the walk of a slow layer. It is enough to read all inodes of most
	// filesystems.
	walkTimeout = 30 * time.Minute
)

var (
	// errSlow reports that the walk of a layer exceeded quickTimeout.
	errSlow = errors.New("layer is large; continuing in the background")
	// errWalkTimeout reports that the walk of a layer exceeded walkTimeout.
	errWalkTimeout = fmt.Errorf("walk takes longer than %v", walkTimeout)
)

// walks holds the results of the last walks of a layer, latest first.
type walks [3]diskusage.Usage

// after returns the walks with a new latest walk.
func (w walks) after(found diskusage.Usage) walks { return walks{found, w[0], w[1]} }

// most returns the largest result.
func (w walks) most() (u diskusage.Usage) {
	for _, found := range w {
		u = larger(u, found)
	}
	return u
}

func larger(a, b diskusage.Usage) diskusage.Usage {
	return diskusage.Usage{Bytes: max(a.Bytes, b.Bytes), Inodes: max(a.Inodes, b.Inodes)}
}

// measureLayer walks a writable layer and the container's volumes, and chooses the size to publish.
// kubelet evicts pods by it.
func (c *Sampler) measureLayer(ctx context.Context, s *Target, upper *os.File, counted *Sample) error {
	limit, cause := c.quick, errSlow
	if s.State.slow.Load() {
		limit, cause = c.longest, errWalkTimeout
	}
	limited, cancel := context.WithTimeoutCause(ctx, limit, cause)
	defer cancel()
	found, err := diskusage.Tree(limited, upper)
	volumes, volumesErr := c.walkVolumes(limited, s.ID)
	found, err = found.Add(volumes), errors.Join(err, volumesErr)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	var last Sample
	if l := s.State.last.Load(); l != nil {
		last = *l
	}
	counted.walks = last.walks.after(found)
	counted.Layer = settle(last.Layer, counted.walks, err, c.filesystem.Load().occupied)
	if err := c.addQuota(s, counted); err != nil { // the result of the walk is published nevertheless
		c.cfg.Log.Warn("read quota of writable layer", "container", s.ID, "error", err)
	}
	counted.partial = errors.Is(err, errSlow)
	if err != nil && !counted.partial && !errors.Is(err, diskusage.ErrChanged) {
		c.cfg.Log.Warn("measure writable layer: walk is incomplete", "container", s.ID,
			"found", found.Bytes, "published", counted.Layer.Bytes, "error", err)
	}
	if err != nil && !errors.Is(err, diskusage.ErrChanged) {
		counted.usedCPU = "" // sample again, even if the pod stays idle
	}
	return nil
}

// walkVolumes counts a container's anonymous volumes. Most containers have none.
func (c *Sampler) walkVolumes(ctx context.Context, id string) (diskusage.Usage, error) {
	dir, err := os.Open(filepath.Join(c.cfg.Layers, id, "volumes"))
	if errors.Is(err, fs.ErrNotExist) {
		return diskusage.Usage{}, nil
	}
	if err != nil {
		return diskusage.Usage{}, fmt.Errorf("open volumes: %w", err)
	}
	defer dir.Close() // it was only read
	return diskusage.Tree(ctx, dir)
}

// settle returns the size to publish for a layer after a walk that ended with err. The published
// size never falls below the known use:
//
//   - Directories that change all the time are common. The largest of the last three walks counts.
//     A container that hides files by moving them must succeed three times in a row.
//   - Directories nested too deep to walk are an evasion, and so are more files than walkTimeout
//     than walkLimit allows. Such a layer is charged with all used space of the filesystem.
//   - After any other incomplete walk the last size stays, unless the walk found more.
func settle(last diskusage.Usage, w walks, err error, occupied diskusage.Usage) diskusage.Usage {
	switch {
	case err == nil:
		return w[0]
	case errors.Is(err, diskusage.ErrChanged):
		return w.most()
	case errors.Is(err, safefs.ErrTooDeep), errors.Is(err, errWalkTimeout):
		return larger(w[0], occupied)
	default:
		return larger(w[0], last)
	}
}

// addQuota raises the size to the usage that the kernel's project quota counts, if that is larger.
// That usage includes open files without a name, which a walk does not find. The walk includes
// files that the container has moved out of its project.
func (c *Sampler) addQuota(s *Target, counted *Sample) error {
	if c.cfg.Quota == nil {
		return nil
	}
	used, ok, err := c.cfg.Quota(s.Project)
	if err != nil {
		return err
	}
	if ok {
		counted.Layer = larger(counted.Layer, used)
	}
	return nil
}
