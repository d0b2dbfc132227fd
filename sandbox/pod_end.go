package sandbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"berth/internal/errdefs"
	"berth/internal/nri"
	"berth/internal/task"
	"berth/sandbox/runtime"
	"berth/sandbox/state"
)

// StopPodSandbox kills all processes of the pod and detaches its network, even if a process
// survives. A stopped or unknown pod is no error.
func (m *Manager) StopPodSandbox(ctx context.Context, id string) error {
	p, err := m.objects.pods.Find(id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	return m.tasks.Detach(ctx, task.Timeout, "stop", p.String(), func(ctx context.Context) error {
		return m.control.lockPod(ctx, p, "stop", func(p lockedPod) error { return m.stopPod(ctx, p) })
	})
}

// stopPod publishes NotReady first, so that nothing new starts in the pod. It runs all steps even
// if some fail, because a full disk must not keep a pod running.
func (m *Manager) stopPod(ctx context.Context, p lockedPod) error {
	if p.Phase() == state.Removing || p.Phase() == state.Removed {
		return nil
	}
	first := p.Phase() != state.PodStopping && p.Phase() != state.PodStopped
	var unrecorded error
	if first {
		if err := p.Move(state.PodStopping); err != nil {
			return err
		}
		p.stopped.Store(true)
		unrecorded = m.records.WritePod(p.PodSpec, p.PodStatus)
		m.control.publishPod(p)
	}
	err := m.killContainers(ctx, p.pod)
	if unrecorded != nil { // this comes first, because a daemon that restarts now would treat a recorded pod with a pause as ready
		m.endPause(ctx, p.pod)
	}
	err = errors.Join(err, m.takeDown(ctx, p))
	for _, c := range m.objects.containersOf(p.ID) { // plugins see the containers' stop before the pod's
		err = errors.Join(err, m.control.waitNotified(ctx, c))
	}
	if first {
		m.plugins.NotifyPod(ctx, nri.PodStopped, p)
	}
	if unrecorded != nil {
		m.recordStopLater(p, unrecorded)
	}
	if err == nil && p.stopped.CompareAndSwap(true, false) {
		m.events.Pod("pod stopped", p.pod)
	}
	return err
}

// takeDown removes the pod's network, pause and mounts, unless an earlier call did. The steps run
// in parallel, because removing a namespace and each unmount wait for an RCU grace period.
func (m *Manager) takeDown(ctx context.Context, p lockedPod) error {
	if p.TakenDown {
		return nil
	}
	err := m.tasks.Parallel("take down", p.String(),
		func() error { return m.detachNetwork(ctx, p) },
		func() error { return m.removePause(ctx, p.pod) },
		func() error { return m.podenv.RemoveMounts(p.ID) })
	if err != nil {
		return err
	}
	p.TakenDown = true
	if p.Phase() == state.PodStopping {
		return p.Move(state.PodStopped)
	}
	return nil
}

// detachNetwork runs CNI DEL with the configuration that ADD had. It removes the namespace only
// after DEL succeeded, because plugins may need it until then.
func (m *Manager) detachNetwork(ctx context.Context, p lockedPod) error {
	if p.Network != nil {
		if err := m.release(ctx, p); err != nil {
			return fmt.Errorf("detach pod %s from its network: %w", p.ID, err)
		}
		p.Network = nil
		if p.Phase() != state.Removing { // otherwise the record is removed anyway
			if err := m.records.WritePod(p.PodSpec, p.PodStatus); err != nil {
				m.log.Warn("record that a pod is detached; the next daemon will detach it again", "pod", p.ID,
					"error", err)
			}
		}
	}
	return m.podenv.RemoveNetNS(p.NetNS)
}

// removePause kills the pause and removes everything that its launch created.
func (m *Manager) removePause(ctx context.Context, p *pod) error {
	ctx, cancel := context.WithTimeout(ctx, runtime.KillTimeout)
	defer cancel()
	m.endPause(ctx, p)
	return m.processes.Remove(ctx, p.ID, p.CgroupsPath)
}

// endPauseTimeout bounds the wait for a killed pause, which takes a millisecond. A frozen pause
// takes longer, because only the kill of its cgroup thaws it. That kill needs the remaining time.
const endPauseTimeout = time.Second

// endPause kills the pause. The pause of a runtime program is left to the program.
func (m *Manager) endPause(ctx context.Context, p *pod) {
	pause := p.pause.Load()
	if pause == nil || p.Runtime != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, endPauseTimeout)
	defer cancel()
	if err := m.processes.End(ctx, pause); err != nil {
		m.log.Warn("kill the pause; its cgroup is killed next", "pod", p.ID, "error", err)
	}
}

// recordStopLater records a stopped pod in the background, once the disk accepts writes. A daemon
// that starts earlier notices that the pause is gone.
func (m *Manager) recordStopLater(p lockedPod, cause error) {
	m.log.Warn("record that a pod is stopped", "pod", p.ID, "error", cause)
	m.tasks.RetryInBackground("record the stop of", p.String(), func(ctx context.Context) error {
		return m.control.lockPod(ctx, p.pod, "record the stop of", func(p lockedPod) error {
			if p.Phase() != state.PodStopping && p.Phase() != state.PodStopped {
				return nil
			}
			if p.Network == nil { // it was detached
				if err := m.network.Forget(p.ID); err != nil {
					return err
				}
			}
			return m.records.WritePod(p.PodSpec, p.PodStatus)
		})
	})
}

// killContainers kills the pod's containers in parallel. It cancels launches without waiting for
// them, because a launcher may hang.
func (m *Manager) killContainers(ctx context.Context, p *pod) error {
	ctx, cancel := context.WithTimeout(ctx, runtime.KillTimeout)
	defer cancel()
	var kills []func() error
	for _, c := range m.objects.containersOf(p.ID) {
		c.launching.Cancel()
		kills = append(kills, func() error { return m.control.killContainer(ctx, c) })
	}
	return m.tasks.Parallel("kill containers of", p.String(), kills...)
}

// RemovePodSandbox stops the pod if necessary. It removes the pod's containers, and then the pod
// with all its resources. An unknown pod is no error.
func (m *Manager) RemovePodSandbox(ctx context.Context, id string) error {
	p, err := m.objects.pods.Find(id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	return m.tasks.Detach(ctx, task.Timeout, "remove", p.String(), func(ctx context.Context) error {
		return m.control.lockPod(ctx, p, "remove", func(p lockedPod) error { return m.endPod(ctx, p) })
	})
}

// replacePod removes a pod without containers, or continues its removal. For a pod with containers
// it returns errInUse. New containers are entered under the pod's lock, so replacePod cannot miss
// one.
func (m *Manager) replacePod(ctx context.Context, id string) error {
	p, known := m.objects.pods.Get(id)
	if !known {
		return nil
	}
	return m.tasks.Detach(ctx, task.Timeout, "replace", p.String(), func(ctx context.Context) error {
		return m.control.lockPod(ctx, p, "replace", func(p lockedPod) error {
			if p.Phase() != state.Removing && len(m.objects.containersOf(id)) > 0 {
				return fmt.Errorf("pod sandbox %s has containers: %w", id, errInUse)
			}
			return m.endPod(ctx, p)
		})
	})
}

// endPod stops and removes the pod.
func (m *Manager) endPod(ctx context.Context, p lockedPod) error {
	if err := m.stopPod(ctx, p); err != nil {
		m.log.Warn("stop a pod before its removal", "pod", p.ID, "error", err) // removal repeats all steps
	}
	return m.erasePod(ctx, p)
}

// erasePod removes the pod's containers, then the pod, and its record last. It may be repeated.
func (m *Manager) erasePod(ctx context.Context, p lockedPod) error {
	if p.Phase() == state.Removed { // by another operation that held the lock before
		return nil
	}
	if p.Phase() != state.Removing {
		if err := p.Move(state.Removing); err != nil {
			return err
		}
		m.podIDs.Going(p.Identity(), p.ID)
		if err := m.records.WritePod(p.PodSpec, p.PodStatus); err != nil {
			// The removal continues, because it frees space on a full disk.
			m.log.Warn("record the removal of a pod; the removal continues", "pod", p.ID, "error", err)
		}
	}
	if err := errors.Join(m.removeContainersOf(ctx, p.pod), m.takeDown(ctx, p)); err != nil {
		return err
	}
	if err := m.processes.RemoveRoot(p.ID); err != nil {
		return err
	}
	if err := m.podenv.Remove(p.ID); err != nil {
		return err
	}
	if err := m.records.RemovePod(p.ID); err != nil {
		return err
	}
	return m.forgetPod(ctx, p)
}

// forgetPod publishes the removal of the pod.
func (m *Manager) forgetPod(ctx context.Context, p lockedPod) error {
	if err := p.Move(state.Removed); err != nil {
		return err
	}
	m.labels.Release(m.selinux, p.Labels, p.ID)
	m.objects.pods.Remove(p.ID)
	if p.Visible() { // otherwise no client has seen the pod
		m.events.Pod("pod removed", p.pod)
	}
	m.control.events.PodDeleted(p.info.Load())
	m.podIDs.Forget(p.Identity(), p.ID)
	if p.Presented && !p.Visible() {
		m.plugins.NotifyPod(ctx, nri.PodStopped, p)
	}
	if p.Presented || p.Visible() {
		m.plugins.NotifyPod(ctx, nri.PodRemoved, p)
	}
	return nil
}

// removeContainersOf removes the pod's containers in parallel.
func (m *Manager) removeContainersOf(ctx context.Context, p *pod) error {
	var removals []func() error
	for _, c := range m.objects.containersOf(p.ID) {
		removals = append(removals, func() error { return m.removeContainer(ctx, c) })
	}
	return m.tasks.Parallel("remove containers of", p.String(), removals...)
}
