package stats

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"berth/internal/diskusage"
	"berth/internal/safefs"
)

const (
	// quickLimit is how long one writable layer is counted while others wait. One that takes longer
	// is counted with the slow ones.
	quickLimit = 30 * time.Second
	// walkLimit is how long a slow one is counted: all inodes of most filesystems can be read in
	// that time.
	walkLimit = 30 * time.Minute
)

var (
	// errSlow says that a layer was not counted to its end within quickLimit.
	errSlow = errors.New("counting takes long, it is done beside the others")
	// errWalkLimit says that a layer was not counted to its end within walkLimit.
	errWalkLimit = fmt.Errorf("counting takes longer than %v", walkLimit)
)

// walks has what the last walks of a layer found, the latest first.
type walks [3]diskusage.Usage

// after returns the walks with one more.
func (w walks) after(found diskusage.Usage) walks { return walks{found, w[0], w[1]} }

// most is the most that any of them found.
func (w walks) most() (u diskusage.Usage) {
	for _, found := range w {
		u = larger(u, found)
	}
	return u
}

func larger(a, b diskusage.Usage) diskusage.Usage {
	return diskusage.Usage{Bytes: max(a.Bytes, b.Bytes), Inodes: max(a.Inodes, b.Inodes)}
}

// measureLayer counts a writable layer and decides which figure is published. kubelet evicts by it.
func (c *Sampler) measureLayer(ctx context.Context, s *Target, upper *os.File, counted *Sample) error {
	limit, cause := c.quick, errSlow
	if s.State.slow.Load() {
		limit, cause = c.longest, errWalkLimit
	}
	limited, cancel := context.WithTimeoutCause(ctx, limit, cause)
	defer cancel()
	found, err := diskusage.Tree(limited, upper)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	var last Sample
	if l := s.State.last.Load(); l != nil {
		last = *l
	}
	counted.walks = last.walks.after(found)
	counted.Layer = settle(last.Layer, counted.walks, err, c.filesystem.Load().occupied)
	if err := c.addQuota(s, counted); err != nil { // what the walk has found is published all the same
		c.cfg.Log.Warn("read the quota of a writable layer", "container", s.ID, "error", err)
	}
	counted.partial = errors.Is(err, errSlow)
	if err != nil && !counted.partial && !errors.Is(err, diskusage.ErrChanged) {
		c.cfg.Log.Warn("count writable layer: not all of it was counted", "container", s.ID,
			"counted", found.Bytes, "published", counted.Layer.Bytes, "error", err)
	}
	if err != nil && !errors.Is(err, diskusage.ErrChanged) {
		counted.usedCPU = "" // it is to be counted again, even if its pod does nothing
	}
	return nil
}

// settle returns the figure to publish for a layer after a walk that ended with err. It is never
// less than what is known:
//
//   - Directories that change all the time are common. The most of the last three walks counts, so
//     that a container that hides files by moving them during walks must succeed three times in a row.
//   - Directories nested too deep to be counted are an evasion, and so are more files than can be
//     counted in walkLimit: the layer takes as much as is used of the filesystem.
//   - After any other walk that did not end, the last figure stays, unless more was found.
func settle(last diskusage.Usage, w walks, err error, occupied diskusage.Usage) diskusage.Usage {
	switch {
	case err == nil:
		return w[0]
	case errors.Is(err, diskusage.ErrChanged):
		return w.most()
	case errors.Is(err, safefs.ErrTooDeep), errors.Is(err, errWalkLimit):
		return larger(w[0], occupied)
	default:
		return larger(w[0], last)
	}
}

// addQuota takes the kernel's figure where it is larger. It has files that are open and have no
// name any more, which a walk does not find. The walk has files that the container has taken out of
// its project.
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
