package cgroup

import (
	"errors"
	"fmt"

	"github.com/opencontainers/cgroups"
)

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
	return nil
}
