package sandbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/nri"
	"berth/internal/pidfd"
	"berth/internal/task"
	"berth/internal/trace"
	"berth/sandbox/runtime"
	"berth/sandbox/state"
	"berth/shim"
	"berth/shim/proto"
)

// StartContainer starts a created container. A running container is no error. After a failed launch
// the container has exited with the reason StartError.
//
// Errors: NotFound. FailedPrecondition for a container that has exited or whose pod is not ready.
// Otherwise the error of the launch.
func (m *Manager) StartContainer(ctx context.Context, id string) error {
	c, err := m.objects.containers.Find(id)
	if err != nil {
		return err
	}
	return m.tasks.Detach(ctx, task.Timeout, "start", c.String(), func(ctx context.Context) error {
		return m.control.lockContainer(ctx, c, "start", func(c lockedContainer) error { return m.startContainer(ctx, c) })
	})
}

// startContainer starts a created container and publishes the result.
func (m *Manager) startContainer(ctx context.Context, c lockedContainer) error {
	if c.Phase() == state.ContainerRunning {
		return nil
	}
	if err := startable(c); err != nil {
		return err
	}
	m.starts.addContainer(c.container, trace.Of(ctx))
	launchCtx, launched := c.launching.Begin(ctx)
	defer launched()
	p, err := m.podForStart(c) // a stop of the pod before Begin could not cancel it
	if err != nil {
		return err
	}
	if err := c.Move(state.ContainerStarting); err != nil {
		return err
	}
	c.StartedAt, c.Lazy = time.Now(), len(m.keep(c.ContainerSpec)) > 0
	filled := c.Filled
	c.Filled = false
	if err := m.writeContainer(ctx, c); err != nil {
		c.Filled = filled
		return errors.Join(err, c.Move(state.ContainerCreated))
	}
	var started *proto.Started
	if c.Restore != nil && !filled {
		err = m.restorer.refillContainer(launchCtx, p, c)
	}
	if err == nil {
		err = m.plugins.RequestStart(ctx, c)
	}
	if err == nil {
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
	m.plugins.NotifyContainer(ctx, nri.ContainerStarted, c)
	m.killIfUnusable(c)                            // a kill because of a layer may have missed this container
	if _, err := m.readyPod(c.PodID); err != nil { // a stop of the pod may have missed this container
		m.tasks.RetryInBackground("kill", c.String(), func(ctx context.Context) error {
			return m.control.killContainer(ctx, c.container)
		})
		return err
	}
	return nil
}

// podForStart returns the container's pod, or an error if the container may not start in it.
func (m *Manager) podForStart(c lockedContainer) (*pod, error) {
	p, err := m.readyPod(c.PodID)
	if err == nil {
		err = m.filesUsable(c)
	}
	if err == nil && c.Restore != nil {
		err = m.restorer.restorePermitted(!p.Sandboxed(), p.Mappings != nil)
	}
	return p, err
}

// filesUsable returns an error if the container's files may be wrong.
func (m *Manager) filesUsable(c lockedContainer) error {
	if c.WrongFiles != "" {
		return errdefs.FailedPrecondition("container %s: %s", c.ID, c.WrongFiles)
	}
	return m.layersUsable(c.ContainerSpec)
}

// startable returns an error unless a container is created and was never started.
func startable(c lockedContainer) error {
	switch c.Phase() {
	case state.ContainerCreated:
		return nil
	case state.Removed:
		return errdefs.NotFound("container %q does not exist", c.ID)
	case state.ContainerStarting: // by an earlier daemon
		return errdefs.Unavailable("container %s: processes of an earlier start have not exited", c.ID)
	}
	return errdefs.FailedPrecondition("container %s has exited", c.ID)
}

// writeContainer records a container that is being created or started.
func (m *Manager) writeContainer(ctx context.Context, c lockedContainer) error {
	defer trace.Begin(ctx, "record").End()
	return m.records.WriteContainer(c.ContainerSpec, c.ContainerStatus)
}

// launchContainer launches a container from a snapshot, because the launch may outlast the caller's
// lock. Nobody saves the sandbox of its pod meanwhile.
func (m *Manager) launchContainer(ctx context.Context, p *pod, c lockedContainer) (started *proto.Started, err error) {
	planned := c.planned
	c.planned = nil // a repeated start reads the record
	launch := func() (err error) {
		started, err = m.launcher.Start(ctx, p.Info(), c.snapshot(), planned, m.objects.targetPIDNS(c.container))
		return err
	}
	if p.Sandboxed() {
		err = m.tasks.WithLock(ctx, p.sandbox, "start a container in", "sandbox of "+p.String(), launch)
	} else {
		err = launch()
	}
	return started, err
}

// targetPIDNS returns a function that finds the PID namespace of an ephemeral container's target.
// It is called late and needs no lock, because the target may exit at any time.
func (o objects) targetPIDNS(c *container) func() (string, error) {
	return func() (string, error) { return o.findTargetPIDNS(c) }
}

func (o objects) findTargetPIDNS(c *container) (string, error) {
	if !c.joinsTarget() {
		return "", nil
	}
	target, err := o.containers.Find(c.Config.GetLinux().GetSecurityContext().GetNamespaceOptions().GetTargetId())
	if err != nil {
		return "", fmt.Errorf("target of the PID namespace: %w", err)
	}
	if target.PodID != c.PodID {
		return "", errdefs.InvalidArgument("target container %s of the PID namespace is in another pod", target.ID)
	}
	run := target.running.Load()
	if run == nil || run.HasEnded() {
		return "", errdefs.FailedPrecondition("target container %s of the PID namespace is not running", target.ID)
	}
	return fmt.Sprintf("/proc/%d/ns/pid", run.PID), nil
}

// readyPod returns the pod if it is ready and its pause runs. Containers join namespaces by the
// pause's process ID.
func (m *Manager) readyPod(id string) (*pod, error) {
	p, err := m.objects.pods.Find(id)
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

// notReady returns the error for a request to a pod that is not ready. The log has the reason,
// which is a stop or the exit of the pause.
func notReady(p *pod) error {
	return errdefs.Superseded(errdefs.FailedPrecondition("pod sandbox %s is not ready", p.ID))
}

// startInterrupted reverts a start that the daemon's shutdown cancelled, because the container
// itself did not fail. If that fails, the next daemon repeats it, because the record has the phase
// Starting.
func (m *Manager) startInterrupted(ctx context.Context, c lockedContainer, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), runtime.KillTimeout)
	defer cancel()
	if err := m.revertStart(ctx, c); err != nil {
		m.log.Error("revert the start of a container; the next daemon will retry", "container", c.ID, "error", err)
	}
	return errdefs.Unavailable("start container %s: berth is stopping: %w", c.ID, cause)
}

// revertStart moves a container back to created if its start was interrupted, so that the client
// can retry. The launcher has undone its steps, or was lost. If the command ran before the launcher
// noticed the shutdown, it runs a second time. After another failure kubelet would also run it
// again, in a new container.
func (m *Manager) revertStart(ctx context.Context, c lockedContainer) error {
	if err := m.processes.Remove(ctx, c.ID, c.CgroupsPath); err != nil {
		return err
	}
	if err := c.Move(state.ContainerCreated); err != nil {
		return err
	}
	c.StartedAt = time.Time{}
	if err := m.records.WriteContainer(c.ContainerSpec, c.ContainerStatus); err != nil {
		m.log.Warn("record that a start was reverted; the next daemon will revert it again", "container", c.ID,
			"error", err)
	}
	m.control.publishContainer(c)
	return nil
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

// containerStarted publishes a running container and watches its shim. The record keeps the phase
// Starting, and the shim directory has the current state.
func (m *Manager) containerStarted(ctx context.Context, c lockedContainer, s *proto.Started) error {
	defer trace.Begin(ctx, "publish").End()
	run := &running{runtime.Launched(s), m.meters.openContainer(c.container)}
	if err := m.publishRunning(c, run); err != nil {
		return errors.Join(err, run.Close(), run.meter.Close())
	}
	m.meters.oomKills.begin(c.ID, 0)
	m.cfg.Observer.ContainerStarted(c.Config.GetMetadata().GetAttempt())
	m.events.Container("container started", c.container, slog.Int("pid", run.PID))
	m.restorer.dropCheckpoint(c.container)
	m.watchContainer(c.container, run)
	m.meters.sampler.Wake()
	return nil
}

func (m *Manager) publishRunning(c lockedContainer, run *running) error {
	if c.Phase() != state.ContainerRunning { // otherwise the record of an earlier daemon has this phase
		if err := c.Move(state.ContainerRunning); err != nil {
			return err
		}
	}
	c.running.Store(run)
	m.control.publishContainer(c)
	return nil
}

// watchContainer publishes the exit of a container that has a shim.
func (m *Manager) watchContainer(c *container, run *running) {
	m.watchRunning(c, run, func() {
		if !m.processes.AwaitMonitor(run.Running, "shim of container "+c.ID) {
			return // daemon shutdown; the container keeps running
		}
		if exit, settled := m.stopper.Settle(m.control.stopTarget(c), run.StartedAt); settled {
			m.noteExit(c, exit)
		}
		m.processes.AwaitEnd(run.Shim, "shim of container "+c.ID) // a shim that was killed while frozen exits later
	})
}

// watchRunning owns run's files. watch waits for the exit and publishes it.
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

// noteExit fails only during shutdown. The next daemon finds the exit record, or notices that the
// shim was lost.
func (m *Manager) noteExit(c *container, exit state.Exit) {
	_ = m.control.lockContainer(m.tasks.Watchers.Context(), c, "note the exit of", func(c lockedContainer) error {
		m.exited(c, exit)
		return nil
	})
}

// exited records and publishes an exit, notifies plugins, and then removes the runtime state. An
// exit is published even if it cannot be recorded. The runtime state is then the only record, and
// stays until the exit is recorded.
func (m *Manager) exited(c lockedContainer, exit state.Exit) {
	if c.Phase() == state.Removed { // a removed container has no shim and must not reappear
		return
	}
	if err := c.Move(state.ContainerExited); err != nil {
		m.log.Error("publish the exit of a container", "container", c.ID, "error", err)
		return
	}
	if c.WrongFiles != "" {
		exit.Reason, exit.Message = state.ReasonWrongFiles, c.WrongFiles
	}
	c.Exit = &exit
	err := m.records.WriteContainer(c.ContainerSpec, c.ContainerStatus)
	notified := make(chan struct{})
	c.stopNotified.Store(&notified)
	m.control.publishContainer(c)
	m.cfg.Observer.ContainerExited(exit.Reason)
	m.events.Exit(c.container, exit)
	m.restorer.dropCheckpoint(c.container)
	if run := c.running.Swap(nil); run != nil {
		close(run.Exited) // this comes first, because the wait for a kill is short, and plugins may be slow
		m.meters.keepUsage(c.container, run)
		m.meters.sampler.Wake()
	}
	m.meters.countExit(c.container, exit)
	m.plugins.NotifyContainer(m.tasks.Watchers.Context(), nri.ContainerStopped, c)
	if err == nil {
		m.cleanExited(c)
		return
	}
	m.log.Error("record the exit of a container", "container", c.ID, "error", err)
	m.tasks.RetryInBackground("record the exit of", c.String(), func(ctx context.Context) error {
		return m.control.lockContainer(ctx, c.container, "record the exit of", func(c lockedContainer) error {
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

// cleanExited removes the runtime state of an exited container. A failed removal is retried in the
// background. It can fail for lack of file descriptors, for example.
func (m *Manager) cleanExited(c lockedContainer) {
	ctx, cancel := context.WithTimeout(context.Background(), runtime.KillTimeout)
	defer cancel()
	err := m.processes.Remove(ctx, c.ID, c.CgroupsPath)
	if err == nil {
		return
	}
	const what = "remove runtime state of exited"
	m.log.Warn(what+" container", "container", c.ID, "error", err)
	m.tasks.RetryInBackground(what, c.String(), func(ctx context.Context) error {
		return m.control.lockContainer(ctx, c.container, what, func(c lockedContainer) error {
			if c.Phase() != state.ContainerExited {
				return nil
			}
			return m.processes.Remove(ctx, c.ID, c.CgroupsPath)
		})
	})
}

// UpdateContainerResources changes the limits of a created or running container. Zero fields keep
// their value.
func (m *Manager) UpdateContainerResources(ctx context.Context, id string,
	res *runtimeapi.LinuxContainerResources) error {
	c, err := m.objects.containers.Find(id)
	if err != nil {
		return err
	}
	return m.tasks.Detach(ctx, task.Timeout, "update", c.String(), func(ctx context.Context) error {
		return m.control.lockContainer(ctx, c, "update", func(c lockedContainer) error {
			return m.updateResources(ctx, c, res)
		})
	})
}

// ReopenContainerLog makes the shim of a running container open its log file again, after kubelet
// has renamed the file. If it fails, it has created no new file.
func (m *Manager) ReopenContainerLog(ctx context.Context, id string) error {
	c, err := m.objects.containers.Find(id)
	if err != nil {
		return err
	}
	if c.running.Load() == nil {
		return errdefs.FailedPrecondition("container %s is not running", c.ID)
	}
	defer m.tasks.Begin("reopening of its log", c.String())()
	if err := shim.OpenMonitor(m.node.Shim(c.ID)).ReopenLog(ctx); err != nil {
		return fmt.Errorf("reopen log of container %s: %w", c.ID, err)
	}
	return nil
}
