package sandbox

import (
	"context"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/nri"
	"berth/internal/task"
	"berth/sandbox/state"
)

// UpdatePodSandboxResources notes new resources of a pod as a whole, and its overhead, in the
// config that status shows. nil leaves what was. The pod's cgroup is kubelet's, which calls after it has changed
// that (KEP-1287); the pause in it has a weight of its own and no limits.
//
// Errors: NotFound, FailedPrecondition for a pod that is not ready, InvalidArgument for resources that can't be.
func (m *Manager) UpdatePodSandboxResources(ctx context.Context, id string, overhead, resources *runtimeapi.LinuxContainerResources) error {
	p, err := m.pods.Find(id)
	if err != nil {
		return err
	}
	if err := state.CheckPodResources(overhead, resources, *m.cfg.Host); err != nil {
		return err
	}
	return m.tasks.Detach(ctx, task.Limit, "update", p.String(), func(ctx context.Context) error {
		return m.tasks.WithTurn(ctx, p.turn, "update", p.String(), func() error {
			return m.updatePodResources(ctx, p, overhead, resources)
		})
	})
}

// updatePodResources needs the pod's turn.
func (m *Manager) updatePodResources(ctx context.Context, p *pod, overhead, resources *runtimeapi.LinuxContainerResources) error {
	if _, known := m.pods.Get(p.id); !known || p.rec.Phase == state.Removing {
		return errdefs.NotFound("pod sandbox %q does not exist", p.id)
	}
	if !p.info.Load().Ready {
		return errdefs.FailedPrecondition("pod sandbox %s is not ready", p.id)
	}
	if overhead == nil {
		overhead = p.shownConfig().GetLinux().GetOverhead()
	}
	if resources == nil {
		resources = p.shownConfig().GetLinux().GetResources()
	}
	update := &runtimeapi.UpdatePodSandboxResourcesRequest{Overhead: overhead, Resources: resources}
	encoded, err := proto.Marshal(update)
	if err != nil {
		return errdefs.InvalidArgument("encode resources: %w", err)
	}
	config := p.withResources(update)
	if err := m.askAboutPod(ctx, p, config); err != nil {
		return err
	}
	// Nothing but this field: others are read without the turn, by who may since they do not change.
	before := p.rec.Resources
	p.rec.Resources = encoded
	if err := m.podRecords.Write(p.id, p.rec); err != nil {
		p.rec.Resources = before
		return err
	}
	p.updated = config
	m.publishPod(p)
	m.tellOfPod(ctx, nri.PodUpdated, p)
	return nil
}

// askAboutPod lets plugins refuse new resources of a pod.
func (m *Manager) askAboutPod(ctx context.Context, p *pod, wanted *runtimeapi.PodSandboxConfig) error {
	return m.plugins.RequestPodUpdate(ctx, func() *nri.Pod {
		pod := p.forPlugins(p.info.Load())
		pod.WantedOverhead, pod.WantedResources = wanted.GetLinux().GetOverhead(), wanted.GetLinux().GetResources()
		return pod
	})
}

// withResources returns the config with other resources. The one that the pod was made with stays as it
// is: a retry of RunPodSandbox is recognized by it.
func (p *pod) withResources(update *runtimeapi.UpdatePodSandboxResourcesRequest) *runtimeapi.PodSandboxConfig {
	config := proto.Clone(p.config).(*runtimeapi.PodSandboxConfig)
	if config.Linux == nil {
		config.Linux = &runtimeapi.LinuxPodSandboxConfig{}
	}
	config.Linux.Overhead, config.Linux.Resources = update.GetOverhead(), update.GetResources()
	return config
}

// shownConfig is the pod's config with its resources as they are now.
func (p *pod) shownConfig() *runtimeapi.PodSandboxConfig {
	if p.updated != nil {
		return p.updated
	}
	return p.config
}
