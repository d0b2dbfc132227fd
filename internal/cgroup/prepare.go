package cgroup

import (
	"errors"
	"fmt"
	"path/filepath"
	"sync/atomic"

	"github.com/opencontainers/cgroups"
)

// hierarchies are the root directories of v1 by controller, as found by Prepare. nil: each Open
// searches for them.
var hierarchies atomic.Pointer[map[string]string]

// pathsOf returns a group's directory in each v1 hierarchy. It returns nil if the library should
// search, which takes a hundred system calls per group. The daemon uses a hierarchy that is mounted
// later only after its next start.
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

// Prepare makes the library inspect this machine now. The library determines the mode only once and
// keeps an error forever. If the daemon had no free descriptor at that moment, it could never use a
// cgroup again.
func Prepare() error {
	cgroups.HugePageSizes()
	dir := "/sys/fs/cgroup"
	if !cgroups.IsCgroup2UnifiedMode() {
		var err error
		// FindCgroupMountpoint is not enough. If a hierarchy is in its usual place, it does not
		// read the mount table. The first lookup of a missing controller would still read it.
		dir, _, err = cgroups.FindCgroupMountpointAndRoot("", "pids")
		if _, missing := errors.AsType[*cgroups.NotFoundError](err); missing {
			return nil // the library has inspected the machine
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
