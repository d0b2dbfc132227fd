package sandbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/sandbox/runtime"
	"berth/sandbox/state"
)

// A pod that no client can see is undone in the background. It comes from a failed start, or from
// an unfinished removal. If its CNI DEL keeps failing, everything is removed except the record,
// which has the arguments of DEL.

// strippedAfter is the number of failed attempts after which everything goes but the record. DEL
// without a network namespace is legal (CNI specification, section 4).
const strippedAfter = 5

// abandonPod undoes a failed start. It has a separate deadline, because the operation's deadline
// may have expired. CNI DEL may also hang as long as CNI ADD did. A failed undo is retried in the
// background.
func (m *Manager) abandonPod(p *pod) {
	p.launched.Store(0) // the pause exits now, and another process may get its process ID
	p.undoing.Store(true)
	undo := m.undoLocked(p)
	if err := m.tasks.Once(m.tasks.Operations.Context(), "undo", p.String(), undo); err != nil {
		m.unfinished.retries.Add("undo", p.String(), undo)
	}
}

// undoLocked returns undoPod with the pod's lock.
func (m *Manager) undoLocked(p *pod) func(context.Context) error {
	return func(ctx context.Context) error {
		return m.control.lockPod(ctx, p, "undo", func(p lockedPod) error { return m.undoPod(ctx, p) })
	}
}

// undoPod erases a pod that no client can see. It records a failure, and strips the pod after some.
// If ctx has expired, a plugin hangs, which is also a failure.
func (m *Manager) undoPod(ctx context.Context, p lockedPod) error {
	err := m.erasePod(ctx, p)
	if err == nil || errors.Is(ctx.Err(), context.Canceled) {
		return err
	}
	if p.Undo == nil {
		p.Undo = &state.Undo{Since: time.Now()}
	}
	p.Undo.Failures++
	p.Undo.Error = err.Error()
	p.unreleased.Store(p.Network != nil)
	if p.Network != nil && p.Undo.Failures >= strippedAfter {
		err = errors.Join(err, m.stripPod(ctx, p))
	}
	if recordErr := m.records.WritePod(p.PodSpec, p.PodStatus); recordErr != nil {
		m.log.Warn("record the failed undo of a pod", "pod", p.ID, "error", recordErr)
	}
	return err
}

// stripPod removes everything from the node that the pod has, except the resources that only CNI
// plugins can release. It may be repeated. It has a separate deadline, because plugins may have
// used up the deadline of the undo.
func (m *Manager) stripPod(ctx context.Context, p lockedPod) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), runtime.KillTimeout)
	defer cancel()
	err := errors.Join(m.removeContainersOf(ctx, p.pod), m.removePause(ctx, p.pod), m.podenv.RemoveMounts(p.ID),
		m.podenv.RemoveNetNS(p.NetNS))
	if err != nil {
		return err
	}
	return errors.Join(m.processes.RemoveRoot(p.ID), m.podenv.Remove(p.ID))
}

// release runs CNI DEL for a pod. If the configuration of ADD fails for a pod that no client can
// see, it tries the node's present configuration. The plugins of ADD may have lost their
// credentials, or may not be installed any more. Another network is tried last, because it cannot
// release the resources of the first network.
func (m *Manager) release(ctx context.Context, p lockedPod) error {
	err := m.network.Detach(ctx, p.PodSpec, *p.Network)
	if err == nil || !p.undoing.Load() {
		return err
	}
	now, _, planErr := m.network.Plan(p.PodSpec)
	stripped := p.Undo != nil && p.Undo.Failures >= strippedAfter
	if planErr != nil || string(now.ConfList) == string(p.Network.ConfList) ||
		now.Network != p.Network.Network && !stripped {
		return err
	}
	if presentErr := m.network.Detach(ctx, p.PodSpec, now); presentErr != nil {
		return errors.Join(err, fmt.Errorf("with the present configuration: %w", presentErr))
	}
	m.log.Warn("a pod was detached with the present CNI configuration; that of its start fails", "pod", p.ID,
		"network", now.Network, "error", err)
	return nil
}

// settleEarlier undoes earlier starts of the same pod whose network is not released. A pod has at
// most one of them, so repeated starts do not use up the addresses of the node.
func (m *Manager) settleEarlier(ctx context.Context, of *runtimeapi.PodSandboxMetadata) error {
	for _, p := range m.objects.pods.Snapshot() {
		md := p.Config.GetMetadata()
		if !p.undoing.Load() || md.GetUid() != of.GetUid() || md.GetName() != of.GetName() ||
			md.GetNamespace() != of.GetNamespace() {
			continue
		}
		err := m.control.lockPod(ctx, p, "undo", func(p lockedPod) error {
			err := m.undoPod(ctx, p)
			if p.Network == nil { // the rest holds no resources of the network
				return nil
			}
			return err
		})
		if err != nil {
			return fmt.Errorf("an earlier start of the pod is not undone: %w", err)
		}
		m.unfinished.retries.Hasten() // plugins work again
	}
	return nil
}

// deferUndo undoes a pod of an earlier daemon in the background. If the undo has failed in that
// daemon, the retry loop continues it.
func (m *Manager) deferUndo(p lockedPod) {
	p.undoing.Store(true)
	if p.Undo == nil {
		m.deferWithPod("undo", p.pod, m.undoPod)
		return
	}
	p.unreleased.Store(p.Network != nil)
	m.unfinished.note(func() { m.unfinished.retries.Add("undo", p.String(), m.undoLocked(p.pod)) })
}

// Unreleased returns the number of pods that no client can see and whose CNI DEL has failed.
func (m *Manager) Unreleased() int {
	count := 0
	for _, p := range m.objects.pods.Snapshot() {
		if p.unreleased.Load() {
			count++
		}
	}
	return count
}
