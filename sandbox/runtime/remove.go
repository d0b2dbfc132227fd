package runtime

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"berth/internal/cgroup"
	"berth/internal/failpoint"
	"berth/shim"
	"berth/shim/ociruntime"
)

// Remove kills the processes of a container or pause, and removes its cgroup, libcontainer state
// and shim directory.
func (k Processes) Remove(ctx context.Context, id, cgroupsPath string) error {
	defer k.Tasks.Begin("exit of its processes", id)()
	group, err := k.Node.Cgroup(cgroupsPath)
	if err != nil {
		return err
	}
	return k.removeGroup(ctx, id, group)
}

func (k Processes) removeGroup(ctx context.Context, id string, group *cgroup.Group) error {
	if err := shim.KillAndDestroy(ctx, id, k.Node.Shim(id), group); err != nil {
		return err
	}
	for _, dir := range []string{filepath.Join(k.Node.Libcontainer(), id), k.Node.Shim(id)} {
		failpoint.Reach("runtime.remove-directory")
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("remove runtime state of %s: %w", id, err)
		}
		failpoint.Reach("runtime.directory-removed")
	}
	return nil
}

// RemoveByID is Remove for an object without a record.
func (k Processes) RemoveByID(ctx context.Context, id string) error {
	r, err := shim.RuntimeOf(k.Node.Shim(id))
	if err != nil {
		return err
	}
	group, err := k.groupByID(id, r)
	switch {
	case err == nil:
		killing, cancel := context.WithTimeout(ctx, KillTimeout)
		err = k.removeGroup(killing, id, group)
		cancel()
	case errors.Is(err, fs.ErrNotExist): // it never had a process
		failpoint.Reach("unrecorded.remove-state")
		err = os.RemoveAll(filepath.Join(k.Node.Libcontainer(), id))
		failpoint.Reach("unrecorded.state-removed")
		err = errors.Join(err, os.RemoveAll(k.Node.Shim(id)))
		failpoint.Reach("unrecorded.shim-removed")
	}
	if err != nil {
		return err
	}
	if r != nil { // "delete" of the program creates the directory again, after the removal of the pod
		failpoint.Reach("unrecorded.remove-root")
		if err := ignoreExisting(os.Remove(r.Root)); err != nil {
			return fmt.Errorf("remove runtime state of %s: %w", id, err)
		}
		failpoint.Reach("unrecorded.root-removed")
	}
	return nil
}

// groupByID returns the cgroup from the state of the runtime program or of libcontainer. The error
// wraps fs.ErrNotExist if neither has state.
func (k Processes) groupByID(id string, r *ociruntime.Runtime) (*cgroup.Group, error) {
	if r != nil {
		return shim.GroupOf(k.Node.Shim(id), r)
	}
	return cgroup.FromState(filepath.Join(k.Node.Libcontainer(), id, "state.json"))
}

// ignoreExisting drops the error of removing a missing or non-empty directory.
func ignoreExisting(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTEMPTY) {
		return nil
	}
	return err
}

// RemoveRoot removes the state directory of a pod's runtime. The caller has removed the containers.
func (k Processes) RemoveRoot(podID string) error {
	failpoint.Reach("runtime.remove-root")
	if err := ociruntime.RemoveRoot(k.Node.OCI(podID)); err != nil {
		return fmt.Errorf("remove runtime state of pod %s: %w", podID, err)
	}
	failpoint.Reach("runtime.root-removed")
	return nil
}
