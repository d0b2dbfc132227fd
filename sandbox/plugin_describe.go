package sandbox

import (
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"berth/internal/host"
	"berth/internal/nri"
	"berth/sandbox/state"
)

func pluginPod(p *state.Pod) *nri.Pod {
	return &nri.Pod{
		ID:          p.ID,
		Handler:     p.Handler,
		Config:      p.ShownConfig(),
		IPs:         p.IPs,
		PID:         p.PausePID,
		NetNS:       p.NetNS,
		CgroupsPath: p.CgroupsPath,
	}
}

// pluginContainer describes a container to plugins. It opens no file.
func pluginContainer(c *state.Container, facts host.Facts) *nri.Container {
	exit := c.Ended()
	described := &nri.Container{ID: c.ID, PodID: c.PodID, ImageID: c.Image.ID, Config: c.Config, State: c.State(),
		CreatedAt: c.CreatedAt, StartedAt: c.StartedAt, FinishedAt: exit.FinishedAt, ExitCode: exit.Code,
		Reason: exit.Reason, Message: exit.Message, PID: c.PID, Resources: c.Resources, Adjustment: c.Adjustment}
	described.Spec = &specs.Spec{Process: c.Process}
	if c.Described == nil { // recorded by an earlier version, or not created
		return described
	}
	linux := *c.Described.Linux
	// Show the limits in force, not the limits of the container's creation.
	if inForce, err := kernelLimits(c.Resources, c.Limits, facts); err == nil {
		inForce.Devices = linux.Resources.Devices
		linux.Resources = inForce
	}
	described.Spec.Mounts, described.Spec.Hooks, described.Spec.Linux = c.Described.Mounts, c.Described.Hooks, &linux
	return described
}
