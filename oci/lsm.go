package oci

import (
	"cmp"

	"github.com/opencontainers/runtime-spec/specs-go"
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

// setAppArmor confines the process. A profile that is asked for must be there, a localhost
// profile also for a privileged container. A container that asks for none gets the default profile
// where the kernel has it loaded, as with containerd.
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
	switch {
	case r.kind == runtimeapi.SecurityProfile_Localhost:
		return errdefs.FailedPrecondition("apparmor: profile %q is not loaded", name)
	case r.set:
		return errdefs.FailedPrecondition("apparmor: RuntimeDefault wanted, but its profile %q is not loaded: %s",
			name, cmp.Or(host.NoAppArmorProfile, "somebody has unloaded it"))
	}
	return nil
}
