package runtime

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"berth/internal/cgroup"
	"berth/internal/criu"
	"berth/internal/errdefs"
	"berth/sandbox/state"
	"berth/shim"
	"berth/shim/proto"
)

// Dumper freezes containers and dumps their processes with CRIU.
type Dumper struct {
	Node      state.Node
	Launchers *shim.Launchers
	Log       *slog.Logger
}

// Dump is a prepared dump. *shim.Dump implements it and documents the methods.
type Dump interface {
	Run(ctx context.Context) error
	Close() error
	Info() proto.Dumped
}

// Frozen is a frozen container. *shim.Frozen implements it and documents the methods.
type Frozen interface {
	Lost() <-chan struct{}
	Thaw() error
}

// Prepare starts CRIU for a dump into dir. Errors: FailedPrecondition if CRIU is missing or too
// old, or the container cannot be dumped.
func (k Dumper) Prepare(ctx context.Context, id string, dir *os.File) (Dump, error) {
	path, err := criu.Locate(k.Node.CRIU)
	if err != nil {
		return nil, errdefs.FailedPrecondition("%w", err)
	}
	d, err := k.Launchers.PrepareDump(ctx, &proto.Dump{ID: id, CRIU: path, Dir: dir})
	if err != nil {
		return nil, err
	}
	return d, nil
}

// freezeTimeout limits the wait until a container is frozen. Containers of its pod that are already
// frozen stay frozen meanwhile.
const freezeTimeout = 5 * time.Second

// Freeze freezes a container. Its monitor thaws it after timeout at the latest. Errors:
// FailedPrecondition if a process in uninterruptible sleep keeps it from freezing.
func (k Dumper) Freeze(ctx context.Context, id, cgroupsPath string, timeout time.Duration) (Frozen, error) {
	group, err := k.Node.Cgroup(cgroupsPath)
	if err != nil {
		return nil, err
	}
	freezeCtx, cancel := context.WithTimeout(ctx, freezeTimeout)
	defer cancel()
	f, err := shim.OpenMonitor(k.Node.Shim(id)).Freeze(freezeCtx, group.FreezerDir(), timeout)
	if err != nil && freezeCtx.Err() != nil && ctx.Err() == nil {
		return nil, errdefs.FailedPrecondition("its processes do not freeze within %v%s", freezeTimeout, unfreezable(group))
	}
	if err != nil {
		return nil, err
	}
	return f, nil
}

// unfreezable names the processes of a cgroup in uninterruptible sleep, which cannot be frozen.
func unfreezable(group *cgroup.Group) string {
	pids, err := group.Members()
	if err != nil {
		return ""
	}
	var text string
	for _, pid := range pids {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err == nil && strings.Contains(string(status), "\nState:\tD") {
			text += fmt.Sprintf("; process %d is in uninterruptible sleep", pid)
		}
	}
	return text
}

// EndLeft ends the CRIUs of an earlier daemon and thaws their containers, because CRIU may have
// frozen a container after its monitor's last thaw. cgroupsPath returns the path of a container's
// cgroup, or "" if the container does not exist. A CRIU that hangs in the kernel is an error.
func (k Dumper) EndLeft(cgroupsPath func(id string) string) error {
	left, err := shim.LeftDumps()
	for _, id := range left {
		k.Log.Warn("ending a checkpoint of an earlier daemon", "container", id)
		err = errors.Join(err, shim.EndLeftDump(id), k.Thaw(cgroupsPath(id)))
	}
	if err != nil {
		return fmt.Errorf("end checkpoints of an earlier daemon: %w", err)
	}
	return nil
}

// Thaw thaws a container and does not ask its monitor. It is no error if the container has no
// cgroup.
func (k Dumper) Thaw(cgroupsPath string) error {
	if cgroupsPath == "" {
		return nil
	}
	group, err := k.Node.Cgroup(cgroupsPath)
	if err != nil {
		return err
	}
	return group.Thaw()
}
