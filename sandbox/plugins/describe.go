package plugins

import (
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"berth/internal/host"
	"berth/internal/nri"
	"berth/sandbox/limits"
	"berth/sandbox/state"
)

// DescribePod describes a pod to plugins.
func DescribePod(info *state.Pod, cgroupsPath string) *nri.Pod {
	return &nri.Pod{ID: info.ID, Handler: info.Handler, Config: info.Config, IPs: info.IPs, PID: info.PausePID,
		NetNS: info.NetNS, CgroupsPath: cgroupsPath}
}

// DescribeContainer describes a container to plugins, with the adjustments they made. It opens no
// file.
func DescribeContainer(info *state.Container, adjustment *nri.Adjustment, facts host.Facts) *nri.Container {
	described := &nri.Container{ID: info.ID, PodID: info.PodID, ImageID: info.ImageID, Config: info.Config,
		State:     info.State,
		CreatedAt: info.CreatedAt, StartedAt: info.StartedAt, FinishedAt: info.FinishedAt, ExitCode: info.ExitCode,
		Reason: info.Reason, Message: info.Message, PID: info.PID, Resources: info.Resources, Adjustment: adjustment}
	described.Spec = &specs.Spec{Process: info.Process}
	if info.Described == nil { // the record is of an older version, or the creation failed
		return described
	}
	linux := *info.Described.Linux
	inForce, err := limits.Kernel(info.Resources, info.Limits, facts)
	if err == nil { // else report the limits of the creation
		inForce.Devices = linux.Resources.Devices
		linux.Resources = inForce
	}
	described.Spec.Mounts, described.Spec.Hooks, described.Spec.Linux = info.Described.Mounts, info.Described.Hooks, &linux
	return described
}
