package cgroup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/runc/libcontainer/system/kernelversion"
)

// Anchor moves a process into the cgroup that already contains it. The only effect is that the next
// move of any process is faster.
//
// To move a process into a cgroup the kernel takes a lock (cgroup_threadgroup_rwsem). Taking it
// waits for an RCU grace period (5 to 15 ms), unless it was taken within the last grace period. The
// mount option favordynmods (Linux 6.0) changes that for the whole machine. A process that starts
// in its cgroup (clone3 with CLONE_INTO_CGROUP, v2 only) does not need the lock.
type Anchor struct {
	pid   string
	procs string // cgroup.procs of the process's cgroup
}

// AnchorOf finds the cgroup of a process, which must stay in this cgroup.
func AnchorOf(pid int) (*Anchor, error) {
	s := &Anchor{pid: strconv.Itoa(pid)}
	paths, err := cgroups.ParseCgroupFile("/proc/" + s.pid + "/cgroup")
	if err != nil {
		return nil, fmt.Errorf("find the cgroup of process %d: %w", pid, err)
	}
	dir := filepath.Join(root, paths[""])
	if !cgroups.IsCgroup2UnifiedMode() {
		const any = "freezer" // all hierarchies share the lock
		path, ok := paths[any]
		if !ok {
			return nil, errors.New("no freezer hierarchy is mounted")
		}
		dir = filepath.Join(root, any, path)
	}
	s.procs = filepath.Join(dir, "cgroup.procs")
	return s, nil
}

// StartsInside reports whether a process of one thread can be in a new group without that lock. On
// cgroup v2 it starts there. Before Linux 6.4 such a process could have the processors and the
// memory nodes of its creator's group (42a11bf5c543). On v1 it moves itself through lists of
// threads, since Linux 5.5 (9a3284fad42f). With the systemd driver systemd moves the process, with
// the lock.
func StartsInside(systemd bool) bool {
	since := kernelversion.KernelVersion{Kernel: 5, Major: 5}
	if cgroups.IsCgroup2UnifiedMode() {
		since = kernelversion.KernelVersion{Kernel: 6, Major: 4}
	}
	without, err := kernelversion.GreaterEqualThan(since)
	return !systemd && err == nil && without // otherwise the caller moves it
}

// root is where hierarchies are mounted.
const root = "/sys/fs/cgroup"

// Move moves the process into its own cgroup again.
func (s *Anchor) Move() error {
	if err := os.WriteFile(s.procs, []byte(s.pid), 0); err != nil {
		return fmt.Errorf("move process %s to its own cgroup: %w", s.pid, err)
	}
	return nil
}
