package nri

import (
	"maps"
	"time"

	"github.com/containerd/nri/pkg/api"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Pod describes a pod to plugins.
type Pod struct {
	ID, Handler string
	Config      *runtimeapi.PodSandboxConfig
	IPs         []string
	PID         int    // of the pause process; 0 if it does not run
	NetNS       string // path; empty on the host's network
	CgroupsPath string

	WantedOverhead, WantedResources *runtimeapi.LinuxContainerResources // for UpdatePod; Config has the current limits
}

// Container describes a container to plugins.
type Container struct {
	ID, PodID, ImageID               string
	Config                           *runtimeapi.ContainerConfig
	State                            runtimeapi.ContainerState
	CreatedAt, StartedAt, FinishedAt time.Time
	ExitCode                         int32
	Reason, Message                  string
	PID                              int
	Resources                        *runtimeapi.LinuxContainerResources // the current limits
	RuntimeSpec                      *specs.Spec                         // may have only the field Process
	Adjustment                       *Adjustment                         // changes of plugins at creation; may be nil
}

func (p *Pod) api() *api.PodSandbox {
	md, linux := p.Config.GetMetadata(), p.Config.GetLinux()
	sandbox := &api.PodSandbox{
		Id: p.ID, Name: md.GetName(), Uid: md.GetUid(), Namespace: md.GetNamespace(),
		Labels: maps.Clone(p.Config.GetLabels()), Annotations: maps.Clone(p.Config.GetAnnotations()),
		RuntimeHandler: p.Handler, Pid: uint32(p.PID), Ips: p.IPs,
		Linux: &api.LinuxPodSandbox{CgroupParent: linux.GetCgroupParent(), CgroupsPath: p.CgroupsPath,
			PodOverhead: fromCRI(linux.GetOverhead()), PodResources: fromCRI(linux.GetResources())},
	}
	if p.NetNS != "" {
		sandbox.Linux.Namespaces = []*api.LinuxNamespace{{Type: string(specs.NetworkNamespace), Path: p.NetNS}}
	}
	return sandbox
}

func (c *Container) api() *api.Container {
	config := c.Config
	container := &api.Container{
		Id: c.ID, PodSandboxId: c.PodID, Name: config.GetMetadata().GetName(), State: state(c.State),
		Labels: maps.Clone(config.GetLabels()), Annotations: c.annotations(),
		Pid: uint32(c.PID), CreatedAt: nanoseconds(c.CreatedAt), StartedAt: nanoseconds(c.StartedAt),
		FinishedAt: nanoseconds(c.FinishedAt),
		ExitCode:   c.ExitCode, StatusReason: c.Reason, StatusMessage: c.Message,
		Image: &api.Image{Name: imageName(config), ConfigDigest: c.ImageID},
		Linux: &api.LinuxContainer{SeccompProfile: seccompProfile(config)},
	}
	for _, device := range config.GetCDIDevices() {
		container.CDIDevices = append(container.CDIDevices, &api.CDIDevice{Name: device.GetName()})
	}
	if c.RuntimeSpec != nil {
		addSpec(container, c.RuntimeSpec)
	}
	if container.Linux.Resources == nil {
		container.Linux.Resources = fromCRI(c.Resources)
	}
	return container
}

// addSpec adds the fields of the container's spec.
func addSpec(container *api.Container, spec *specs.Spec) {
	container.Mounts = api.FromOCIMounts(spec.Mounts)
	container.Hooks = api.FromOCIHooks(spec.Hooks)
	if p := spec.Process; p != nil {
		container.Args, container.Env = api.DupStringSlice(p.Args), api.DupStringSlice(p.Env)
		container.User = &api.User{Uid: p.User.UID, Gid: p.User.GID, AdditionalGids: p.User.AdditionalGids}
		for _, l := range p.Rlimits {
			container.Rlimits = append(container.Rlimits, &api.POSIXRlimit{Type: l.Type, Hard: l.Hard, Soft: l.Soft})
		}
		container.Linux.OomScoreAdj = api.Int(p.OOMScoreAdj)
		container.Linux.IoPriority = api.FromOCILinuxIOPriority(p.IOPriority)
		container.Linux.Scheduler = api.FromOCILinuxScheduler(p.Scheduler)
	}
	if l := spec.Linux; l != nil {
		container.Linux.Namespaces = api.FromOCILinuxNamespaces(l.Namespaces)
		container.Linux.Devices = api.FromOCILinuxDevices(l.Devices)
		container.Linux.Resources = api.FromOCILinuxResources(l.Resources, nil)
		container.Linux.CgroupsPath = l.CgroupsPath
		container.Linux.Sysctl = maps.Clone(l.Sysctl)
		if l.Seccomp != nil {
			policy := api.FromOCILinuxSeccomp(l.Seccomp)
			if policy.GetListenerPath() == "" {
				policy.ListenerMetadata = "" // a base profile, which plugins cannot set
			}
			container.Linux.SeccompPolicy = policy
		}
	}
}

// annotations returns the annotations of the config with the changes of plugins.
func (c *Container) annotations() map[string]string {
	all := maps.Clone(c.Config.GetAnnotations())
	changes := c.Adjustment.annotations()
	if all == nil && len(changes) > 0 {
		all = make(map[string]string)
	}
	for key := range changes { // removals come first, because a plugin may set the annotation again
		if name, removed := api.IsMarkedForRemoval(key); removed {
			delete(all, name)
		}
	}
	for key, value := range changes {
		if _, removed := api.IsMarkedForRemoval(key); !removed {
			all[key] = value
		}
	}
	return all
}

func state(s runtimeapi.ContainerState) api.ContainerState {
	switch s {
	case runtimeapi.ContainerState_CONTAINER_CREATED:
		return api.ContainerState_CONTAINER_CREATED
	case runtimeapi.ContainerState_CONTAINER_RUNNING:
		return api.ContainerState_CONTAINER_RUNNING
	case runtimeapi.ContainerState_CONTAINER_EXITED:
		return api.ContainerState_CONTAINER_STOPPED
	}
	return api.ContainerState_CONTAINER_UNKNOWN
}

func imageName(config *runtimeapi.ContainerConfig) string {
	if name := config.GetImage().GetUserSpecifiedImage(); name != "" {
		return name
	}
	return config.GetImage().GetImage()
}

func seccompProfile(config *runtimeapi.ContainerConfig) *api.SecurityProfile {
	profile := config.GetLinux().GetSecurityContext().GetSeccomp()
	if profile == nil {
		return nil
	}
	kinds := map[runtimeapi.SecurityProfile_ProfileType]api.SecurityProfile_ProfileType{
		runtimeapi.SecurityProfile_RuntimeDefault: api.SecurityProfile_RUNTIME_DEFAULT,
		runtimeapi.SecurityProfile_Unconfined:     api.SecurityProfile_UNCONFINED,
		runtimeapi.SecurityProfile_Localhost:      api.SecurityProfile_LOCALHOST,
		runtimeapi.SecurityProfile_OCI:            api.SecurityProfile_LOCALHOST, // NRI has no such type
	}
	return &api.SecurityProfile{ProfileType: kinds[profile.GetProfileType()], LocalhostRef: profile.GetLocalhostRef()}
}

func nanoseconds(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}
