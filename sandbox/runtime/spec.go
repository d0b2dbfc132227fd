package runtime

import (
	"fmt"
	"path/filepath"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/host"
	"berth/internal/nri"
	"berth/oci"
	"berth/oci/users"
	"berth/sandbox/state"
)

// Node holds the node's properties that runtime-specs depend on.
type Node struct {
	Host          host.Facts
	NoAppArmor    func() string // the reason why the default profile is unavailable; empty: it is available
	CDI           CDIDirs       // directories of CDI device specs
	Dirs          state.Dirs
	SystemdCgroup bool
	OwnDevices    bool // devices belong to the user and group of the security context
	Defaults      oci.Defaults
	PauseCPUs     string // CPUs of pauses; empty: all
}

// Pause returns the runtime-spec of a pod's pause. image is the config of the pause image, nil for
// the embedded pause.
func (n Node) Pause(p *state.Pod, user users.User, image *ocispec.ImageConfig) (*specs.Spec, error) {
	cpus := n.PauseCPUs
	if p.Sandboxed() { // the sandbox of all containers is in the cgroup of the pause
		cpus = ""
	}
	spec, err := oci.SandboxSpec(oci.SandboxInput{Pod: n.pod(p), Labels: p.Labels, Host: n.facts(p), Files: host.Files{},
		SystemdCgroup: n.SystemdCgroup, User: user, Image: image, Seccomp: n.Defaults.Seccomp, CPUs: cpus})
	if err != nil {
		return nil, err
	}
	p.Runtime.Annotate(spec, "sandbox", p.ID, "", p.Config.GetAnnotations())
	return spec, nil
}

// Container returns the runtime-spec of a container. volumes are the mount points of its image
// volumes, by index of the mount. targetPIDNS is the path of the PID namespace to join. If it is
// empty, the config decides.
func (n Node) Container(
	p *state.Pod, c *state.Container, volumes map[int]string, targetPIDNS string,
) (*specs.Spec, error) {
	facts := n.facts(p)
	if facts.CgroupV2 && p.Config.GetLinux().GetSecurityContext().GetPrivileged() {
		var err error
		if facts.CgroupOptions, err = host.CgroupOptions(); err != nil {
			return nil, fmt.Errorf("find options of the cgroup filesystem: %w", err)
		}
	}
	spec, err := oci.ContainerSpec(oci.ContainerInput{
		ID: c.ID, Pod: n.pod(p), Config: c.Config, Image: &c.Image.Config, User: c.User, Labels: c.Labels, Host: facts,
		SystemdCgroup: n.SystemdCgroup, TargetPIDNS: targetPIDNS, Resources: c.Resources, Files: host.Files{},
		ImageVolumes: volumes, DeviceOwnership: n.OwnDevices, Defaults: n.Defaults,
		Volumes: c.Anonymous, VolumesDir: n.Dirs.Volumes(c.ID),
	})
	if err != nil {
		return nil, err
	}
	p.Runtime.Annotate(spec, "container", p.ID, c.Config.GetMetadata().GetName(),
		p.Config.GetAnnotations(), c.Config.GetAnnotations())
	c.Limits.AddTo(spec.Linux.Resources)
	names := cdiDevices(c.Config)
	if err := n.CDI.Inject(spec, names); err != nil {
		return nil, err
	}
	node := nri.Node{OOMScoreAdjMin: n.Host.OOMScoreAdjMin,
		Sysctl: func(name, value string) (string, error) { return oci.Sysctl(n.pod(p), name, value) },
		CDI: func(spec *specs.Spec, more []string) error {
			names = append(names, more...)
			return n.CDI.Inject(spec, more)
		}}
	if err := c.Adjustment.Apply(spec, node); err != nil {
		return nil, err
	}
	oci.DropCovered(spec, c.Anonymous, n.Dirs.Volumes(c.ID))
	return spec, n.bindDevices(p, c, names, spec)
}

// facts returns the node's facts, reduced to the features of the pod's runtime.
func (n Node) facts(p *state.Pod) host.Facts {
	facts := n.Host
	facts.NoAppArmorProfile = n.NoAppArmor()
	if r := p.Runtime; r != nil {
		facts.RecursiveReadOnly = facts.RecursiveReadOnly && r.RecursiveReadOnly
	}
	return facts
}

// pod converts a pod for package oci.
func (n Node) pod(p *state.Pod) oci.Pod {
	dir, shm := n.Dirs.Etc(p.ID), n.Dirs.Shm(p.ID)
	if !p.Tmpfs {
		dir, shm = n.Dirs.PodFiles(p.ID), n.Dirs.OldShm(p.ID)
	}
	pod := oci.Pod{
		ID:           p.ID,
		Config:       p.Config,
		CgroupParent: p.Config.GetLinux().GetCgroupParent(),
		NetNS:        p.NetNS,
		ResolvConf:   filepath.Join(dir, "resolv.conf"),
		Hostname:     filepath.Join(dir, "hostname"),
		Hosts:        filepath.Join(dir, "hosts"),
		Shm:          shm,
		OwnsFiles:    p.Tmpfs,
		PausePID:     p.PausePID,
	}
	if state.HostIPC(p.Config) {
		pod.Shm = "/dev/shm"
	}
	if p.Mappings != nil {
		pod.Mappings, pod.UserNS = p.Mappings, n.Dirs.UserNS(p.ID)
	}
	return pod
}

// cdiDevices returns the names of the CDI devices in the CDIDevices field of a container's config.
// Annotations cannot request devices (CVE-2026-53492).
func cdiDevices(config *runtimeapi.ContainerConfig) []string {
	var names []string
	for _, d := range config.GetCDIDevices() {
		names = append(names, d.GetName())
	}
	return names
}

// bindDevices replaces device nodes of a complete spec by bind mounts, if the pod has a user
// namespace. The devices are the config's devices and the CDI devices cdiNames.
func (n Node) bindDevices(p *state.Pod, c *state.Container, cdiNames []string, spec *specs.Spec) error {
	if p.Mappings == nil {
		return nil
	}
	sources, err := n.CDI.HostPaths(cdiNames)
	if err != nil {
		return err
	}
	for _, d := range c.Config.GetDevices() {
		sources = append(sources, d.GetHostPath())
	}
	return oci.BindDevices(spec, sources, host.Files{})
}

// ForPlugins returns the part of a container's spec that its record keeps for plugins. Plugins are
// called under a hold and with locks. Building a new spec would inspect the container's volumes,
// and a hanging volume would block all plugins. The seccomp filter is the largest part and is left
// out. Plugins see it only at the creation.
func ForPlugins(spec *specs.Spec) *specs.Spec {
	linux := *spec.Linux
	linux.Seccomp = nil
	return &specs.Spec{Mounts: spec.Mounts, Hooks: spec.Hooks, Linux: &linux}
}
