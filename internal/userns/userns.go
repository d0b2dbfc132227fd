// Package userns creates user namespaces for pods (KEP-127). It starts a process in a new
// namespace, pins the namespaces of that process by bind mounts, and kills it. A Go program cannot
// unshare its user namespace: unshare(CLONE_NEWUSER) fails in a process with several threads.
package userns

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"syscall"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
)

// overflowID is the ID that the kernel reports for an unmapped ID (/proc/sys/kernel/overflowuid).
const overflowID = 65534

// Mappings map the IDs of a namespace to IDs of the host.
type Mappings struct {
	UIDs []specs.LinuxIDMapping `json:"uids"`
	GIDs []specs.LinuxIDMapping `json:"gids"`
}

// HostUID returns the host's UID for a UID of the namespace, or overflowID if it is unmapped.
func (m Mappings) HostUID(uid uint32) int { return toHost(m.UIDs, uid) }

// HostGID returns the host's GID for a GID of the namespace, or overflowID if it is unmapped.
func (m Mappings) HostGID(gid uint32) int { return toHost(m.GIDs, gid) }

// HasUID reports whether a UID is mapped.
func (m Mappings) HasUID(uid uint32) bool { return find(m.UIDs, uid) != nil }

// HasGID reports whether a GID is mapped.
func (m Mappings) HasGID(gid uint32) bool { return find(m.GIDs, gid) != nil }

func toHost(mappings []specs.LinuxIDMapping, id uint32) int {
	r := find(mappings, id)
	if r == nil {
		return overflowID
	}
	return int(r.HostID + (id - r.ContainerID))
}

func find(mappings []specs.LinuxIDMapping, id uint32) *specs.LinuxIDMapping {
	for i := range mappings {
		if r := &mappings[i]; id >= r.ContainerID && id-r.ContainerID < r.Size {
			return r
		}
	}
	return nil
}

// Namespaces are the namespaces of a process that exists until With returns.
type Namespaces struct{ pid int }

// User returns the path of the new user namespace.
func (n Namespaces) User() string { return n.path("user") }

// Net returns the path of the new network namespace, which the user namespace owns. If With was
// called with network false, it is the host's namespace.
func (n Namespaces) Net() string { return n.path("net") }

func (n Namespaces) path(kind string) string {
	return "/proc/" + strconv.Itoa(n.pid) + "/ns/" + kind
}

// With creates a user namespace with these mappings and, if network is set, a network namespace
// that the user namespace owns. It passes the namespaces to use. They end after use has returned,
// unless use pins them. With runs program in the namespaces. The program needs no arguments, and
// must do nothing until it is killed. The process is killed when With returns or the caller is
// killed.
func With(program string, m Mappings, network bool, use func(Namespaces) error) (err error) {
	runtime.LockOSThread() // Pdeathsig takes effect at the end of the thread that started the process
	defer runtime.UnlockOSThread()
	flags := uintptr(unix.CLONE_NEWUSER)
	if network {
		flags |= unix.CLONE_NEWNET
	}
	cmd := exec.Command(program)
	cmd.Dir, cmd.Env = "/", []string{}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:                 flags,
		UidMappings:                sysMappings(m.UIDs),
		GidMappings:                sysMappings(m.GIDs),
		GidMappingsEnableSetgroups: true,
		Pdeathsig:                  syscall.SIGKILL,
	}
	failpoint.Reach("userns.make")
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("create user namespace: %w", err)
	}
	failpoint.Reach("userns.made")
	defer func() {
		failpoint.Reach("userns.end-holder")
		if e := cmd.Process.Kill(); e != nil && !errors.Is(e, os.ErrProcessDone) {
			err = errors.Join(err, fmt.Errorf("kill the process that holds a user namespace: %w", e))
		}
		_ = cmd.Wait() // the process was killed, so its status does not matter
		failpoint.Reach("userns.holder-ended")
	}()
	return use(Namespaces{pid: cmd.Process.Pid})
}

func sysMappings(mappings []specs.LinuxIDMapping) []syscall.SysProcIDMap {
	out := make([]syscall.SysProcIDMap, 0, len(mappings))
	for _, r := range mappings {
		out = append(out, syscall.SysProcIDMap{ContainerID: int(r.ContainerID), HostID: int(r.HostID), Size: int(r.Size)})
	}
	return out
}

// Pin bind-mounts the namespace at source on a new file at path, which keeps the namespace alive.
// It replaces the result of an earlier attempt.
func Pin(source, path string) error {
	if err := Unpin(path); err != nil {
		return err
	}
	failpoint.Reach("userns.make-place")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o400)
	if err != nil {
		return fmt.Errorf("pin namespace: %w", err)
	}
	if err := f.Close(); err != nil {
		return fmt.Errorf("pin namespace: %w", err)
	}
	failpoint.Reach("userns.pin")
	if err := unix.Mount(source, path, "", unix.MS_BIND, ""); err != nil {
		return errors.Join(fmt.Errorf("pin namespace at %s: %w", path, err), Unpin(path))
	}
	failpoint.Reach("userns.pinned")
	return nil
}

// Unpin undoes Pin. It may be repeated.
func Unpin(path string) error {
	failpoint.Reach("userns.unpin")
	for {
		err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if err == unix.EINVAL || err == unix.ENOENT { // EINVAL: no mount; ENOENT: no file
			break
		}
		if err != nil {
			return fmt.Errorf("unpin namespace at %s: %w", path, err)
		}
	}
	failpoint.Reach("userns.unpinned")
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("unpin namespace: %w", err)
	}
	failpoint.Reach("userns.removed")
	return nil
}
