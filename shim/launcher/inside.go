package launcher

// A container's init starts inside its cgroup where cgroup v2 is the only version and the cgroup
// driver is cgroupfs (ADR 040).
//
// libcontainer starts a process and moves it to the cgroup. The move waits for an RCU grace period,
// so the move is left out. The process that libcontainer starts is nsexec, which starts init
// by clone, and __wrap_clone in inside.c starts init in the cgroup (CLONE_INTO_CGROUP).

// #cgo LDFLAGS: -Wl,--wrap=clone
// #include "inside.h"
import "C"

import (
	"errors"
	"os"
	"reflect"
	"slices"

	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/runc/libcontainer"

	"berth/internal/cgroup"
	"berth/internal/failpoint"
	"berth/internal/pidfd"
)

// unmoved is the manager of a cgroup in which processes start. It moves none to it.
type unmoved struct{ cgroups.Manager }

// Apply creates the cgroup.
func (m unmoved) Apply(int) error { return m.Manager.Apply(nobody) }

// nobody is no process. Package cgroups then only creates the cgroup.
const nobody = -1

// startInit is [libcontainer.Container.Start] for the container's init.
func (b *libcontainerBackend) startInit() error {
	manager := managerOf(b.container)
	if !cgroups.IsCgroup2UnifiedMode() || !cgroup.StartsInside(b.SystemdCgroup) || !manager.IsValid() {
		return b.container.Start(b.process)
	}
	original := manager.Interface().(cgroups.Manager)
	manager.Set(reflect.ValueOf(unmoved{original}))
	name := os.Args[0]
	os.Args[0] = C.INSIDE + original.Path("") // libcontainer passes it on
	err := b.container.Start(b.process)
	os.Args[0] = name
	failpoint.Reach("launcher.init-inside")
	if err != nil {
		return err
	}
	return b.checkInside()
}

// managerOf returns the private field of a container with its cgroup. libcontainer has no function
// for it. The value is not valid if there is no such field; TestManagerOf notices that.
func managerOf(c *libcontainer.Container) reflect.Value {
	field := reflect.ValueOf(c).Elem().FieldByName("cgroupManager")
	if !field.IsValid() || field.Type() != reflect.TypeFor[cgroups.Manager]() {
		return reflect.Value{}
	}
	return reflect.NewAt(field.Type(), field.Addr().UnsafePointer()).Elem()
}

// checkInside returns an error if init is not in its cgroup, where it would have no limits. An init
// that has been killed is not listed any more.
func (b *libcontainerBackend) checkInside() error {
	pid, err := b.process.Pid()
	if err != nil {
		return err
	}
	pids, err := b.group.Procs()
	if err != nil || slices.Contains(pids, pid) {
		return err
	}
	ended, err := pidfd.Exiting(pid)
	if err == nil && !ended {
		err = errors.New("init did not start in its cgroup")
	}
	return err
}
