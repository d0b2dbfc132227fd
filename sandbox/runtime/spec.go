package runtime

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/host"
	"berth/internal/nri"
	"berth/oci"
	"berth/oci/users"
	"berth/sandbox/state"
)

// profiles load the default AppArmor profile. *lsm.AppArmor implements it and documents the
// methods.
type profiles interface {
	Ensure(ctx context.Context)
	Problem() string
}

// pauseSpec returns the runtime-spec of a pod's pause. image is the config of the pause image, nil
// for the embedded pause.
func (k Launcher) pauseSpec(
	ctx context.Context, p *state.Pod, user users.User, image *ocispec.ImageConfig,
) (*specs.Spec, error) {
	cpus := k.Node.PauseCPUs
	if p.Sandboxed() { // the sandbox of all containers is in the cgroup of the pause
		cpus = ""
	}
	spec, err := oci.SandboxSpec(oci.SandboxInput{
		Pod:           podOf(k.Node, p),
		Labels:        p.Labels,
		Host:          k.facts(ctx, p),
		Files:         host.Files{},
		SystemdCgroup: k.Node.SystemdCgroup,
		User:          user,
		Image:         image,
		Seccomp:       k.defaults(p).Seccomp,
		CPUs:          cpus,
	})
	if err != nil {
		return nil, err
	}
	raiseOOMScore(spec.Process, k.Node.Host)
	p.Runtime.Annotate(spec, p.ID, p.Config, nil)
	p.Runtime.AnnotateSize(spec, p.Config.GetLinux().GetResources())
	return spec, nil
}

// containerSpec returns the runtime-spec of a container. volumes are the mount points of its image
// volumes, by index of the mount. targetPIDNS is the path of the PID namespace to join. If it is
// empty, the config decides.
func (k Launcher) containerSpec(
	ctx context.Context, p *state.Pod, c *state.Container, volumes map[int]string, targetPIDNS string,
) (*specs.Spec, error) {
	facts, err := k.cgroupFacts(ctx, p, c.Config.GetLinux().GetSecurityContext())
	if err != nil {
		return nil, err
	}
	spec, err := oci.ContainerSpec(oci.ContainerInput{
		ID:              c.ID,
		Pod:             podOf(k.Node, p),
		Config:          c.Config,
		Image:           &c.Image.Config,
		User:            c.User,
		Labels:          c.Labels,
		Host:            facts,
		SystemdCgroup:   k.Node.SystemdCgroup,
		TargetPIDNS:     targetPIDNS,
		Resources:       c.Resources,
		Files:           host.Files{},
		ImageVolumes:    volumes,
		DeviceOwnership: k.Node.OwnDevices,

		WithoutHostDevices: p.Runtime != nil && p.Runtime.WithoutHostDevices,
		Defaults:           k.defaults(p),
		Volumes:            c.Anonymous,
		VolumesDir:         k.Node.Volumes(c.ID),
	})
	if err != nil {
		return nil, err
	}
	p.Runtime.Annotate(spec, p.ID, p.Config, c.Config)
	c.Limits.AddTo(spec.Linux.Resources)
	names := cdiDevices(c.Config)
	if err := CDIDirs(k.Node.CDI).Inject(spec, names); err != nil {
		return nil, err
	}
	node := nri.Node{
		Sysctl: func(name, value string) (string, error) { return oci.Sysctl(podOf(k.Node, p), name, value) },
		CDI: func(spec *specs.Spec, more []string) error {
			names = append(names, more...)
			return CDIDirs(k.Node.CDI).Inject(spec, more)
		}}
	if err := c.Adjustment.Apply(spec, node); err != nil {
		return nil, err
	}
	raiseOOMScore(spec.Process, k.Node.Host)
	if oci.WritableCgroups(c.Config.GetLinux().GetSecurityContext()) {
		if err := k.protectLimits(p, spec); err != nil {
			return nil, err
		}
	}
	oci.DropCovered(spec, c.Anonymous, k.Node.Volumes(c.ID))
	return spec, k.bindDevices(p, c, names, spec)
}

// cgroupFacts returns the facts for a container. It refuses requests for cgroups that the pod's
// runtime does not support.
func (k Launcher) cgroupFacts(
	ctx context.Context, p *state.Pod, sc *runtimeapi.LinuxContainerSecurityContext,
) (facts host.Facts, err error) {
	asked := sc.GetNamespaceOptions().GetCgroupnsOptions() != nil
	if r := p.Runtime; r != nil {
		switch {
		case asked && !r.CgroupNamespaces:
			return facts, errdefs.FailedPrecondition("cgroupns_options: %s does not report support for cgroup namespaces", r.Path)
		case oci.WritableCgroups(sc):
			return facts, errdefs.FailedPrecondition("cgroup_mount_mode: READ_WRITE of an unprivileged container "+
				"needs berth's own runtime handler, not %s", r.Path)
		}
	}
	facts = k.facts(ctx, p)
	if facts.CgroupV2 && (asked || oci.WritableCgroups(sc) || sc.GetPrivileged()) {
		if facts.CgroupOptions, err = host.CgroupOptions(); err != nil {
			return facts, fmt.Errorf("find options of the cgroup filesystem: %w", err)
		}
	}
	return facts, nil
}

// protectLimits makes the limits of a container's own cgroup read-only in its mount of cgroups. In
// a user namespace the node's root owns them. Otherwise nsdelegate does not protect them from a
// process that makes a cgroup namespace in a user namespace of its own.
func (k Launcher) protectLimits(p *state.Pod, spec *specs.Spec) error {
	if !slices.Contains(spec.Linux.Namespaces, specs.LinuxNamespace{Type: specs.CgroupNamespace}) {
		return errdefs.FailedPrecondition("cgroup_mount_mode: READ_WRITE, but an NRI plugin has removed the cgroup namespace")
	}
	if p.Mappings != nil {
		return nil
	}
	group, err := k.Node.Cgroup(p.CgroupsPath)
	if err != nil {
		return err
	}
	names, err := group.Undelegated() // the kernel has the same files for the pause and the container
	for _, name := range names {
		spec.Linux.ReadonlyPaths = append(spec.Linux.ReadonlyPaths, "/sys/fs/cgroup/"+name)
	}
	return err
}

// raiseOOMScore raises the oom_score_adj of a process to the lowest value that the node permits.
func raiseOOMScore(p *specs.Process, facts host.Facts) {
	if p.OOMScoreAdj != nil {
		score := max(*p.OOMScoreAdj, facts.OOMScoreAdjMin)
		p.OOMScoreAdj = &score
	}
}

// defaults returns the node's defaults for a pod. OCI runtimes know only one seccomp profile, so
// their pods cannot use a pulled profile with its base.
func (k Launcher) defaults(p *state.Pod) oci.Defaults {
	d := k.Node.Defaults
	if p.Runtime != nil {
		d.Seccomp.Pulled = nil
	}
	return d
}

// facts returns the node's facts, reduced to the features of the pod's runtime. It loads the
// default AppArmor profile if that is missing.
func (k Launcher) facts(ctx context.Context, p *state.Pod) host.Facts {
	k.AppArmor.Ensure(ctx)
	facts := k.Node.Host
	facts.NoAppArmorProfile = k.AppArmor.Problem()
	if r := p.Runtime; r != nil {
		facts.RecursiveReadOnly = facts.RecursiveReadOnly && r.RecursiveReadOnly
	}
	return facts
}

// podOf converts a pod for package oci.
func podOf(n state.Node, p *state.Pod) oci.Pod {
	dir, shm := n.Etc(p.ID), n.Shm(p.ID)
	if !p.Tmpfs {
		dir, shm = n.PodFiles(p.ID), n.OldShm(p.ID)
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
		pod.Mappings, pod.UserNS = p.Mappings, n.UserNS(p.ID)
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
func (k Launcher) bindDevices(p *state.Pod, c *state.Container, cdiNames []string, spec *specs.Spec) error {
	if p.Mappings == nil {
		return nil
	}
	sources, err := CDIDirs(k.Node.CDI).HostPaths(cdiNames)
	if err != nil {
		return err
	}
	for _, d := range c.Config.GetDevices() {
		sources = append(sources, d.GetHostPath())
	}
	return oci.BindDevices(spec, sources, host.Files{})
}

// ForPlugins returns the part of a container's spec that its record keeps for plugins. Plugins are
// called under a hold and with locks. A new spec would require an inspection of the container's
// volumes, and a hanging volume would block all plugins. The seccomp filter is the largest part and
// is left out. Plugins see it only at the creation.
func ForPlugins(spec *specs.Spec) *specs.Spec {
	linux := *spec.Linux
	linux.Seccomp = nil
	return &specs.Spec{Mounts: spec.Mounts, Hooks: spec.Hooks, Linux: &linux}
}
