package runtime

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
	"berth/internal/pidfd"
	"berth/sandbox/state"
	"berth/shim"
	"berth/shim/proto"
)

// Find returns the processes of an earlier daemon's container, from the shim directory. If no shim
// lives, Running is nil. The second result holds the recorded processes.
func (k Processes) Find(ctx context.Context, id string) (*Running, proto.PIDs, error) {
	monitorFile, ids, err := k.openMonitor(ctx, id)
	if err != nil || monitorFile == nil {
		return nil, ids, err
	}
	init, err := openInit(ids) // nil after its exit, which the shim is about to report
	if err != nil {
		return nil, ids, errors.Join(err, monitorFile.Close())
	}
	run := newRunning(init, monitorFile, ids.Container(), ids.StartedAt)
	run.signalled.Store(shim.Signalled(k.Node.Shim(id)))
	return run, ids, nil
}

// LeftBehind returns the processes of a container that has no shim any more and whose processes
// survive SIGKILL.
func LeftBehind(ids proto.PIDs) (*Running, error) {
	init, err := openInit(ids)
	if err != nil {
		return nil, err
	}
	return newRunning(init, nil, ids.Container(), ids.StartedAt), nil
}

// openInit returns the pidfd of a container's init, or nil if it has exited or never existed.
func openInit(ids proto.PIDs) (*os.File, error) {
	if ids.InitPID == 0 {
		return nil, nil
	}
	init, err := pidfd.OpenVerified(ids.InitPID, ids.InitStartTime)
	if errors.Is(err, os.ErrProcessDone) {
		return nil, nil
	}
	return init, err
}

// HandoverTimeout bounds the wait for an earlier daemon's launcher. It hands over to a monitor or
// becomes one, or notices that its daemon is gone and undoes the launch.
const HandoverTimeout = 15 * time.Second

// openMonitor returns the pidfd of a container's monitor, or nil if there is no monitor. It waits
// until a working launcher has a monitor, becomes one or exits.
func (k Processes) openMonitor(ctx context.Context, id string) (*os.File, proto.PIDs, error) {
	ctx, cancel := context.WithTimeout(ctx, HandoverTimeout)
	defer cancel()
	for {
		ids, err := shim.ReadShim(k.Node.Shim(id))
		if errors.Is(err, fs.ErrNotExist) {
			return nil, ids, nil
		}
		if err != nil {
			return nil, ids, err
		}
		f, err := pidfd.OpenVerified(ids.MonitorPID, ids.MonitorStartTime)
		if err == nil {
			var ended bool
			// It may be a zombie that its parent does not reap.
			if ended, err = pidfd.Exited(f); ended || err != nil {
				err = errors.Join(err, f.Close())
				f = nil
			}
		}
		if err != nil && !errors.Is(err, os.ErrProcessDone) {
			return nil, ids, err
		}
		if f == nil {
			if now, err := shim.ReadShim(k.Node.Shim(id)); err == nil && now.MonitorPID != ids.MonitorPID {
				continue // a launcher has handed over to a monitor and exited
			}
			return nil, ids, nil
		}
		launching, err := isLauncher(ids.MonitorPID, f)
		if err != nil {
			return nil, ids, errors.Join(fmt.Errorf("inspect the shim of container %s: %w", id, err), f.Close())
		}
		if !launching && ids.InitPID != 0 {
			return f, ids, nil
		}
		waiting := k.Tasks.Sleep(ctx, 5*time.Millisecond, "launcher of an earlier daemon", "container "+id)
		if !waiting {
			k.Log.Error("kill the launcher of an earlier daemon, which does not exit", "container", id, "pid", ids.MonitorPID)
			err = pidfd.Signal(f, unix.SIGKILL)
		} else {
			err = nil
		}
		if err := errors.Join(err, f.Close()); err != nil && !errors.Is(err, os.ErrProcessDone) {
			return nil, ids, err
		}
		if !waiting {
			return nil, ids, nil
		}
	}
}

// readExe reads the path of a process's executable. Tests replace it.
var readExe = func(pid int) (string, error) { return os.Readlink(fmt.Sprintf("/proc/%d/exe", pid)) }

// isLauncher reports whether a shim is still a launcher, and not yet a monitor. An exiting shim
// counts as a launcher, so that the caller checks it again. Any other failure is returned, because
// the shim may be a healthy monitor.
func isLauncher(pid int, shim *os.File) (bool, error) {
	exe, err := readExe(pid)
	if err == nil { // a launcher runs from a sealed memory file, a monitor from its file on disk
		return strings.HasPrefix(exe, "/memfd:"), nil
	}
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil // exiting: its memory is gone (exit_mm), and its pidfd reports the exit some milliseconds later (exit_notify)
	}
	if ended, exitedErr := pidfd.Exited(shim); ended || exitedErr != nil {
		return true, exitedErr
	}
	return false, err
}

// ReadExit returns the exit from the shim's record. lost is true if the record is missing or
// damaged, and exit then says so. Transient read errors are retried until ctx ends, because an
// unknown exit would turn a Job's success into a failure.
func (k Processes) ReadExit(
	ctx context.Context, id string, startedAt time.Time,
) (exit state.Exit, lost bool, err error) {
	left, err := shim.ReadExit(k.Node.Shim(id))
	for isTransient(err) {
		k.Log.Error("read exit record", "container", id, "error", err)
		if !k.Tasks.Sleep(ctx, time.Second, "exit record", "container "+id) {
			return exit, false, err
		}
		left, err = shim.ReadExit(k.Node.Shim(id))
	}
	if err != nil {
		return state.Exit{
			Code:       state.CodeUnknown,
			Reason:     state.ReasonShimLost,
			StartedAt:  startedAt,
			FinishedAt: time.Now(),
			Message:    "the container's shim was lost, its exit code is unknown",
		}, true, nil
	}
	failpoint.Reach("container.exit-read")
	exit = state.Exit{Code: left.Code, Reason: state.ReasonCompleted, StartedAt: startedAt, FinishedAt: left.At}
	switch {
	case left.OOMKilled && left.Code != 0:
		exit.Reason = state.ReasonOOMKilled
	case left.Code != 0:
		exit.Reason = state.ReasonError
	}
	return exit, false, nil
}

// LogLost logs that the shim of a started container was lost, and why its exit is unknown.
func (k Processes) LogLost(id string) {
	_, err := shim.ReadExit(k.Node.Shim(id))
	k.Log.Error("the shim of a container was lost", "container", id, "error", err)
}

// UnreadableExit returns the transient error that prevents reading the exit record of an ended
// shim, for example a lack of file descriptors. If the record is readable or damaged, it returns
// nil. It also returns nil if this daemon watches no ended shim.
func (k Processes) UnreadableExit(id string, run *Running) error {
	if run.Shim == nil {
		return nil
	}
	if ended, err := pidfd.Exited(run.Shim); !ended || err != nil { // closed after the exit was published
		return nil
	}
	if _, err := shim.ReadExit(k.Node.Shim(id)); isTransient(err) {
		return err
	}
	return nil
}

// isTransient reports whether a retry of the read may succeed.
func isTransient(err error) bool {
	for _, e := range []error{unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.EIO} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// KillLeftBehind kills the surviving processes of a container whose shim was lost, so that no
// second instance runs beside them.
func (k Processes) KillLeftBehind(ctx context.Context, id, cgroupsPath string) error {
	ctx, cancel := context.WithTimeout(ctx, KillTimeout)
	defer cancel()
	defer k.Tasks.BeginUpTo(KillTimeout, "exit of surviving processes", "container "+id)()
	group, err := k.Node.Cgroup(cgroupsPath)
	if err != nil {
		return err
	}
	return shim.KillAndDestroy(ctx, id, k.Node.Shim(id), group)
}
