package launcher

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
	"berth/internal/rootfs"
	"berth/internal/safefs"
	"berth/shim/proto"
)

// mountAll mounts the root filesystem and the image volumes.
func (c *launch) mountAll() error {
	if err := c.mountRootfs(); err != nil {
		return err
	}
	c.endStep("mount root filesystem")
	if err := c.mountVolumes(); err != nil {
		return err
	}
	c.endStep("mount volumes")
	return c.closeMounts()
}

// mountRootfs mounts the container's root filesystem and enters its path in the spec.
func (c *launch) mountRootfs() error {
	if _, ok := c.backend.(*pauseBackend); ok {
		return nil // pause mounts it in its own mount namespace
	}
	dir, err := c.rootDir()
	if err != nil {
		return err
	}
	if err := c.mountOn(c.Rootfs, dir); err != nil {
		return err
	}
	c.Spec.Root = &specs.Root{Path: dir, Readonly: c.Rootfs.Upper == "" || c.Spec.Root != nil && c.Spec.Root.Readonly}
	return nil
}

// rootDir returns the mount point of the root filesystem: the request's RootPlace or a new
// directory. All launches can share a RootPlace, because each has its own mount namespace.
func (c *launch) rootDir() (string, error) {
	if c.RootPlace != "" {
		return c.RootPlace, nil
	}
	dir := filepath.Join(c.Dir, "rootfs")
	return dir, c.makeDir(dir)
}

func (c *launch) makeDir(dir string) error {
	failpoint.Reach("launcher.make-mount-point")
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make mount point: %w", err)
	}
	failpoint.Reach("launcher.mount-point-made")
	c.undo.Add("remove "+dir, func() error {
		failpoint.Reach("launcher.remove-mount-point")
		return ignore(unix.Rmdir(dir), unix.ENOENT)
	})
	return nil
}

// mountOn mounts layers on dir, in this process's mount namespace.
func (c *launch) mountOn(layers rootfs.Spec, dir string) error {
	failpoint.Reach("launcher.mount")
	if err := layers.MountAt(dir); err != nil {
		return err
	}
	failpoint.Reach("launcher.mounted")
	c.undo.Add("unmount "+dir, func() error {
		return c.inOwnMounts(func() error {
			failpoint.Reach("launcher.unmount")
			return ignore(unix.Unmount(dir, unix.MNT_DETACH), unix.EINVAL)
		})
	})
	return nil
}

// inOwnMounts calls do in the mount namespace of the launch. The calling thread may be in the
// host's mount namespace (enterHost), where a request's RootPlace is another mount.
func (c *launch) inOwnMounts(do func() error) error {
	if c.ownMounts != nil {
		return onOwnThread(func() error {
			if err := enterMounts(c.ownMounts); err != nil {
				return err
			}
			return do()
		})
	}
	done := make(chan error)
	go func() { done <- do() }() // not on a locked thread
	return <-done
}

// closeMounts closes the mounts that came with the request. The container's mounts keep references
// of their own.
func (c *launch) closeMounts() (failed error) {
	for _, f := range c.mounts {
		failed = errors.Join(failed, f.Close())
	}
	return failed
}

// mountVolumes mounts the container's image volumes and points the spec's mounts to them.
func (c *launch) mountVolumes() error {
	for _, v := range c.Volumes {
		if err := c.mountVolume(v); err != nil {
			return fmt.Errorf("mount image volume: %w", err)
		}
	}
	return nil
}

func (c *launch) mountVolume(v proto.Volume) error {
	if err := c.makeDir(v.Path); err != nil {
		return err
	}
	if err := c.mountOn(v.Rootfs, v.Path); err != nil {
		return err
	}
	source, err := resolveSubPath(v)
	if err != nil {
		return err
	}
	for i, m := range c.Spec.Mounts {
		if m.Source == v.Path {
			c.Spec.Mounts[i].Source = source
		}
	}
	return nil
}

// resolveSubPath returns the path of a volume's SubPath without symbolic links. The kernel resolves
// it with the image as root, so no link leads outside. No process can change the image afterwards,
// because it is read-only and mounted only in this process's namespace.
func resolveSubPath(v proto.Volume) (string, error) {
	if v.SubPath == "" {
		return v.Path, nil
	}
	root, err := safefs.OpenRoot(v.Path)
	if err != nil {
		return "", err
	}
	defer root.Close()
	f, err := safefs.Open(root, v.SubPath, unix.O_PATH, 0)
	if err != nil {
		return "", err
	}
	defer f.Close()
	path, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
	if err != nil {
		return "", fmt.Errorf("resolve %s: %w", v.SubPath, err)
	}
	return path, nil
}
