package host

import (
	"fmt"
	"path/filepath"

	"github.com/moby/sys/mountinfo"
)

// MountOf returns the mount that contains path.
func MountOf(path string) (*mountinfo.Info, error) {
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return nil, fmt.Errorf("mount of %s: %w", path, err)
	}
	mounts, err := mountinfo.GetMounts(mountinfo.ParentsFilter(real))
	if err != nil {
		return nil, fmt.Errorf("mount of %s: %w", path, err)
	}
	var last *mountinfo.Info
	for _, m := range mounts { // a later mount hides an earlier one at the same path
		if last == nil || len(m.Mountpoint) >= len(last.Mountpoint) {
			last = m
		}
	}
	if last == nil {
		return nil, fmt.Errorf("mount of %s: not in any mount", path)
	}
	return last, nil
}
