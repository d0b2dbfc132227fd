package stats

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/diskusage"
	"berth/internal/host"
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
		c.mountpoint = c.cfg.Images // equal mountpoints tell kubelet that images and containers share a filesystem (KEP-4191)
	}
	if mount, err := host.MountOf(c.cfg.Layers); err == nil {
		c.device = mount.Source
	} else { // the device is only a label of metrics
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
