package sandbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"time"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/nri"
	"berth/internal/pidfd"
	"berth/internal/task"
	"berth/internal/trace"
	"berth/oci"
	"berth/sandbox/runtime"
	"berth/sandbox/state"
	"berth/shim"
	"berth/shim/proto"
)

// StartContainer starts a created container. A running container is no error.
//
// Errors: NotFound; FailedPrecondition for a container that has exited or whose pod is not ready;
// else the error of the launch. After a failed launch the container has exited with the reason
// StartError.
func (m *Manager) StartContainer(ctx context.Context, id string) error {
	c, err := m.containers.Find(id)
	if err != nil {
		return err
	}
	return m.tasks.Detach(ctx, task.Limit, "start", c.String(), func(ctx context.Context) error {
		return m.lockContainer(ctx, c, "start", func(c lockedContainer) error { return m.startContainer(ctx, c) })
	})
}

// startContainer starts a created container and publishes the result.
func (m *Manager) startContainer(ctx context.Context, c lockedContainer) error {
	switch {
	case c.Phase() == state.Removed:
		return errdefs.NotFound("container %q does not exist", c.ID)
	case c.Phase() == state.ContainerRunning:
		return nil
	case c.Phase() == state.ContainerStarting: // by an earlier daemon
		return errdefs.Unavailable("container %s: what an earlier start left of it has not ended", c.ID)
	case c.Phase() != state.ContainerCreated:
		return errdefs.FailedPrecondition("container %s has exited", c.ID)
	}
	c.started.Store(trace.Of(ctx))
	launchCtx, launched := c.launching.Begin(ctx)
	defer launched()
	p, err := m.readyPod(c.PodID) // a stop that has not seen the launch begin is seen by this
	if err != nil {
		return err
	}
	if err := c.Move(state.ContainerStarting); err != nil {
		return err
	}
	c.StartedAt = time.Now()
	if err := m.writeContainer(ctx, c); err != nil {
		return errors.Join(err, c.Move(state.ContainerCreated))
	}
	var started *proto.Started
	if err = m.askToStart(ctx, c); err == nil {
		started, err = m.launchContainer(launchCtx, p, c)
	}
	if err != nil && ctx.Err() != nil && m.tasks.Operations.Context().Err() != nil {
		return m.startInterrupted(ctx, c, err)
	}
	if err != nil && errors.Is(context.Cause(launchCtx), runtime.ErrStopped) {
		err = errdefs.Superseded(errdefs.FailedPrecondition("%v: %v", runtime.ErrStopped, err))
	}
	if err != nil {
		return m.startFailed(c, err)
	}
	if err := m.containerStarted(ctx, c, started); err != nil {
		return err
	}
	m.tellOfContainer(ctx, nri.ContainerStarted, c)
	if _, err := m.readyPod(c.PodID); err != nil { // stopped meanwhile: its stop may have missed us
		m.tasks.RetryInBackground("kill", c.String(), func(ctx context.Context) error {
			return m.killContainer(ctx, c.container)
		})
		return err
	}
	return nil
}

// launchContainer launches a container from a snapshot: the launch may go on when the caller has
// released the lock.
func (m *Manager) launchContainer(ctx context.Context, p *pod, c lockedContainer) (*proto.Started, error) {
	return m.launcher.Start(ctx, p.Info(), c.snapshot(), m.targetPIDNS(c.container))
}

// readyPod finds a pod that is ready, and asks its pause whether that still
// holds: containers join namespaces by its process ID.
func (m *Manager) readyPod(id string) (*pod, error) {
	p, err := m.pods.Find(id)
	if err != nil {
		return nil, err
	}
	pause := p.pause.Load()
	if !p.info.Load().Ready() || pause == nil {
		return nil, notReady(p)
	}
	ended, err := pidfd.Exited(pause)
	if err != nil && !errors.Is(err, os.ErrClosed) {
		return nil, fmt.Errorf("pause of pod sandbox %s: %w", p.ID, err)
	}
	if ended || err != nil {
		return nil, fmt.Errorf("%w: its pause has ended", notReady(p))
	}
	return p, nil
}

// notReady refuses something in a pod that is not ready. Why it is not was logged, or will be: it
// is being stopped, or has lost its pause.
func notReady(p *pod) error {
	return errdefs.Superseded(errdefs.FailedPrecondition("pod sandbox %s is not ready", p.ID))
}

// startInterrupted takes a start back that the daemon's shutdown cancelled, because the container
// did not fail. If that fails, the next daemon repeats it: the record says that the container was
// being started.
func (m *Manager) startInterrupted(ctx context.Context, c lockedContainer, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), runtime.KillWait)
	defer cancel()
	if err := m.takeStartBack(ctx, c); err != nil {
		m.log.Error("take the start of a container back; the next daemon will", "container", c.ID, "error", err)
	}
	return errdefs.Unavailable("start container %s: berth is stopping: %w", c.ID, cause)
}

// startFailed publishes a container that never ran, and returns the cause.
func (m *Manager) startFailed(c lockedContainer, cause error) error {
	m.exited(c, state.Exit{
		Code:       state.CodeStartError,
		Reason:     state.ReasonStartError,
		Message:    cause.Error(),
		FinishedAt: time.Now(),
	})
	return fmt.Errorf("start container %s: %w", c.ID, cause)
}

// containerStarted publishes a running container and watches its shim. The record
// on disk still says "starting": the shim directory knows the rest.
func (m *Manager) containerStarted(ctx context.Context, c lockedContainer, s *proto.Started) error {
	defer trace.Begin(ctx, "publish").End()
	run := &running{runtime.Launched(s), m.containerMeter(c.container)}
	if err := m.publishRunning(c, run); err != nil {
		return errors.Join(err, run.Close(), run.meter.Close())
	}
	m.logContainer("container started", c.container, slog.Int("pid", run.PID))
	m.watchContainer(c.container, run)
	m.sampler.Wake()
	return nil
}

// publishRunning publishes a container that runs.
func (m *Manager) publishRunning(c lockedContainer, run *running) error {
	if c.Phase() != state.ContainerRunning { // else an earlier daemon recorded it
		if err := c.Move(state.ContainerRunning); err != nil {
			return err
		}
	}
	c.running.Store(run)
	m.publishContainer(c)
	return nil
}

// watchContainer publishes the exit of a container that has a shim.
func (m *Manager) watchContainer(c *container, run *running) {
	m.watchRunning(c, run, func() {
		if !m.processes.AwaitShim(run.Running, "shim of container "+c.ID) {
			return // the daemon is ending, the container goes on
		}
		if exit, settled := m.stopper.Settle(m.stopTarget(c), run.StartedAt); settled {
			m.noteExit(c, exit)
		}
		m.processes.AwaitEnd(run.Shim, "shim of container "+c.ID) // one that was killed while it is frozen ends, and is reaped, later
	})
}

// watchRunning owns run's files; watch waits for the exit and publishes it.
func (m *Manager) watchRunning(c *container, run *running, watch func()) {
	started := m.tasks.Watchers.Spawn(func() {
		defer m.closeRunning(c, run)
		watch()
	})
	if !started {
		m.closeRunning(c, run)
	}
}

func (m *Manager) closeRunning(c *container, run *running) {
	if err := errors.Join(run.Close(), run.meter.Close()); err != nil {
		m.log.Warn("close pidfds and statistics", "container", c.ID, "error", err)
	}
}

// noteExit fails only when the daemon is ending; the next one finds the exit record, or that the
// shim was lost.
func (m *Manager) noteExit(c *container, exit state.Exit) {
	_ = m.lockContainer(m.tasks.Watchers.Context(), c, "note the exit of", func(c lockedContainer) error {
		m.exited(c, exit)
		return nil
	})
}

// exited records and publishes an exit, notifies plugins, and then removes the runtime state. An
// exit that cannot be recorded is published too. The runtime state is then the only record, so it
// stays until the exit is recorded.
func (m *Manager) exited(c lockedContainer, exit state.Exit) {
	if c.Phase() == state.Removed { // nothing of it may come back; it had no shim then
		return
	}
	if err := c.Move(state.ContainerExited); err != nil {
		m.log.Error("publish an exit", "container", c.ID, "error", err)
		return
	}
	c.Exit = &exit
	err := m.records.WriteContainer(c.ContainerSpec, c.ContainerStatus)
	told := make(chan struct{})
	c.stopNotified.Store(&told)
	m.publishContainer(c)
	m.logExit(c.container, exit)
	if run := c.running.Swap(nil); run != nil {
		close(run.Exited) // first: the wait for a kill is short, and plugins take their time
		m.keepUsage(c.container, run)
		m.sampler.Wake()
	}
	m.tellOfContainer(m.tasks.Watchers.Context(), nri.ContainerStopped, c)
	if err == nil {
		m.cleanExited(c)
		return
	}
	m.log.Error("record the exit", "container", c.ID, "error", err)
	m.tasks.RetryInBackground("record the exit of", c.String(), func(ctx context.Context) error {
		return m.lockContainer(ctx, c.container, "record the exit of", func(c lockedContainer) error {
			if c.Phase() != state.ContainerExited {
				return nil
			}
			if err := m.records.WriteContainer(c.ContainerSpec, c.ContainerStatus); err != nil {
				return err
			}
			m.cleanExited(c)
			return nil
		})
	})
}

// cleanExited removes the runtime state of an exited container. A removal that fails, for lack of
// file descriptors for example, is retried in the background or with the container's removal.
func (m *Manager) cleanExited(c lockedContainer) {
	ctx, cancel := context.WithTimeout(context.Background(), runtime.KillWait)
	defer cancel()
	err := m.processes.Remove(ctx, c.ID, c.CgroupsPath)
	if err == nil {
		return
	}
	const what = "remove runtime state of exited"
	m.log.Warn(what+" container", "container", c.ID, "error", err)
	m.tasks.RetryInBackground(what, c.String(), func(ctx context.Context) error {
		return m.lockContainer(ctx, c.container, what, func(c lockedContainer) error {
			if c.Phase() != state.ContainerExited {
				return nil
			}
			return m.processes.Remove(ctx, c.ID, c.CgroupsPath)
		})
	})
}

// StopContainer sends the container's stop signal, waits up to timeout for the exit, and then kills
// the container. A zero timeout kills it at once. A container that does not run or does not exist
// is no error. A container that is being started is stopped after its start. If the start takes
// longer than timeout, the launch is cancelled.
func (m *Manager) StopContainer(ctx context.Context, id string, timeout time.Duration) error {
	c, err := m.containers.Find(id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	limit := task.Limit
	if timeout < math.MaxInt64-limit {
		limit += timeout
	}
	return m.tasks.Detach(ctx, limit, "stop", c.String(), func(ctx context.Context) error {
		return m.stopContainer(ctx, c, timeout)
	})
}

// stopContainer returns when the container has ended and plugins were told.
func (m *Manager) stopContainer(ctx context.Context, c *container, timeout time.Duration) error {
	if err := m.endContainer(ctx, c, timeout); err != nil {
		return err
	}
	return m.waitNotified(ctx, c)
}

// endContainer holds no lock while it waits, because the exit is published under it.
func (m *Manager) endContainer(ctx context.Context, c *container, timeout time.Duration) error {
	var run *running
	overdue := time.AfterFunc(min(timeout, math.MaxInt64-runtime.KillWait)+runtime.KillWait, c.launching.GiveUp)
	err := m.lockContainer(ctx, c, "stop", func(c lockedContainer) error { run = c.running.Load(); return nil })
	overdue.Stop()
	if err != nil || run == nil {
		return err
	}
	return m.stopper.Stop(ctx, m.stopTarget(c), run.Running, stopSignal(c), timeout)
}

// killContainer kills a container and waits for its exit, see runtime.Stopper. A container that
// does not run is no error. The caller must not hold the container's lock, because the exit is
// published under it.
func (m *Manager) killContainer(ctx context.Context, c *container) error {
	return m.stopper.Kill(ctx, m.stopTarget(c))
}

// stopTarget returns what runtime.Stopper needs of a container.
func (m *Manager) stopTarget(c *container) runtime.StopTarget {
	return runtime.StopTarget{
		ID:          c.ID,
		CgroupsPath: c.CgroupsPath,
		Runtime:     m.runtimeOf(c),
		Running: func() *runtime.Running {
			if run := c.running.Load(); run != nil {
				return run.Running
			}
			return nil
		},
	}
}

// stopSignal is the signal that asks the container to end: the config's, else the
// image's, else TERM.
func stopSignal(c *container) unix.Signal {
	return oci.StopSignal(c.Config.GetStopSignal(), c.Image.Config.StopSignal)
}

// UpdateContainerResources changes the limits of a container that is created or
// runs; fields that are zero keep their value.
func (m *Manager) UpdateContainerResources(ctx context.Context, id string,
	res *runtimeapi.LinuxContainerResources) error {
	c, err := m.containers.Find(id)
	if err != nil {
		return err
	}
	return m.tasks.Detach(ctx, task.Limit, "update", c.String(), func(ctx context.Context) error {
		return m.lockContainer(ctx, c, "update", func(c lockedContainer) error { return m.updateResources(ctx, c, res) })
	})
}

// ReopenContainerLog makes the shim of a running container open its log file
// anew, after kubelet has renamed it. If that fails no new file exists.
func (m *Manager) ReopenContainerLog(ctx context.Context, id string) error {
	c, err := m.containers.Find(id)
	if err != nil {
		return err
	}
	if c.running.Load() == nil {
		return errdefs.FailedPrecondition("container %s is not running", c.ID)
	}
	defer m.tasks.Begin("its monitor to open its log anew", c.String())()
	if err := shim.OpenMonitor(m.dirs.Shim(c.ID)).ReopenLog(ctx); err != nil {
		return fmt.Errorf("reopen log of container %s: %w", c.ID, err)
	}
	return nil
}
