package runtime

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
	"berth/internal/pidfd"
	"berth/internal/task"
	"berth/sandbox/state"
	"berth/shim"
	"berth/shim/ociruntime"
	"berth/shim/proto"
)

// Processes finds, signals, watches and removes the processes of pauses and containers.
type Processes struct {
	Node  state.Node
	Tasks *task.Runner
	Log   *slog.Logger
}

// KillTimeout bounds the wait for killed processes. A process that takes longer is blocked in the
// kernel. The rest of its pod is removed, but the process stays.
const KillTimeout = 10 * time.Second

// MonitorTimeout bounds the time between a container's exit and its monitor's report. It is less
// than KillTimeout, so that a late report does not fail the stop of a pod.
const MonitorTimeout = KillTimeout / 2

// stoppedTimeout is MonitorTimeout for a monitor in a stopped state, which cannot report.
const stoppedTimeout = 2 * time.Second

// orphanTimeout bounds the wait for the other processes of an exited init, before the daemon writes
// the exit record in place of the shim.
const orphanTimeout = 2 * time.Second

// Running holds the processes of a container that has a shim.
type Running struct {
	Init, Shim *os.File // pidfds; nil if the process had exited when recovery found the container
	PID        int      // of the container's init
	StartedAt  time.Time
	Exited     chan struct{} // closed when the exit is published

	signalled atomic.Bool // it got its stop signal, or is getting it

	left    atomic.Pointer[time.Time] // first time that Init was seen exited while the shim ran
	settled context.Context           // done when the daemon has written the exit record and killed the shim, even if the shim is frozen
	settle  context.CancelFunc
}

// Launched returns the processes of a launch.
func Launched(s *proto.Started) *Running {
	r := &Running{Init: s.Init, Shim: s.Shim, PID: s.Container(), StartedAt: s.StartedAt, Exited: make(chan struct{})}
	r.settled, r.settle = context.WithCancel(context.Background())
	return r
}

func newRunning(init, shim *os.File, pid int, startedAt time.Time) *Running {
	return Launched(&proto.Started{Init: init, Shim: shim, PIDs: proto.PIDs{InitPID: pid, StartedAt: startedAt}})
}

// Close closes the pidfds.
func (r *Running) Close() error {
	r.settle()
	var errs []error
	for _, f := range []*os.File{r.Shim, r.Init} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}

// EndShim kills a hanging shim and writes the exit record in its place. It reads the status of init
// first: init is the shim's child, and its status is lost with the shim. AwaitMonitor then returns,
// even if the shim is frozen and exits only when it is thawed.
func (k Processes) EndShim(ctx context.Context, id, cgroupsPath string, r *ociruntime.Runtime, run *Running) error {
	writeErr := k.writeExit(ctx, id, cgroupsPath, r, run)
	if writeErr != nil { // the exit code is then unknown
		k.Log.Error("record the exit of a container with a hanging shim", "container", id, "error", writeErr)
	}
	if err := signal(run.Shim, unix.SIGKILL); err != nil {
		return err
	}
	if writeErr == nil {
		run.settle()
	}
	return nil
}

// writeExit writes the exit record from init's status, unless the shim has written it. Like the
// shim, it first kills all other processes of the cgroup, because kubelet starts the next instance
// after the exit.
func (k Processes) writeExit(ctx context.Context, id, cgroupsPath string, r *ociruntime.Runtime, run *Running) error {
	if _, err := shim.ReadExit(k.Node.Shim(id)); err == nil {
		return nil
	}
	if r != nil && r.Parent() {
		return errors.New("only the shim can read the runtime's exit code") // run.Init is "runsc wait" or berth-task, which exit with 0
	}
	if run.Init == nil {
		return errors.New("its init exited earlier")
	}
	status, err := pidfd.EndStatus(run.Init)
	if err != nil {
		return err
	}
	exit := proto.Exit{Code: int32(status.ExitStatus()), At: *run.left.Load()}
	if status.Signaled() {
		exit.Signal = int(status.Signal())
		exit.Code = 128 + int32(exit.Signal)
	}
	group, err := k.Node.Cgroup(cgroupsPath)
	if err != nil {
		return err
	}
	kills, err := group.OOMKills()
	if err != nil {
		return err
	}
	exit.OOMKilled = kills > 0
	// The exit is recorded even if the caller's context has ended.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), orphanTimeout)
	defer cancel()
	if err := group.Kill(ctx); err != nil {
		return err
	}
	return shim.WriteExit(k.Node.Shim(id), exit)
}

// Signal sends a signal to the init of a container. r is its runtime, nil for libcontainer. A
// sandboxing runtime sends the signal itself. An exited init is no error.
func (k Processes) Signal(ctx context.Context, id string, r *ociruntime.Runtime, run *Running, sig unix.Signal) error {
	if r == nil || !r.Parent() || run.HasEnded() {
		return run.signal(sig)
	}
	ctx, cancel := context.WithTimeout(ctx, KillTimeout)
	defer cancel()
	err := r.Kill(ctx, id, sig)
	if err != nil && run.HasEnded() {
		return nil
	}
	return err
}

// Kill sends SIGKILL to the container's init and to its cgroup. It signals the cgroup even if the
// first step fails, because a runtime program may hang.
func (k Processes) Kill(ctx context.Context, id, cgroupsPath string, r *ociruntime.Runtime, run *Running) error {
	failpoint.Reach("container.kill")
	err := k.Signal(ctx, id, r, run, unix.SIGKILL)
	if err != nil {
		err = fmt.Errorf("kill container %s: %w", id, err)
	}
	failpoint.Reach("container.killed")
	group, openErr := k.Node.Cgroup(cgroupsPath)
	if openErr != nil {
		return errors.Join(err, openErr)
	}
	return errors.Join(err, group.Signal())
}

// signal sends a signal to the init. An exited init is no error.
func (r *Running) signal(sig unix.Signal) error { return signal(r.Init, sig) }

func signal(process *os.File, sig unix.Signal) error {
	if process == nil {
		return nil
	}
	return ignoreDone(pidfd.Signal(process, sig))
}

// ignoreDone drops the errors of a process that has exited or whose pidfd was closed.
func ignoreDone(err error) error {
	if errors.Is(err, os.ErrProcessDone) || errors.Is(err, os.ErrClosed) {
		return nil
	}
	return err
}

// End kills a process and waits for its exit. An exited process is no error.
func (k Processes) End(ctx context.Context, process *os.File) error {
	failpoint.Reach("process.end")
	err := signal(process, unix.SIGKILL)
	failpoint.Reach("process.ending")
	if err != nil {
		return err
	}
	return ignoreDone(pidfd.Wait(ctx, process))
}

// MonitorHangs reports whether the monitor outlived its container for longer than MonitorTimeout,
// because it is stopped or blocked on a log. The time counts from the first call.
func (r *Running) MonitorHangs() bool {
	if !r.HasEnded() && !r.isZombie() {
		return false
	}
	if r.left.Load() == nil {
		now := time.Now() // keeps its monotonic reading
		r.left.CompareAndSwap(nil, &now)
	}
	timeout := MonitorTimeout
	if r.shimIsStopped() {
		timeout = stoppedTimeout
	}
	return time.Since(*r.left.Load()) > timeout
}

// isZombie reports whether all threads of init have exited. Its pidfd does not report that while
// another process traces a thread.
func (r *Running) isZombie() bool {
	if r.Init == nil {
		return false
	}
	_, err := pidfd.EndStatus(r.Init)
	return err == nil
}

// shimIsStopped reports whether the shim is in a stopped state. A shim that cannot be inspected is
// assumed to work.
func (r *Running) shimIsStopped() bool {
	if r.Shim == nil {
		return false
	}
	stopped, err := pidfd.Stopped(r.Shim)
	return stopped && err == nil
}

// HasEnded reports whether init has exited. Its process ID is then invalid.
func (r *Running) HasEnded() bool {
	if r.Init == nil {
		return true
	}
	ended, err := pidfd.Exited(r.Init)
	return ended || err != nil
}

// AwaitExit waits for run.Exited until timeout or ctx ends. The caller registers the wait.
func (k Processes) AwaitExit(ctx context.Context, run *Running, timeout time.Duration) bool {
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case <-run.Exited:
		return true
	case <-timer.C:
	case <-ctx.Done():
	}
	return false
}

// pollInterval is the time between two checks of a container that is being stopped.
const pollInterval = 500 * time.Millisecond

// AwaitStop is AwaitExit, but returns early in two cases. Either the exit record is unreadable, or
// the shim is stopped and cannot report the exit. A working shim on a slow disk gets the full time,
// because killing it would lose the exit.
func (k Processes) AwaitStop(ctx context.Context, id string, run *Running, timeout time.Duration) bool {
	for begin := time.Now(); ; {
		left := timeout - time.Since(begin)
		if k.AwaitExit(ctx, run, min(left, pollInterval)) {
			return true
		}
		if left <= pollInterval || ctx.Err() != nil || run.MonitorHangs() && run.shimIsStopped() ||
			k.UnreadableExit(id, run) != nil {
			return false
		}
	}
}

// AwaitEnd waits for the exit of a process. It returns false when the daemon shuts down. If the
// pidfd fails, it retries, because the process may run.
func (k Processes) AwaitEnd(process *os.File, object string) bool {
	return k.awaitEnd(process, object, context.Background())
}

// AwaitMonitor is AwaitEnd for a container's shim. It also returns after EndShim replaced the shim.
func (k Processes) AwaitMonitor(run *Running, object string) bool {
	return k.awaitEnd(run.Shim, object, run.settled)
}

// awaitEnd waits until the process exits or enough is done.
func (k Processes) awaitEnd(process *os.File, object string, enough context.Context) bool {
	ctx, cancel := context.WithCancel(k.Tasks.Watchers.Context())
	defer cancel()
	defer context.AfterFunc(enough, cancel)()
	for {
		err := pidfd.Wait(ctx, process)
		if k.Tasks.Watchers.Context().Err() != nil {
			return false
		}
		if err == nil || enough.Err() != nil {
			return true
		}
		k.Log.Error("watch a process; the watch is retried", "object", object, "error", err)
		if !k.Tasks.Sleep(k.Tasks.Watchers.Context(), time.Second, "retry of the watch", object) {
			return false
		}
	}
}
