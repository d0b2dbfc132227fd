package launcher

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"berth/internal/safefs"
	"berth/shim/proto"
)

// mountVolumes mounts the images that the container has as volumes and leads the spec's
// mounts to them.
func (c *launch) mountVolumes() error {
	for _, v := range c.Volumes {
		if err := c.mountAt(v.Rootfs, v.Path); err != nil {
			return fmt.Errorf("image volume: %w", err)
		}
		source, err := insideVolume(v)
		if err != nil {
			return fmt.Errorf("image volume: %w", err)
		}
		for i, m := range c.Spec.Mounts {
			if m.Source == v.Path {
				c.Spec.Mounts[i].Source = source
			}
		}
	}
	return nil
}

// insideVolume is the path of SubPath, free of symbolic links. The kernel resolves it with
// the image as the root, so that no link of the image leads out of it; nobody can change
// the image afterwards, for it is read-only and mounted in this process's namespace alone.
func insideVolume(v proto.Volume) (string, error) {
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
		return "", fmt.Errorf("path of %s: %w", v.SubPath, err)
	}
	return path, nil
}
