package oci

import (
	"regexp"

	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/selinux/go-selinux"
	"github.com/opencontainers/selinux/go-selinux/label"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
)

// DefaultAppArmorProfile is the profile that RuntimeDefault stands for.
const DefaultAppArmorProfile = "berth-default"

// apparmorRequest reads the profile field or its deprecated forerunner. Not asking means
// RuntimeDefault (kubernetes#51746).
func apparmorRequest(p *runtimeapi.SecurityProfile, deprecated string) profileRequest {
	r := newProfileRequest(p, deprecated)
	if !r.set {
		r.kind = runtimeapi.SecurityProfile_RuntimeDefault
	}
	return r
}

// setAppArmor confines the process. The default profile is applied where the kernel has
// it loaded; a localhost profile must be there, also for a privileged container.
func setAppArmor(r profileRequest, privileged bool, host Host, files Files, spec *specs.Spec) error {
	if err := r.check("apparmor"); err != nil {
		return err
	}
	switch {
	case r.kind == runtimeapi.SecurityProfile_Unconfined:
		return nil
	case r.kind == runtimeapi.SecurityProfile_Localhost && !host.AppArmor:
		return errdefs.FailedPrecondition("apparmor: profile %q wanted, but the host has no AppArmor", r.ref)
	case r.kind == runtimeapi.SecurityProfile_RuntimeDefault && (!host.AppArmor || privileged):
		return nil
	}
	name := DefaultAppArmorProfile
	if r.kind == runtimeapi.SecurityProfile_Localhost {
		name = r.ref
	}
	loaded, err := files.AppArmorLoaded(name)
	if err != nil {
		return err
	}
	if loaded {
		spec.Process.ApparmorProfile = name
		return nil
	}
	if r.kind == runtimeapi.SecurityProfile_Localhost {
		return errdefs.FailedPrecondition("apparmor: profile %q is not loaded", name)
	}
	return nil
}

// setSELinux labels the process and the mounts. Without options of its own a container
// takes its pod's label. Hosts without SELinux ignore all of it, as do containerd and CRI-O.
func setSELinux(o *runtimeapi.SELinuxOption, podLabel string, privileged bool, host Host, spec *specs.Spec) error {
	options, err := labelOptions(o)
	if err != nil || !host.SELinux {
		return err
	}
	if len(options) == 0 && podLabel != "" {
		if options, err = selinux.DupSecOpt(podLabel); err != nil {
			return errdefs.Internal("selinux: label %q of the pod: %w", podLabel, err)
		}
	}
	process, mount, err := label.InitLabels(options)
	if err != nil {
		return errdefs.InvalidArgument("selinux_options: %w", err)
	}
	spec.Linux.MountLabel = mount
	if privileged { // CRI: restrictions are not applied
		selinux.ReleaseLabel(process)
		return nil
	}
	spec.Process.SelinuxLabel = process
	return nil
}

var (
	labelWord  = regexp.MustCompile(`^[a-zA-Z0-9_.]+$`)
	labelLevel = regexp.MustCompile(`^s[0-9]{1,2}(-s[0-9]{1,2})?(:c[0-9]{1,4}([.,]c[0-9]{1,4})*)?$`)
)

func labelOptions(o *runtimeapi.SELinuxOption) ([]string, error) {
	var options []string
	for _, part := range []struct {
		name, value string
		valid       *regexp.Regexp
	}{
		{"user", o.GetUser(), labelWord},
		{"role", o.GetRole(), labelWord},
		{"type", o.GetType(), labelWord},
		{"level", o.GetLevel(), labelLevel},
	} {
		if part.value == "" {
			continue
		}
		if !part.valid.MatchString(part.value) {
			return nil, errdefs.InvalidArgument("selinux_options: %s %q is not valid", part.name, part.value)
		}
		options = append(options, part.name+":"+part.value)
	}
	return options, nil
}

// ReleaseSELinuxLabel gives back the categories of a spec's label, once its container or pod is removed.
func ReleaseSELinuxLabel(spec *specs.Spec) {
	if spec.Process != nil && spec.Process.SelinuxLabel != "" {
		selinux.ReleaseLabel(spec.Process.SelinuxLabel)
	}
}

// RelabelSources returns the host paths that a container's CRI mounts ask to have labelled with
// spec.Linux.MountLabel; the caller does it before launch. Never the pod's own
// files or anything the config does not name (CVE-2021-43816).
func RelabelSources(config *runtimeapi.ContainerConfig, files Files) ([]string, error) {
	var sources []string
	for _, m := range config.GetMounts() {
		if !m.GetSelinuxRelabel() || IsImageVolume(m) { // other containers run on the same layers
			continue
		}
		source, err := mountSource(m, files)
		if err != nil {
			return nil, err
		}
		sources = append(sources, source)
	}
	return sources, nil
}
