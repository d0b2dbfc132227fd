package stats

import (
	"fmt"
	"path/filepath"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"berth/internal/diskusage"
)

// Filesystem describes the filesystem of the writable layers.
type Filesystem struct {
	At         time.Time
	Mountpoint string          // as reported to kubelet; the images' directory if they share the filesystem
	Device     string          // source in mountinfo
	Used       diskusage.Usage // by all writable layers sampled so far
	Bytes      uint64          // total size
	Inodes     uint64          // 0 if the filesystem allocates inodes dynamically
	FreeInodes uint64

	occupied diskusage.Usage // by all its files
}

// Locate finds the filesystem of the writable layers. It must be called once, before any other
// method.
func (c *Sampler) Locate() error {
	shared, err := sameFilesystem(c.cfg.Images, c.cfg.Layers)
	if err != nil {
		return err
	}
	c.mountpoint = c.cfg.Layers
	if shared {
		c.mountpoint = c.cfg.Images // equal names tell kubelet that they share a filesystem (KEP-4191)
	}
	if c.device, err = deviceOf(c.cfg.Layers); err != nil { // the device is only a label of metrics
		c.cfg.Log.Warn("find device of writable layers; their metrics have no device label", "error", err)
	}
	return c.measureFilesystem()
}

func sameFilesystem(a, b string) (bool, error) {
	var x, y unix.Stat_t
	if err := unix.Stat(a, &x); err != nil {
		return false, fmt.Errorf("filesystem of %s: %w", a, err)
	}
	if err := unix.Stat(b, &y); err != nil {
		return false, fmt.Errorf("filesystem of %s: %w", b, err)
	}
	return x.Dev == y.Dev, nil
}

// deviceOf returns the source of the mount that contains dir.
func deviceOf(dir string) (string, error) {
	real, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return "", fmt.Errorf("device of %s: %w", dir, err)
	}
	mounts, err := mountinfo.GetMounts(mountinfo.ParentsFilter(real))
	if err != nil {
		return "", fmt.Errorf("device of %s: %w", dir, err)
	}
	var last *mountinfo.Info
	for _, m := range mounts { // a later mount hides an earlier one at the same path
		if last == nil || len(m.Mountpoint) >= len(last.Mountpoint) {
			last = m
		}
	}
	if last == nil {
		return "", fmt.Errorf("device of %s: not in any mount", dir)
	}
	return last.Source, nil
}

func (c *Sampler) measureFilesystem() error {
	var st unix.Statfs_t
	if err := unix.Statfs(c.cfg.Layers, &st); err != nil {
		return fmt.Errorf("statfs of writable layers: %w", err)
	}
	c.filesystem.Store(&Filesystem{At: time.Now(), Mountpoint: c.mountpoint, Device: c.device,
		Bytes: st.Blocks * uint64(st.Frsize), Inodes: st.Files, FreeInodes: st.Ffree,
		occupied: diskusage.Usage{Bytes: (st.Blocks - min(st.Bfree, st.Blocks)) * uint64(st.Frsize),
			Inodes: st.Files - min(st.Ffree, st.Files)}})
	return nil
}

// Filesystem returns the filesystem of the writable layers and their usage, from memory.
func (c *Sampler) Filesystem() Filesystem {
	f := *c.filesystem.Load()
	for s := range c.cfg.Targets {
		if counted := c.Last(s.State); counted != nil {
			f.Used.Bytes += counted.Layer.Bytes
			f.Used.Inodes += counted.Layer.Inodes
		}
	}
	return f
}
