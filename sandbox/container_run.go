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

// StartContainer starts a created container. One that runs already is no error.
//
// Errors: NotFound, FailedPrecondition for a container that has exited or whose pod is
// not ready; else the launch's own, after which the container has exited with
// reason StartError.
func (m *Manager) StartContainer(ctx context.Context, id string) error {
	c, err := m.containers.Find(id)
	if err != nil {
		return err
	}
	return m.tasks.Detach(ctx, task.Limit, "start", c.String(), func(ctx context.Context) error {
		return m.tasks.WithTurn(ctx, c.turn, "start", c.String(), func() error { return m.startContainer(ctx, c) })
	})
}

// startContainer needs the container's turn.
func (m *Manager) startContainer(ctx context.Context, c *container) error {
	switch {
	case c.removed:
		return errdefs.NotFound("container %q does not exist", c.id)
	case c.rec.Phase == state.ContainerRunning:
		return nil
	case c.rec.Phase == state.ContainerStarting: // by an earlier daemon
		return errdefs.Unavailable("container %s: what an earlier start left of it has not ended", c.id)
	case c.rec.Phase != state.ContainerCreated:
		return errdefs.FailedPrecondition("container %s has exited", c.id)
	}
	c.started.Store(trace.Of(ctx))
	launchCtx, launched := c.launching.Begin(ctx)
	defer launched()
	p, err := m.readyPod(c.podID) // a stop that has not seen the launch begin is seen by this
	if err != nil {
		return err
	}
	c.rec.Phase, c.rec.StartedAt = state.ContainerStarting, time.Now()
	if err := m.writeContainer(ctx, c); err != nil {
		c.rec.Phase = state.ContainerCreated
		return err
	}
	var started *proto.Started
	if err = m.askToStart(ctx, c); err == nil {
		started, err = m.launch.Container(launchCtx, p.described(), m.toLaunch(c, c.resources, c.rec.Limits))
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
	m.containerStarted(ctx, c, started)
	m.tellOfContainer(ctx, nri.ContainerStarted, c)
	if _, err := m.readyPod(c.podID); err != nil { // stopped meanwhile: its stop may have missed us
		m.tasks.InBackground("kill", c.String(), func(ctx context.Context) error { return m.killContainer(ctx, c) })
		return err
	}
	return nil
}

// readyPod finds a pod that is ready, and asks its pause whether that still
// holds: containers join namespaces by its process ID.
func (m *Manager) readyPod(id string) (*pod, error) {
	p, err := m.pods.Find(id)
	if err != nil {
		return nil, err
	}
	pause := p.pause.Load()
	if !p.info.Load().Ready || pause == nil {
		return nil, notReady(p)
	}
	ended, err := pidfd.Exited(pause)
	if err != nil && !errors.Is(err, os.ErrClosed) {
		return nil, fmt.Errorf("pause of pod sandbox %s: %w", p.id, err)
	}
	if ended || err != nil {
		return nil, fmt.Errorf("%w: its pause has ended", notReady(p))
	}
	return p, nil
}

// notReady refuses something in a pod that is not ready. Why it is not was logged, or will be: it
// is being stopped, or has lost its pause.
func notReady(p *pod) error {
	return errdefs.Superseded(errdefs.FailedPrecondition("pod sandbox %s is not ready", p.id))
}

// startInterrupted makes a container created again whose start the end of the daemon has cancelled: it is not the
// container that failed. What can't be taken back now the next daemon takes back, for the record says that it was being started.
func (m *Manager) startInterrupted(ctx context.Context, c *container, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), runtime.KillWait)
	defer cancel()
	if err := m.takeStartBack(ctx, c); err != nil {
		m.log.Error("take the start of a container back; the next daemon will", "container", c.id, "error", err)
	}
	return errdefs.Unavailable("start container %s: berth is stopping: %w", c.id, cause)
}

// startFailed publishes a container that never ran, and returns the cause.
func (m *Manager) startFailed(c *container, cause error) error {
	m.exited(c, state.Exit{Code: state.CodeStartError, Reason: state.ReasonStartError, Message: cause.Error(), FinishedAt: time.Now()})
	return fmt.Errorf("start container %s: %w", c.id, cause)
}

// containerStarted publishes a running container and watches its shim. The record
// on disk still says "starting": the shim directory knows the rest.
func (m *Manager) containerStarted(ctx context.Context, c *container, s *proto.Started) {
	defer trace.Begin(ctx, "publish").End()
	run := &running{runtime.Launched(s), m.containerMeter(c)}
	m.publishRunning(c, run)
	m.logContainer("container started", c, slog.Int("pid", run.PID))
	m.watchContainer(c, run)
	m.sampler.Wake()
}

// publishRunning needs the container's turn.
func (m *Manager) publishRunning(c *container, run *running) {
	c.running.Store(run)
	c.rec.Phase = state.ContainerRunning
	m.publishContainer(c)
}

// watchContainer publishes the exit of a container that has a shim.
func (m *Manager) watchContainer(c *container, run *running) {
	m.watchRunning(c, run, func() {
		if !m.processes.AwaitShim(run.Running, "shim of container "+c.id) {
			return // the daemon is ending, the container goes on
		}
		if exit, settled := m.ending.Settle(m.toEnd(c), run.StartedAt); settled {
			m.noteExit(c, exit)
		}
		m.processes.AwaitEnd(run.Shim, "shim of container "+c.id) // one that was killed while it is frozen ends, and is reaped, later
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
		m.log.Warn("close pidfds and statistics", "container", c.id, "error", err)
	}
}

// noteExit fails only when the daemon is ending; the next one finds the exit record, or that the shim was lost.
func (m *Manager) noteExit(c *container, exit state.Exit) {
	_ = m.tasks.WithTurn(m.tasks.Watchers.Context(), c.turn, "note the exit of", c.String(), func() error {
		m.exited(c, exit)
		return nil
	})
}

// exited records and publishes an exit, tells plugins of it, and then removes the runtime state. It
// needs the container's turn. An exit that can't be recorded is seen all the same;
// the runtime state then stays, as the only record there is, until it can.
func (m *Manager) exited(c *container, exit state.Exit) {
	if c.removed { // nothing of it is to come back; it had no shim then
		return
	}
	c.rec.Phase, c.rec.Exit = state.ContainerExited, &exit
	err := m.containerRecs.Write(c.id, c.rec)
	told := make(chan struct{})
	c.stopUntold.Store(&told)
	m.publishContainer(c)
	m.logExit(c, exit)
	if run := c.running.Swap(nil); run != nil {
		close(run.Exited) // first: the wait for a kill is short, and plugins take their time
		m.keepUsage(c, run)
		m.sampler.Wake()
	}
	m.tellOfContainer(m.tasks.Watchers.Context(), nri.ContainerStopped, c)
	if err == nil {
		m.cleanExited(c)
		return
	}
	m.log.Error("record the exit", "container", c.id, "error", err)
	m.tasks.InBackground("record the exit of", c.String(), func(ctx context.Context) error {
		return m.tasks.WithTurn(ctx, c.turn, "record the exit of", c.String(), func() error {
			if c.removed || c.rec.Phase != state.ContainerExited {
				return nil
			}
			if err := m.containerRecs.Write(c.id, c.rec); err != nil {
				return err
			}
			m.cleanExited(c)
			return nil
		})
	})
}

// cleanExited removes the runtime state of a container that has exited. What can't be removed
// now, for lack of descriptors say, is removed by and by, or with the container.
func (m *Manager) cleanExited(c *container) {
	ctx, cancel := context.WithTimeout(context.Background(), runtime.KillWait)
	defer cancel()
	err := m.processes.Remove(ctx, c.id, c.rec.CgroupsPath)
	if err == nil {
		return
	}
	const what = "remove runtime state of exited"
	m.log.Warn(what+" container", "container", c.id, "error", err)
	m.tasks.InBackground(what, c.String(), func(ctx context.Context) error {
		return m.tasks.WithTurn(ctx, c.turn, what, c.String(), func() error {
			if c.removed || c.rec.Phase != state.ContainerExited {
				return nil
			}
			return m.processes.Remove(ctx, c.id, c.rec.CgroupsPath)
		})
	})
}

// StopContainer sends the container's stop signal, gives it timeout to exit, and
// kills it then; at once if timeout is zero. A container that does not run or is
// unknown is no error. One that is being started is stopped when it has started; if that takes longer than timeout, and a
// kill, may, its launch is taken back.
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
	return m.tasks.Detach(ctx, limit, "stop", c.String(), func(ctx context.Context) error { return m.stopContainer(ctx, c, timeout) })
}

// stopContainer returns when the container has ended and plugins were told.
func (m *Manager) stopContainer(ctx context.Context, c *container, timeout time.Duration) error {
	if err := m.endContainer(ctx, c, timeout); err != nil {
		return err
	}
	return m.awaitTold(ctx, c)
}

// endContainer holds no turn while it waits: the exit is published with it.
func (m *Manager) endContainer(ctx context.Context, c *container, timeout time.Duration) error {
	var run *running
	overdue := time.AfterFunc(min(timeout, math.MaxInt64-runtime.KillWait)+runtime.KillWait, c.launching.GiveUp)
	err := m.tasks.WithTurn(ctx, c.turn, "stop", c.String(), func() error { run = c.running.Load(); return nil })
	overdue.Stop()
	if err != nil || run == nil {
		return err
	}
	return m.ending.Stop(ctx, m.toEnd(c), run.Running, stopSignal(c), timeout)
}

// killContainer kills a container and waits for its exit, see runtime.Stopper. A container that does not run is no error. It must not
// hold the turn: the exit is published with it.
func (m *Manager) killContainer(ctx context.Context, c *container) error {
	return m.ending.Kill(ctx, m.toEnd(c))
}

// toEnd is the container as what ends it sees it.
func (m *Manager) toEnd(c *container) runtime.StopTarget {
	return runtime.StopTarget{ID: c.id, CgroupsPath: c.rec.CgroupsPath, Runtime: m.runtimeOf(c), Running: func() *runtime.Running {
		if run := c.running.Load(); run != nil {
			return run.Running
		}
		return nil
	}}
}

// stopSignal is the signal that asks the container to end: the config's, else the
// image's, else TERM.
func stopSignal(c *container) unix.Signal {
	return oci.StopSignal(c.config.GetStopSignal(), c.rec.Image.Config.StopSignal)
}

// UpdateContainerResources changes the limits of a container that is created or
// runs; fields that are zero keep their value.
func (m *Manager) UpdateContainerResources(ctx context.Context, id string, res *runtimeapi.LinuxContainerResources) error {
	c, err := m.containers.Find(id)
	if err != nil {
		return err
	}
	return m.tasks.Detach(ctx, task.Limit, "update", c.String(), func(ctx context.Context) error {
		return m.tasks.WithTurn(ctx, c.turn, "update", c.String(), func() error { return m.updateResources(ctx, c, res) })
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
		return errdefs.FailedPrecondition("container %s is not running", c.id)
	}
	defer m.tasks.Begin("its monitor to open its log anew", c.String())()
	if err := shim.OpenMonitor(m.dirs.Shim(c.id)).ReopenLog(ctx); err != nil {
		return fmt.Errorf("reopen log of container %s: %w", c.id, err)
	}
	return nil
}
