package confine

import (
	"cmp"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/host"
)

// DefaultAppArmorProfile is the profile of RuntimeDefault.
const DefaultAppArmorProfile = "berth-default"

// AppArmorProfile reads the profile field or its deprecated predecessor. If both are missing, the
// request is RuntimeDefault (kubernetes#51746).
func AppArmorProfile(p *runtimeapi.SecurityProfile, deprecated string) Profile {
	r := NewProfile(p, deprecated)
	if !r.set {
		r.kind = runtimeapi.SecurityProfile_RuntimeDefault
	}
	return r
}

// SetAppArmor sets the process's profile. A requested profile must be loaded. A privileged
// container ignores RuntimeDefault, but not a localhost profile. If there is no request, and the
// kernel has the default profile loaded, the container gets it, as with containerd.
func SetAppArmor(r Profile, privileged bool, facts host.Facts, files Files, spec *specs.Spec) error {
	if err := r.check("apparmor"); err != nil {
		return err
	}
	switch {
	case r.kind == runtimeapi.SecurityProfile_Unconfined:
		return nil
	case r.kind == runtimeapi.SecurityProfile_Localhost && !facts.AppArmor:
		return errdefs.FailedPrecondition("apparmor: profile %q requested, but the host has no AppArmor", r.ref)
	case r.kind == runtimeapi.SecurityProfile_RuntimeDefault && (!facts.AppArmor || privileged):
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
		return errdefs.FailedPrecondition("apparmor: RuntimeDefault requested, but its profile %q is not loaded: %s",
			name, cmp.Or(facts.NoAppArmorProfile, "it was unloaded"))
	}
	return nil
}
