package sandbox

import (
	"context"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/nri"
	"berth/internal/task"
	"berth/sandbox/state"
)

// UpdatePodSandboxResources records new resources and overhead of a pod. PodSandboxStatus shows
// them. nil keeps the old value. kubelet owns the pod's cgroup, and calls this method after it has
// changed the cgroup (KEP-1287). The pause has a fixed weight and no limits.
//
// Errors: NotFound. FailedPrecondition for a pod that is not ready. InvalidArgument for malformed
// resources.
func (m *Manager) UpdatePodSandboxResources(ctx context.Context, id string,
	overhead, resources *runtimeapi.LinuxContainerResources) error {
	p, err := m.objects.pods.Find(id)
	if err != nil {
		return err
	}
	if err := state.CheckPodResources(overhead, resources, m.node.Host); err != nil {
		return err
	}
	return m.tasks.Detach(ctx, task.Timeout, "update", p.String(), func(ctx context.Context) error {
		return m.control.lockPod(ctx, p, "update", func(p lockedPod) error {
			return m.updatePodResources(ctx, p, overhead, resources)
		})
	})
}

func (m *Manager) updatePodResources(ctx context.Context, p lockedPod,
	overhead, resources *runtimeapi.LinuxContainerResources) error {
	if p.Phase() == state.Removing || p.Phase() == state.Removed {
		return errdefs.NotFound("pod sandbox %q does not exist", p.ID)
	}
	if p.Phase() != state.PodReady {
		return errdefs.FailedPrecondition("pod sandbox %s is not ready", p.ID)
	}
	shown := p.info.Load().ShownConfig().GetLinux()
	if overhead == nil {
		overhead = shown.GetOverhead()
	}
	if resources == nil {
		resources = shown.GetResources()
	}
	before := p.Resources
	if err := m.requestPodUpdate(ctx, p, overhead, resources); err != nil {
		return err
	}
	p.SetResources(p.Config, &runtimeapi.UpdatePodSandboxResourcesRequest{Overhead: overhead, Resources: resources})
	if err := m.records.WritePod(p.PodSpec, p.PodStatus); err != nil {
		p.SetResources(p.Config, before)
		return err
	}
	m.control.publishPod(p)
	m.plugins.NotifyPod(ctx, nri.PodUpdated, p)
	return nil
}

// requestPodUpdate lets plugins refuse new resources of a pod.
func (m *Manager) requestPodUpdate(ctx context.Context, p lockedPod,
	overhead, resources *runtimeapi.LinuxContainerResources) error {
	return m.plugins.caller.RequestPodUpdate(ctx, func() *nri.Pod {
		pod := pluginPod(p.info.Load())
		pod.WantedOverhead, pod.WantedResources = overhead, resources
		return pod
	})
}
