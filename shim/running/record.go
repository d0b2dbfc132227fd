package running

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/cgroup"
	"berth/internal/failpoint"
	"berth/shim/proto"
)

// Record describes an exec to the process that owns it.
type Record struct {
	Container     string `json:"container"` // ID
	ExecID        string `json:"execID"`    // as in proto.Exec
	Process       int    `json:"process"`   // process ID on the host; 0: not started
	CgroupsPath   string `json:"cgroupsPath,omitempty"`
	SystemdCgroup bool   `json:"systemdCgroup,omitempty"`
	// Dir is the container's shim directory if an OCI runtime started the exec, else empty.
	Dir string `json:"dir,omitempty"`
}

// RecordOf returns the record of a request.
func RecordOf(req *proto.Exec) Record {
	r := Record{Container: req.ID, ExecID: req.ExecID, CgroupsPath: req.CgroupsPath, SystemdCgroup: req.SystemdCgroup}
	if req.Runtime != nil {
		r.Dir = req.Dir
	}
	return r
}

// removeTimeout bounds the wait for the processes of an exec that has lost its launcher. Survivors
// end with their container.
const removeTimeout = 10 * time.Second

// Remove kills the processes of an exec that lost its launcher and removes its cgroup. If the exec
// has no cgroup, the caller kills only the announced process.
func (r Record) Remove() error {
	var err error
	if r.Dir != "" {
		failpoint.Reach("exec.remove-directory")
		err = os.RemoveAll(filepath.Join(r.Dir, proto.ExecName(r.ExecID)))
		failpoint.Reach("exec.directory-removed")
	}
	if r.CgroupsPath == "" {
		return err
	}
	group, openErr := cgroup.Open(r.CgroupsPath, r.SystemdCgroup)
	if openErr != nil {
		return errors.Join(err, openErr)
	}
	for _, hierarchy := range proto.ExecHierarchies {
		dir := group.Paths()[hierarchy]
		if dir == "" {
			continue
		}
		dir = filepath.Join(dir, proto.ExecName(r.ExecID))
		failpoint.Reach("exec.kill-left")
		err = errors.Join(err, cgroup.KillDir(dir, removeTimeout), removeGroup(dir))
		failpoint.Reach("exec.left-killed")
	}
	return err
}

// Pauses between two attempts to remove the remains of an exec.
const (
	firstRemovalRetry   = time.Second
	slowestRemovalRetry = time.Minute
)

// RemoveUntil repeats Remove until it succeeds or ctx ends. It fails, for example, for lack of file
// descriptors. Each failure is logged.
func (r Record) RemoveUntil(ctx context.Context, log *slog.Logger) {
	for pause := firstRemovalRetry; ; pause = min(2*pause, slowestRemovalRetry) {
		err := r.Remove()
		if err == nil {
			return
		}
		log.Error("remove what a lost exec has left", "container", r.Container, "exec", r.ExecID, "error", err)
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// removeGroup removes a cgroup that has no processes, if it exists. The kernel may return EBUSY for
// a moment.
func removeGroup(dir string) error {
	for deadline := time.Now().Add(removeTimeout); ; time.Sleep(time.Millisecond) {
		err := unix.Rmdir(dir)
		if err == nil || err == unix.ENOENT {
			return nil
		}
		if err != unix.EBUSY || time.Now().After(deadline) {
			return &os.PathError{Op: "remove cgroup", Path: dir, Err: err}
		}
	}
}
