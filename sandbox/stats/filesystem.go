package stats

import (
	"fmt"
	"path/filepath"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"berth/internal/diskusage"
)

// Filesystem is the one that holds the writable layers.
type Filesystem struct {
	At         time.Time
	Mountpoint string          // names it to kubelet; the same as the images' if they share it
	Device     string          // as in mountinfo
	Used       diskusage.Usage // by all writable layers that were counted
	Bytes      uint64          // its size
	Inodes     uint64          // 0 where the filesystem has no fixed number
	FreeInodes uint64

	occupied diskusage.Usage // by everything that is on it
}

// Locate finds out where writable layers are. It is called once, before the others.
func (c *Sampler) Locate() error {
	shared, err := sameFilesystem(c.cfg.Images, c.cfg.Layers)
	if err != nil {
		return err
	}
	c.mountpoint = c.cfg.Layers
	if shared {
		c.mountpoint = c.cfg.Images // kubelet tells by the name whether they share it (KEP-4191)
	}
	if c.device, err = deviceOf(c.cfg.Layers); err != nil { // it is a label of metrics, no more
		c.cfg.Log.Warn("metrics of writable layers name no device", "error", err)
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

// deviceOf returns the source of the mount that a directory is in.
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
	for _, m := range mounts { // of two at the same place the later one is seen
		if last == nil || len(m.Mountpoint) >= len(last.Mountpoint) {
			last = m
		}
	}
	if last == nil {
		return "", fmt.Errorf("device of %s: no mount holds it", dir)
	}
	return last.Source, nil
}

func (c *Sampler) measureFilesystem() error {
	var st unix.Statfs_t
	if err := unix.Statfs(c.cfg.Layers, &st); err != nil {
		return fmt.Errorf("size of the filesystem of writable layers: %w", err)
	}
	c.filesystem.Store(&Filesystem{At: time.Now(), Mountpoint: c.mountpoint, Device: c.device,
		Bytes: st.Blocks * uint64(st.Frsize), Inodes: st.Files, FreeInodes: st.Ffree,
		occupied: diskusage.Usage{Bytes: (st.Blocks - min(st.Bfree, st.Blocks)) * uint64(st.Frsize), Inodes: st.Files - min(st.Ffree, st.Files)}})
	return nil
}

// Filesystem returns where writable layers are and what they take there, from memory.
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
