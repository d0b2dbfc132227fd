package cgroup

import (
	"errors"
	"fmt"
	"path/filepath"
	"sync/atomic"

	"github.com/opencontainers/cgroups"
)

// hierarchies are the groups "/" of v1 by controller, as Prepare found them. nil: each Open looks for itself.
var hierarchies atomic.Pointer[map[string]string]

// pathsOf returns a group's folder in each hierarchy of v1, nil if the library is to find them. It does that anew for each group,
// with a hundred system calls. A hierarchy that is mounted while the daemon runs is the next one's.
func pathsOf(cfg *cgroups.Cgroup) map[string]string {
	roots := hierarchies.Load()
	if roots == nil || cfg.Systemd {
		return nil
	}
	paths := make(map[string]string, len(*roots))
	for controller, root := range *roots {
		paths[controller] = filepath.Join(root, cfg.Path)
	}
	return paths
}

// Prepare has the library look at this machine now. It looks once and keeps what it found, an error for
// good: a daemon that was out of descriptors at its first use of a cgroup could use none any more.
func Prepare() error {
	cgroups.HugePageSizes()
	dir := "/sys/fs/cgroup"
	if !cgroups.IsCgroup2UnifiedMode() {
		var err error
		// Not FindCgroupMountpoint: it does not look at the table of mounts where a hierarchy is in its usual place, and
		// that of a controller that is missing is looked for there at the first use.
		dir, _, err = cgroups.FindCgroupMountpointAndRoot("", "pids")
		if _, missing := errors.AsType[*cgroups.NotFoundError](err); missing {
			return nil // and it has looked
		}
		if err != nil {
			return fmt.Errorf("find cgroup hierarchies: %w", err)
		}
	}
	if _, err := cgroups.ReadFile(dir, "cgroup.procs"); err != nil {
		return fmt.Errorf("read cgroup: %w", err)
	}
	return findHierarchies()
}

func findHierarchies() error {
	if cgroups.IsCgroup2UnifiedMode() {
		return nil
	}
	root, err := Open("/", false)
	if err != nil {
		return fmt.Errorf("find cgroup hierarchies: %w", err)
	}
	hierarchies.Store(new(root.Paths()))
	return nil
}
