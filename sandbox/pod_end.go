package sandbox

import (
	"context"
	"errors"
	"fmt"

	"berth/internal/errdefs"
	"berth/internal/join"
	"berth/internal/nri"
	"berth/internal/task"
	"berth/sandbox/runtime"
	"berth/sandbox/state"
)

// StopPodSandbox ends everything that runs in the pod and takes its network away,
// also if a process cannot be killed. A pod that is stopped or unknown is no error.
func (m *Manager) StopPodSandbox(ctx context.Context, id string) error {
	p, err := m.pods.Find(id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	return m.tasks.Detach(ctx, task.Limit, "stop", p.String(), func(ctx context.Context) error {
		return m.tasks.WithTurn(ctx, p.turn, "stop", p.String(), func() error { return m.stopPod(ctx, p) })
	})
}

// stopPod needs the pod's turn. It publishes NotReady first, so that nothing new
// starts in the pod, and does every step whatever became of the others: a full
// disk, for one, is no reason to let a pod run.
func (m *Manager) stopPod(ctx context.Context, p *pod) error {
	if _, known := m.pods.Get(p.id); !known || p.rec.Phase == state.Removing {
		return nil
	}
	first := p.rec.Phase != state.PodStopped
	var unrecorded error
	if first {
		p.stopping = true
		p.rec.Phase = state.PodStopped
		unrecorded = m.podRecords.Write(p.id, p.rec)
		m.publishPod(p)
	}
	err := m.killContainers(ctx, p)
	if unrecorded != nil { // before the rest: with its pause a daemon that is started meanwhile would take the pod for ready
		m.podenv.EndPause(ctx, p.onHost())
	}
	err = errors.Join(err, m.takeDown(ctx, p))
	for _, c := range m.containersOf(p.id) { // whose stop comes before the pod's
		err = errors.Join(err, m.awaitTold(ctx, c))
	}
	if first {
		m.tellOfPod(ctx, nri.PodStopped, p)
	}
	if unrecorded != nil {
		m.recordStopLater(p, unrecorded)
	}
	if p.stopping && err == nil {
		p.stopping = false
		m.logPod("pod stopped", p)
	}
	return err
}

// takeDown removes what exists for the pod outside its files, once: nothing new starts in a pod that was stopped. It
// needs the turn of such a one.
func (m *Manager) takeDown(ctx context.Context, p *pod) error {
	if p.takenDown {
		return nil
	}
	err := m.podenv.TakeDown(ctx, p.onHost())
	p.takenDown = err == nil
	return err
}

// recordStopLater writes the record of a stopped pod when the disk takes it, and removes what could not be removed from it. A daemon that is started before finds the pause gone.
// It needs the pod's turn. kubelet stops a pod again and again: one try at a time is enough.
func (m *Manager) recordStopLater(p *pod, cause error) {
	if p.unrecorded {
		return
	}
	p.unrecorded = true
	m.log.Warn("record that a pod is stopped", "pod", p.id, "error", cause)
	m.tasks.InBackground("record the stop of", p.String(), func(ctx context.Context) error {
		return m.tasks.WithTurn(ctx, p.turn, "record the stop of", p.String(), func() error {
			if _, known := m.pods.Get(p.id); !known || p.rec.Phase != state.PodStopped {
				return nil
			}
			if p.rec.Network == nil { // it was detached
				if err := m.networks.Forget(p.id); err != nil {
					return err
				}
			}
			err := m.podRecords.Write(p.id, p.rec)
			p.unrecorded = err != nil
			return err
		})
	})
}

// killContainers ends the pod's containers, side by side. What is being launched in it is given up and not waited for: its
// launcher may hang.
func (m *Manager) killContainers(ctx context.Context, p *pod) error {
	ctx, cancel := context.WithTimeout(ctx, runtime.KillWait)
	defer cancel()
	var kills []func() error
	for _, c := range m.containersOf(p.id) {
		c.launching.GiveUp()
		kills = append(kills, func() error { return m.killContainer(ctx, c) })
	}
	return m.tasks.Together("kill containers of", p.String(), kills...)
}

// containersOf returns the pod's containers, the invisible ones too.
func (m *Manager) containersOf(podID string) []*container {
	var of []*container
	for _, c := range m.containers.Snapshot() {
		if c.podID == podID {
			of = append(of, c)
		}
	}
	return of
}

// RemovePodSandbox stops the pod if need be, removes its containers and then the
// pod with everything that exists for it. A pod that is unknown is no error.
func (m *Manager) RemovePodSandbox(ctx context.Context, id string) error {
	p, err := m.pods.Find(id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	return m.tasks.Detach(ctx, task.Limit, "remove", p.String(), func(ctx context.Context) error {
		return m.tasks.WithTurn(ctx, p.turn, "remove", p.String(), func() error { return m.endPod(ctx, p) })
	})
}

// replacePod removes a pod without containers, or goes on with its removal. join.ErrInUse for
// any other; who creates a container enters it with the pod's turn.
func (m *Manager) replacePod(ctx context.Context, id string) error {
	p, known := m.pods.Get(id)
	if !known {
		return nil
	}
	return m.tasks.Detach(ctx, task.Limit, "replace", p.String(), func(ctx context.Context) error {
		return m.tasks.WithTurn(ctx, p.turn, "replace", p.String(), func() error {
			if p.rec.Phase != state.Removing && len(m.containersOf(id)) > 0 {
				return fmt.Errorf("pod sandbox %s has containers: %w", id, join.ErrInUse)
			}
			return m.endPod(ctx, p)
		})
	})
}

// endPod stops and removes the pod. It needs the pod's turn.
func (m *Manager) endPod(ctx context.Context, p *pod) error {
	if err := m.stopPod(ctx, p); err != nil {
		m.log.Warn("stop before removal", "pod", p.id, "error", err) // removal does the same again
	}
	return m.erasePod(ctx, p)
}

// erasePod removes the pod, its containers first, and its record last. It needs
// the pod's turn and may be repeated.
func (m *Manager) erasePod(ctx context.Context, p *pod) error {
	if _, known := m.pods.Get(p.id); !known {
		return nil // somebody else had the turn before
	}
	if p.rec.Phase != state.Removing {
		p.rec.Phase = state.Removing
		m.podIDs.Going(state.PodIdentity(p.config.Metadata), p.id)
		if err := m.podRecords.Write(p.id, p.rec); err != nil {
			m.log.Warn("record a removal, which goes on", "pod", p.id, "error", err) // a full disk must not keep what fills it
		}
	}
	var removals []func() error
	for _, c := range m.containersOf(p.id) {
		removals = append(removals, func() error { return m.removeContainer(ctx, c) })
	}
	if err := errors.Join(m.tasks.Together("remove containers of", p.String(), removals...), m.takeDown(ctx, p)); err != nil {
		return err
	}
	if err := m.podenv.Remove(p.id); err != nil {
		return err
	}
	if err := m.podRecords.Remove(p.id); err != nil {
		return err
	}
	m.labels.Release(m.selinux, p.rec.SELinux, p.id)
	m.pods.Remove(p.id)
	if p.Visible() { // else nobody was told of it
		m.logPod("pod removed", p)
	}
	m.events.PodDeleted(p.info.Load())
	m.podIDs.Forget(state.PodIdentity(p.config.Metadata), p.id)
	if p.presented && !p.Visible() {
		m.tellOfPod(ctx, nri.PodStopped, p)
	}
	if p.presented || p.Visible() {
		m.tellOfPod(ctx, nri.PodRemoved, p)
	}
	return nil
}
