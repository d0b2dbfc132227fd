package runtime

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
	"berth/internal/lograte"
	"berth/sandbox/state"
	"berth/shim"
	"berth/shim/ociruntime"
)

// Stopper stops containers. Its methods may be called concurrently.
type Stopper struct {
	processes Processes
	stuck     lograte.Limiter // rate limit of warnings about processes that survive SIGKILL
}

// NewStopper returns a Stopper for these processes.
func NewStopper(processes Processes) *Stopper { return &Stopper{processes: processes} }

// StopTarget identifies a container to Stopper.
type StopTarget struct {
	ID          string
	CgroupsPath string
	Runtime     *ociruntime.Runtime // nil: libcontainer
	Running     func() *Running     // its processes; nil when its exit is published
}

func (c StopTarget) String() string { return "container " + c.ID }

// Stop sends the signal, unless an earlier stop has sent it, waits up to timeout for the exit, and
// then kills the container. A zero timeout kills it at once.
func (k *Stopper) Stop(ctx context.Context, c StopTarget, run *Running, signal unix.Signal,
	timeout time.Duration) error {
	if timeout > 0 {
		if err := k.signalOnce(ctx, c, run, signal); err != nil {
			k.processes.Log.Warn("kill a container, because its stop signal failed", "container", c.ID, "error", err)
			return k.Kill(ctx, c)
		}
		end := k.processes.Tasks.BeginUpTo(timeout, "exit", c.String())
		exited := k.processes.AwaitStop(ctx, c.ID, run, timeout)
		end()
		if exited {
			return nil
		}
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("stop container %s: %w", c.ID, err)
		}
	}
	return k.Kill(ctx, c)
}

// signalOnce sends the stop signal once in the life of a container, because many programs give up
// an orderly end at the second one. kubelet repeats a stop after a restart of the daemon or of
// kubelet, and when the grace period becomes shorter.
func (k *Stopper) signalOnce(ctx context.Context, c StopTarget, run *Running, signal unix.Signal) error {
	if !run.signalled.CompareAndSwap(false, true) {
		return nil
	}
	failpoint.Reach("container.signal")
	if err := k.processes.Signal(ctx, c.ID, c.Runtime, run, signal); err != nil {
		run.signalled.Store(false)
		return err
	}
	failpoint.Reach("container.signalled")
	if err := shim.NoteSignalled(k.processes.Node.Shim(c.ID)); err != nil {
		k.processes.Log.Warn("the next daemon may repeat a stop signal", "container", c.ID, "error", err)
	}
	return nil
}

// Kill kills a container and waits for its exit. It repeats the kill until the exit is published. A
// container that does not run is no error. An unreadable exit record is an error, and the
// container's watcher retries the read.
func (k *Stopper) Kill(ctx context.Context, c StopTarget) error {
	defer k.processes.Tasks.Begin("exit after SIGKILL", c.String())()
	for delay := 50 * time.Millisecond; ; delay = min(2*delay, time.Second) {
		run := c.Running()
		if run == nil {
			return nil
		}
		err := k.processes.Kill(ctx, c.ID, c.CgroupsPath, c.Runtime, run)
		if run.MonitorHangs() {
			failpoint.Reach("container.kill-shim")
			err = errors.Join(err, k.processes.EndShim(ctx, c.ID, c.CgroupsPath, c.Runtime, run))
			failpoint.Reach("container.shim-killed")
		}
		if k.processes.AwaitExit(ctx, run, delay) {
			return nil
		}
		if unreadable := k.processes.UnreadableExit(c.ID, run); unreadable != nil {
			return fmt.Errorf("read the exit of container %s: %w", c.ID, unreadable)
		}
		if ctx.Err() != nil {
			unkillable := fmt.Errorf("kill container %s: process %d does not exit: %w", c.ID, run.PID, ctx.Err())
			return errors.Join(unkillable, err)
		}
	}
}

// Settle returns the exit of a container whose shim has exited, from the exit record. If the shim
// was lost, it first kills all surviving processes. settled is false when the daemon shuts down.
func (k *Stopper) Settle(c StopTarget, startedAt time.Time) (exit state.Exit, settled bool) {
	exit, lost, err := k.processes.ReadExit(k.processes.Tasks.Watchers.Context(), c.ID, startedAt)
	switch {
	case err != nil:
		return state.Exit{}, false
	case lost:
		k.processes.LogLost(c.ID)
		return k.SettleLost(c, exit)
	}
	return exit, true
}

// SettleLost kills the surviving processes of a container whose shim was lost. The returned exit
// has the time of their exit. settled is false when the daemon shuts down.
func (k *Stopper) SettleLost(c StopTarget, exit state.Exit) (_ state.Exit, settled bool) {
	ctx := k.processes.Tasks.Watchers.Context()
	for err := k.killLeft(ctx, c); err != nil; err = k.killLeft(ctx, c) {
		if ctx.Err() == nil {
			k.stuck.Warn(k.processes.Log, "processes of a lost shim survive SIGKILL; the kill is retried", "container", c.ID,
				"error",
				err)
		}
		if !k.processes.Tasks.Sleep(ctx, time.Second, "retry of the kill of surviving processes", c.String()) {
			return state.Exit{}, false
		}
	}
	exit.FinishedAt = time.Now()
	return exit, true
}

func (k *Stopper) killLeft(ctx context.Context, c StopTarget) error {
	return k.processes.KillLeftBehind(ctx, c.ID, c.CgroupsPath)
}
