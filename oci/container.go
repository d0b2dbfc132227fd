package oci

import (
	"slices"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci/confine"
)

// ContainerSpec builds the spec of a container. The same input gives the same spec. The package
// comment lists the errors.
func ContainerSpec(in ContainerInput) (*specs.Spec, error) {
	if in.Image == nil {
		in.Image = &ocispec.ImageConfig{}
	}
	if err := checkRequest(in); err != nil {
		return nil, err
	}
	spec := &specs.Spec{Version: specs.Version, Root: &specs.Root{}, Linux: &specs.Linux{}}
	for _, step := range []func(ContainerInput, *specs.Spec) error{
		setProcess,
		setNamespaces,
		setCgroup,
		setMounts,
		setDevices,
		setSecurity,
	} {
		if err := step(in, spec); err != nil {
			return nil, err
		}
	}
	return spec, nil
}

// checkRequest refuses requests that are forbidden or not implemented.
func checkRequest(in ContainerInput) error {
	if err := checkPodHostname(in.Pod); err != nil { // it becomes an environment variable
		return err
	}
	if err := checkContainerUserNamespace(in); err != nil {
		return err
	}
	return checkMapped(in.Pod, in.User)
}

func setProcess(in ContainerInput, spec *specs.Spec) error {
	if err := CheckStopSignal(in.Config.GetStopSignal()); err != nil {
		return err
	}
	args, err := processArgs(in.Config, in.Image)
	if err != nil {
		return err
	}
	env, err := processEnv(in)
	if err != nil {
		return err
	}
	cwd, err := processCwd(in.Config.GetWorkingDir(), in.Image.WorkingDir)
	if err != nil {
		return err
	}
	score, err := oomScoreAdj(in.resources().GetOomScoreAdj())
	if err != nil {
		return err
	}
	spec.Process = &specs.Process{
		Terminal:    in.Config.GetTty(),
		Args:        args,
		Env:         env,
		Cwd:         cwd,
		User:        in.User.Spec(),
		OOMScoreAdj: &score,
		Rlimits:     slices.Clone(in.Defaults.Rlimits),
	}
	return nil
}

func setCgroup(in ContainerInput, spec *specs.Spec) (err error) {
	if spec.Linux.CgroupsPath, err = CgroupsPath(in.Pod.CgroupParent, in.ID, in.SystemdCgroup); err != nil {
		return err
	}
	if spec.Linux.Resources, err = LinuxResources(in.resources(), in.Host); err != nil {
		return err
	}
	if WritableCgroups(in.security()) {
		limitNesting(spec.Linux.Resources)
	}
	return nil
}

// setSecurity sets all restrictions of the process. Privileged lifts most restrictions
// (LinuxContainerSecurityContext.privileged in the CRI).
func setSecurity(in ContainerInput, spec *specs.Spec) error {
	sc := in.security()
	caps, err := confine.Capabilities(sc.GetCapabilities(), sc.GetPrivileged(), in.Host)
	if err != nil {
		return err
	}
	spec.Process.Capabilities = caps // before seccomp, because the default profile depends on the capabilities
	spec.Process.NoNewPrivileges = sc.GetNoNewPrivs()
	spec.Root.Readonly = sc.GetReadonlyRootfs()
	if err := setPaths(sc, spec); err != nil {
		return err
	}
	//nolint:staticcheck // deprecated, but old clients send it
	seccomp := confine.NewProfile(sc.GetSeccomp(), sc.GetSeccompProfilePath())
	if err := confine.SetSeccomp(seccomp, in.Defaults.Seccomp, sc.GetPrivileged(), in.Host, in.Files, spec); err != nil {
		return err
	}
	apparmor := confine.AppArmorProfile(sc.GetApparmor(), sc.GetApparmorProfile()) //nolint:staticcheck // as above
	if err := confine.SetAppArmor(apparmor, sc.GetPrivileged(), in.Host, in.Files, spec); err != nil {
		return err
	}
	confine.SetSELinux(in.Labels, sc.GetPrivileged(), spec)
	return nil
}

func setPaths(sc *runtimeapi.LinuxContainerSecurityContext, spec *specs.Spec) (err error) {
	if sc.GetPrivileged() {
		return nil
	}
	if spec.Linux.MaskedPaths, err = absolutePaths("masked_paths", sc.GetMaskedPaths()); err != nil {
		return err
	}
	spec.Linux.ReadonlyPaths, err = absolutePaths("readonly_paths", sc.GetReadonlyPaths())
	return err
}
