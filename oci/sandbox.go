package oci

import (
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/oci/confine"
)

const sandboxOOMScoreAdj = -998 // killed after all its containers, as in kubelet's podInfraOOMAdj

// SandboxSpec builds the spec of a pod's pause, which holds the pod's namespaces and reaps orphans
// if containers share its PID namespace. It has a read-only root with /proc and /dev, and no
// capabilities. The pod's resources and overhead limit the pod's cgroup, which kubelet makes.
//
// The root directory must contain /proc and /dev as mount points.
func SandboxSpec(in SandboxInput) (*specs.Spec, error) {
	if err := checkMapped(in.Pod, in.User); err != nil {
		return nil, err
	}
	process, err := sandboxProcess(in)
	if err != nil {
		return nil, err
	}
	spec := &specs.Spec{
		Version: specs.Version,
		Root:    &specs.Root{Readonly: true},
		Process: process,
		Mounts:  []specs.Mount{procMount(), devMount()},
		Linux:   &specs.Linux{},
	}
	for _, step := range []func(SandboxInput, *specs.Spec) error{
		setSandboxNamespaces,
		setSandboxHostname,
		setSandboxCgroup,
		setSandboxSecurity,
	} {
		if err := step(in, spec); err != nil {
			return nil, err
		}
	}
	return spec, nil
}

func sandboxProcess(in SandboxInput) (*specs.Process, error) {
	args, cwd, env := []string{PausePath}, "/", environment{}
	env.set("PATH", strings.TrimPrefix(defaultPath, "PATH="))
	if in.Image != nil {
		var err error
		if args, err = processArgs(nil, in.Image); err != nil {
			return nil, err
		}
		if cwd, err = processCwd("", in.Image.WorkingDir); err != nil {
			return nil, err
		}
		if err := env.addImage(in.Image.Env); err != nil {
			return nil, err
		}
	}
	env.set("HOME", in.User.HomeVariable())
	score := sandboxOOMScoreAdj
	return &specs.Process{
		Args:         args,
		Env:          env.vars,
		Cwd:          cwd,
		User:         in.User.Spec(),
		OOMScoreAdj:  &score,
		Capabilities: &specs.LinuxCapabilities{},
	}, nil
}

// setSandboxNamespaces creates every namespace that the pod does not share with the node, or joins
// an existing one. The pause gets a private PID namespace even if each container has its own.
func setSandboxNamespaces(in SandboxInput, spec *specs.Spec) error {
	if err := checkSandboxModes(in.Pod.options()); err != nil {
		return err
	}
	if err := setFirstNamespaces(in.Pod, spec); err != nil {
		return err
	}
	add := func(t specs.LinuxNamespaceType, path string) {
		spec.Linux.Namespaces = append(spec.Linux.Namespaces, specs.LinuxNamespace{Type: t, Path: path})
	}
	if !in.Pod.hostNetwork() {
		if in.Pod.NetNS == "" {
			return errdefs.Internal("pod %s: path of its network namespace is missing", in.Pod.ID)
		}
		add(specs.NetworkNamespace, in.Pod.NetNS)
		add(specs.UTSNamespace, "")
	}
	if !in.Pod.hostIPC() {
		add(specs.IPCNamespace, "")
	}
	if !in.Pod.hostPID() {
		add(specs.PIDNamespace, "")
	}
	return nil
}

func checkSandboxModes(o *runtimeapi.NamespaceOption) error {
	if o.GetCgroupnsOptions() != nil {
		return errdefs.InvalidArgument("namespace_options.cgroupns_options: not valid for a pod, only for a container")
	}
	for _, ns := range []struct {
		name string
		mode runtimeapi.NamespaceMode
	}{{"network", o.GetNetwork()}, {"ipc", o.GetIpc()}, {"pid", o.GetPid()}} {
		switch ns.mode {
		case runtimeapi.NamespaceMode_POD, runtimeapi.NamespaceMode_CONTAINER, runtimeapi.NamespaceMode_NODE:
		default:
			return errdefs.InvalidArgument("namespace_options.%s: %s is not valid for a pod", ns.name, ns.mode)
		}
	}
	return nil
}

func setSandboxHostname(in SandboxInput, spec *specs.Spec) error {
	if err := checkPodHostname(in.Pod); err != nil {
		return err
	}
	if !in.Pod.hostNetwork() { // a pod on the node's network also uses its UTS namespace
		spec.Hostname = in.Pod.Config.GetHostname()
	}
	return nil
}

func setSandboxCgroup(in SandboxInput, spec *specs.Spec) (err error) {
	if spec.Linux.CgroupsPath, err = CgroupsPath(in.Pod.CgroupParent, in.Pod.ID, in.SystemdCgroup); err != nil {
		return err
	}
	// The pause process sleeps, so its CPU weight does not matter.
	spec.Linux.Resources = &specs.LinuxResources{
		CPU:     &specs.LinuxCPU{Cpus: in.CPUs},
		Devices: []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}},
	}
	return nil
}

func setSandboxSecurity(in SandboxInput, spec *specs.Spec) (err error) {
	sc := in.Pod.Config.GetLinux().GetSecurityContext()
	if spec.Linux.Sysctl, err = sysctls(in.Pod); err != nil {
		return err
	}
	//nolint:staticcheck // deprecated, but old clients send it
	seccomp := confine.NewProfile(sc.GetSeccomp(), sc.GetSeccompProfilePath())
	if err := confine.SetSeccomp(seccomp, in.Seccomp, sc.GetPrivileged(), in.Host, in.Files, spec); err != nil {
		return err
	}
	profile := confine.AppArmorProfile(sc.GetApparmor(), "")
	if err := confine.SetAppArmor(profile, sc.GetPrivileged(), in.Host, in.Files, spec); err != nil {
		return err
	}
	confine.SetSELinux(in.Labels, sc.GetPrivileged(), spec)
	return nil
}
