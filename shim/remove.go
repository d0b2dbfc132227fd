package shim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"berth/internal/cgroup"
	"berth/shim/ociruntime"
	"berth/shim/record"
)

// RuntimeOf returns the runtime that made the container of a shim directory, as the
// launcher wrote it down. It is nil if that was libcontainer, or nobody yet.
func RuntimeOf(dir string) (*ociruntime.Runtime, error) {
	data, err := os.ReadFile(filepath.Join(dir, record.RuntimeFile))
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

// GroupOf returns the cgroup of a container that a runtime's program made, according
// to its bundle. The error wraps fs.ErrNotExist if there is none.
func GroupOf(dir string, r *ociruntime.Runtime) (*cgroup.Group, error) {
	bundle, err := ociruntime.ReadBundle(dir)
	if err != nil {
		return nil, err
	}
	return cgroup.Open(bundle.CgroupsPath, r.SystemdCgroup)
}

// KillAndDestroy ends the processes of a launch and removes its cgroup; of a container
// that a runtime's program made it removes what that knows of it, too. All of it may be
// gone already. It leaves the shim directory, which knows the runtime.
func KillAndDestroy(ctx context.Context, id, dir string, group *cgroup.Group) error {
	r, err := RuntimeOf(dir)
	if err != nil {
		return err
	}
	var deleteErr error
	if r != nil {
		deleteErr = r.Delete(ctx, id)
	}
	if err := group.Kill(ctx); err != nil {
		return errors.Join(err, deleteErr)
	}
	if deleteErr != nil { // perhaps for its processes
		deleteErr = r.Delete(ctx, id)
	}
	if errors.Is(deleteErr, fs.ErrNotExist) && !r.Sandboxed {
		deleteErr = nil // the program was uninstalled; what it left are files, which go with the pod
	}
	if deleteErr != nil {
		return fmt.Errorf("remove container %s: %w", id, deleteErr)
	}
	return group.Destroy(ctx)
}
