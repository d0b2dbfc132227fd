package shim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/cgroup"
	"berth/internal/pidfd"
	"berth/shim/ociruntime"
	"berth/shim/proto"
)

// RuntimeOf returns the OCI runtime that made the container of a shim directory, from the
// launcher's record. It returns nil for libcontainer, and if there is no container yet.
func RuntimeOf(dir string) (*ociruntime.Runtime, error) {
	data, err := os.ReadFile(filepath.Join(dir, proto.RuntimeFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read runtime record: %w", err)
	}
	r := &ociruntime.Runtime{}
	if err := json.Unmarshal(data, r); err != nil {
		return nil, fmt.Errorf("read runtime record of %s: %w", dir, err)
	}
	return r, nil
}

// GroupOf returns the cgroup of an OCI runtime's container, from its bundle. The error wraps
// fs.ErrNotExist if there is no bundle.
func GroupOf(dir string, r *ociruntime.Runtime) (*cgroup.Group, error) {
	bundle, err := ociruntime.ReadBundle(dir)
	if err != nil {
		return nil, err
	}
	return cgroup.Open(bundle.CgroupsPath, r.SystemdCgroup)
}

// undoTimeout bounds the undo of a launcher that has lost its daemon.
const undoTimeout = 5 * time.Second

// awaitLauncher waits for a launcher that has not made the container's init yet, and kills it if it
// does not exit in time.
func awaitLauncher(ctx context.Context, dir string) error {
	ids, err := ReadShim(dir)
	if unread := (*fs.PathError)(nil); errors.As(err, &unread) && !errors.Is(err, fs.ErrNotExist) {
		return err // the error may be too many open files; the unread record may name a launcher
	}
	if err != nil || ids.InitPID != 0 {
		return nil // if there is no valid record, no launcher is known to be running
	}
	proc, err := pidfd.OpenVerified(ids.MonitorPID, ids.MonitorStartTime)
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("find the launcher of an earlier daemon: %w", err)
	}
	defer proc.Close()
	waiting, cancel := context.WithTimeout(ctx, undoTimeout)
	defer cancel()
	if pidfd.Wait(waiting, proc) == nil {
		return nil
	}
	if err := pidfd.Signal(proc, unix.SIGKILL); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill the launcher of an earlier daemon: %w", err)
	}
	return pidfd.Wait(ctx, proc)
}

// KillAndDestroy kills the processes of a launch and removes its cgroup and the OCI runtime's
// state. Each part may be gone already. It keeps the shim directory, which names the runtime.
//
// It first waits for a launcher of an earlier daemon that is still at work. That launcher will soon
// notice that its daemon has ended. Until then it could create more processes and cgroups.
func KillAndDestroy(ctx context.Context, id, dir string, group *cgroup.Group) error {
	if err := awaitLauncher(ctx, dir); err != nil {
		return err
	}
	r, err := RuntimeOf(dir)
	if err != nil {
		return err
	}
	if r == nil && group.RemoveIdle() {
		return nil
	}
	var deleteErr error
	if r != nil {
		deleteErr = r.Delete(ctx, id)
	}
	if err := group.Kill(ctx); err != nil {
		return errors.Join(err, deleteErr)
	}
	if deleteErr != nil { // perhaps because processes were still running, which are now dead
		deleteErr = r.Delete(ctx, id)
	}
	if errors.Is(deleteErr, fs.ErrNotExist) && !r.Parent() {
		deleteErr = nil // the runtime was uninstalled; its files are removed with the pod
	}
	if deleteErr != nil {
		return fmt.Errorf("remove container %s: %w", id, deleteErr)
	}
	return group.Destroy(ctx)
}
