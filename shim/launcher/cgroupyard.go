package launcher

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"berth/internal/cgroup"
	"berth/internal/failpoint"
)

// A cgroup yard is a directory in which CRIU finds the cgroup hierarchies. If there is no yard,
// CRIU mounts the hierarchies itself. A mount of cgroup v2 without options, in the node's cgroup
// namespace, removes nsdelegate and memory_recursiveprot from the whole node. Mounts also take time
// while the container is frozen: nine of cgroup v1 take 7 ms.

// restoreYard is the yard of a restore, below CRIU's work directory.
const restoreYard = "cgroups"

// hierarchy is a cgroup hierarchy, and the cgroup of a process in it.
type hierarchy struct {
	name  string // in a yard
	mount string // a mount point that shows the whole hierarchy; empty if there is none
	path  string // of the cgroup, from the root of the hierarchy
}

// hierarchiesOf returns the cgroups of a process in all hierarchies.
func hierarchiesOf(pid int) (list []hierarchy, err error) {
	table, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return nil, err
	}
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(table)) {
		fields := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3) // number, controllers, path
		if len(fields) != 3 {
			return nil, fmt.Errorf("unexpected line %q in /proc/%d/cgroup", line, pid)
		}
		h := hierarchy{name: strings.TrimPrefix(fields[1], "name="), path: fields[2]}
		if fields[0] == "0" {
			h.name = "unified"
		}
		for _, m := range mounts {
			if isMountOf(m, fields[0], fields[1]) && hasProcess(filepath.Join(m.Mountpoint, h.path), pid) {
				h.mount = m.Mountpoint
				break
			}
		}
		list = append(list, h)
	}
	return list, nil
}

// isMountOf returns whether a mount shows a whole hierarchy, given by its number and controllers in
// /proc/PID/cgroup. Version 2 has number 0.
func isMountOf(m *mountinfo.Info, number, controllers string) bool {
	if m.Root != "/" || (number == "0") != (m.FSType == "cgroup2") {
		return false
	}
	options := strings.Split(m.VFSOptions, ",")
	for controller := range strings.SplitSeq(controllers, ",") {
		if controller != "" && !slices.Contains(options, controller) {
			return false
		}
	}
	return true
}

// hasProcess returns whether a process is in a cgroup.
func hasProcess(dir string, pid int) bool {
	pids, err := cgroup.ProcsIn(dir)
	return err == nil && slices.Contains(pids, pid)
}

// linkHierarchies makes a yard of symbolic links to mounts. It is in a separate filesystem, which
// has no mount point, so it ends with the returned directory. CRIU opens it in /proc/PID/fd.
func linkHierarchies(list []hierarchy) (yard *os.File, err error) {
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("fsopen", err)
	}
	defer unix.Close(fs)
	if err := unix.FsconfigCreate(fs); err != nil {
		return nil, os.NewSyscallError("fsconfig", err)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("fsmount", err)
	}
	yard = os.NewFile(uintptr(fd), "cgroups")
	failpoint.Reach("launcher.link-cgroups")
	for _, h := range list {
		if err := unix.Symlinkat(h.mount, fd, h.name); err != nil {
			_ = yard.Close() // Close of a directory loses nothing
			return nil, fmt.Errorf("symlinkat %s: %w", h.name, err)
		}
	}
	failpoint.Reach("launcher.cgroups-linked")
	return yard, nil
}

// makeYard makes the yard of a restore. It has directories with the paths of CRIU's cgroups, on
// which writable copies of the cgroups are mounted. libcontainer has moved CRIU to the container's
// cgroups, and CRIU restores the processes there. So CRIU can write to these cgroups and those
// below them, and to no others. CRIU mounts a hierarchy that the node has not mounted.
//
// The mounts do not need protection from symbolic links of a container. The work directory is new,
// and only root can enter it. CRIU has not got a request yet, so nothing of the checkpoint was
// read. A path of the checkpoint may lead to the yard later, but only to the container's own
// cgroups.
func (n *restoreNamespace) makeYard(criu int) error {
	list, err := hierarchiesOf(criu)
	if err != nil {
		return err
	}
	failpoint.Reach("launcher.make-cgroup-yard")
	if err := os.Mkdir(n.yard, 0o700); err != nil {
		return err
	}
	failpoint.Reach("launcher.cgroup-yard-made")
	for _, h := range list {
		if h.mount == "" {
			continue
		}
		if err := bindCgroup(filepath.Join(h.mount, h.path), filepath.Join(n.yard, h.name, h.path)); err != nil {
			return err
		}
	}
	return nil
}

// bindCgroup mounts a cgroup at a new directory.
func bindCgroup(dir, place string) error {
	failpoint.Reach("launcher.make-cgroup-place")
	if err := os.MkdirAll(place, 0o700); err != nil {
		return err
	}
	failpoint.Reach("launcher.cgroup-place-made")
	fd, err := unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return fmt.Errorf("open_tree %s: %w", dir, err)
	}
	defer unix.Close(fd)
	failpoint.Reach("launcher.mount-cgroup")
	err = unix.MoveMount(fd, "", unix.AT_FDCWD, place, unix.MOVE_MOUNT_F_EMPTY_PATH)
	failpoint.Reach("launcher.cgroup-mounted")
	if err != nil {
		return fmt.Errorf("move_mount %s: %w", place, err)
	}
	return nil
}
