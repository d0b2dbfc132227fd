package oci

import (
	"encoding/json"
	"fmt"
	"slices"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci/confine"
)

const (
	runtimeDefault = runtimeapi.SecurityProfile_RuntimeDefault
	unconfined     = runtimeapi.SecurityProfile_Unconfined
	localhost      = runtimeapi.SecurityProfile_Localhost
)

func profile(kind runtimeapi.SecurityProfile_ProfileType, ref string) *runtimeapi.SecurityProfile {
	return &runtimeapi.SecurityProfile{ProfileType: kind, LocalhostRef: ref}
}

// allows reports whether a filter passes a system call without conditions.
func allows(s *specs.LinuxSeccomp, name string) bool {
	for _, call := range s.Syscalls {
		if call.Action == specs.ActAllow && len(call.Args) == 0 && slices.Contains(call.Names, name) {
			return true
		}
	}
	return false
}

func TestSeccomp(t *testing.T) {
	t.Parallel()
	const isNone, isDefault, isLocal = "none", "default", "local"
	for _, test := range []struct {
		name       string
		profile    *runtimeapi.SecurityProfile
		deprecated string
		privileged bool
		want       string
	}{
		{name: "no request", want: isNone},
		{name: "default", profile: profile(runtimeDefault, ""), want: isDefault},
		{name: "unconfined", profile: profile(unconfined, ""), want: isNone},
		{name: "localhost", profile: profile(localhost, "/profiles/allow.json"), want: isLocal},
		{name: "localhost with prefix", profile: profile(localhost, "localhost//profiles/allow.json"), want: isLocal},
		{name: "privileged", profile: profile(runtimeDefault, ""), privileged: true, want: isNone},
		{name: "deprecated default", deprecated: "runtime/default", want: isDefault},
		{name: "deprecated docker", deprecated: "docker/default", want: isDefault},
		{name: "deprecated unconfined", deprecated: "unconfined", want: isNone},
		{name: "deprecated localhost", deprecated: "localhost//profiles/allow.json", want: isLocal},
		{name: "field wins", profile: profile(unconfined, ""), deprecated: "runtime/default", want: isNone},
	} {
		t.Run(test.name, func(t *testing.T) {
			in := testInput()
			in.sc().Seccomp = test.profile
			in.sc().SeccompProfilePath = test.deprecated //nolint:staticcheck // on purpose
			if test.privileged {
				in.privilege()
			}
			s := mustSpec(t, in).Linux.Seccomp
			got := isNone
			switch {
			case s != nil && s.DefaultAction == specs.ActErrno && allows(s, "read") && !allows(s, "reboot"):
				got = isDefault
			case s != nil && s.DefaultAction == specs.ActAllow:
				got = isLocal
			}
			if got != test.want {
				t.Errorf("got %s (%+v), want %s", got, s, test.want)
			}
		})
	}
}

// The default filter depends on the container's capabilities.
func TestSeccompFollowsCapabilities(t *testing.T) {
	t.Parallel()
	in := testInput()
	in.sc().Seccomp = profile(runtimeDefault, "")
	if allows(mustSpec(t, in).Linux.Seccomp, "reboot") {
		t.Error("reboot allowed by default")
	}
	in.sc().Capabilities = &runtimeapi.Capability{AddCapabilities: []string{"SYS_BOOT"}}
	if !allows(mustSpec(t, in).Linux.Seccomp, "reboot") {
		t.Error("reboot not allowed with CAP_SYS_BOOT")
	}
}

func TestSeccompRefused(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		profile    *runtimeapi.SecurityProfile
		deprecated string
		err        string
	}{
		{profile(localhost, ""), "", "localhost_ref"},
		{profile(localhost, "relative.json"), "", `"relative.json"`},
		{profile(localhost, "/profiles/missing.json"), "", "/profiles/missing.json does not exist"},
		{profile(localhost, "/profiles/empty.json"), "", "neither defaultAction nor syscalls"},
		{profile(runtimeDefault, "/profiles/allow.json"), "", "profile_type Localhost"},
		{profile(7, ""), "", "profile_type 7"},
		{nil, "default", `"default"`},
		{nil, "localhost/", "localhost_ref"},
	} {
		t.Run(fmt.Sprint(test.profile, test.deprecated), func(t *testing.T) {
			refused(t, func(in *ContainerInput) {
				in.sc().Seccomp = test.profile
				in.sc().SeccompProfilePath = test.deprecated //nolint:staticcheck // on purpose
			}, codes.InvalidArgument, "seccomp", test.err)
		})
	}
	refused(t, func(in *ContainerInput) {
		in.Host.Seccomp = false
		in.sc().Seccomp = profile(runtimeDefault, "")
	}, codes.FailedPrecondition, "no seccomp")
}

func TestAppArmor(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name       string
		profile    *runtimeapi.SecurityProfile
		deprecated string
		privileged bool
		host       bool
		loaded     []string
		want       string
	}{
		{name: "no AppArmor, no request"},
		{name: "no AppArmor, default", profile: profile(runtimeDefault, "")},
		{name: "no AppArmor, unconfined", profile: profile(unconfined, "")},
		{name: "no request means default", host: true, loaded: []string{confine.DefaultAppArmorProfile}, want: confine.DefaultAppArmorProfile},
		{name: "default", host: true, profile: profile(runtimeDefault, ""), loaded: []string{confine.DefaultAppArmorProfile}, want: confine.DefaultAppArmorProfile},
		{name: "no request, not loaded", host: true},
		{name: "default not loaded, privileged", host: true, privileged: true, profile: profile(runtimeDefault, "")},
		{name: "default, privileged", host: true, privileged: true, loaded: []string{confine.DefaultAppArmorProfile}},
		{name: "unconfined", host: true, profile: profile(unconfined, ""), loaded: []string{confine.DefaultAppArmorProfile}},
		{name: "localhost", host: true, profile: profile(localhost, "custom"), loaded: []string{"custom"}, want: "custom"},
		{name: "localhost, privileged", host: true, privileged: true, profile: profile(localhost, "custom"), loaded: []string{"custom"}, want: "custom"},
		{name: "deprecated localhost", host: true, deprecated: "localhost/custom", loaded: []string{"custom"}, want: "custom"},
		{name: "deprecated default", host: true, deprecated: "runtime/default", loaded: []string{confine.DefaultAppArmorProfile}, want: confine.DefaultAppArmorProfile},
		{name: "deprecated unconfined", host: true, deprecated: "unconfined", loaded: []string{confine.DefaultAppArmorProfile}},
	} {
		t.Run(test.name, func(t *testing.T) {
			in := testInput()
			in.Host.AppArmor = test.host
			in.Files = fakeFiles{apparmor: test.loaded, devices: testFiles().devices}
			in.sc().Apparmor = test.profile
			in.sc().ApparmorProfile = test.deprecated //nolint:staticcheck // on purpose
			if test.privileged {
				in.privilege()
			}
			if got := mustSpec(t, in).Process.ApparmorProfile; got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

func TestAppArmorRefused(t *testing.T) {
	t.Parallel()
	refused(t, func(in *ContainerInput) { in.sc().Apparmor = profile(localhost, "custom") }, codes.FailedPrecondition, `"custom"`, "no AppArmor")
	refused(t, func(in *ContainerInput) {
		in.Host.AppArmor = true
		in.sc().Apparmor = profile(localhost, "ghost")
	}, codes.FailedPrecondition, `"ghost" is not loaded`)
	refused(t, func(in *ContainerInput) {
		in.Host.AppArmor, in.Host.NoAppArmorProfile = true, "install apparmor_parser"
		in.sc().Apparmor = profile(runtimeDefault, "")
	}, codes.FailedPrecondition, confine.DefaultAppArmorProfile, "not loaded", "install apparmor_parser")
	refused(t, func(in *ContainerInput) {
		in.Host.AppArmor = true
		in.sc().ApparmorProfile = "runtime/default" //nolint:staticcheck // on purpose
	}, codes.FailedPrecondition, confine.DefaultAppArmorProfile, "not loaded")
	refused(t, func(in *ContainerInput) { in.sc().Apparmor = profile(localhost, "") }, codes.InvalidArgument, "localhost_ref")
	refused(t, func(in *ContainerInput) { in.sc().ApparmorProfile = "custom" }, codes.InvalidArgument, `"custom"`) //nolint:staticcheck // on purpose
}

var podLabels = confine.Labels{Process: "system_u:system_r:container_t:s0:c1,c2", Mount: "system_u:object_r:container_file_t:s0:c1,c2"}

func TestSELinuxLabelsInSpec(t *testing.T) {
	t.Parallel()
	in := testInput()
	in.Labels = podLabels
	if spec := mustSpec(t, in); spec.Process.SelinuxLabel != podLabels.Process || spec.Linux.MountLabel != podLabels.Mount {
		t.Errorf("labels %q, %q", spec.Process.SelinuxLabel, spec.Linux.MountLabel)
	}
	in.privilege()
	if spec := mustSpec(t, in); spec.Process.SelinuxLabel != "" || spec.Linux.MountLabel != podLabels.Mount {
		t.Errorf("privileged: labels %q, %q", spec.Process.SelinuxLabel, spec.Linux.MountLabel)
	}
	pause := sandboxSpec(t, func(in *SandboxInput) { in.Labels = podLabels })
	if pause.Process.SelinuxLabel != podLabels.Process {
		t.Errorf("pause: label %q", pause.Process.SelinuxLabel)
	}
}

func TestPathsAndFlags(t *testing.T) {
	t.Parallel()
	in := testInput()
	in.sc().MaskedPaths = []string{"/proc/kcore"}
	in.sc().ReadonlyPaths = []string{"/proc/sys"}
	in.sc().NoNewPrivs = true
	spec := mustSpec(t, in)
	if !slices.Equal(spec.Linux.MaskedPaths, []string{"/proc/kcore"}) || !slices.Equal(spec.Linux.ReadonlyPaths, []string{"/proc/sys"}) {
		t.Errorf("masked %q, read-only %q", spec.Linux.MaskedPaths, spec.Linux.ReadonlyPaths)
	}
	if !spec.Process.NoNewPrivileges {
		t.Error("no_new_privs is not set")
	}
	in.privilege()
	if spec := mustSpec(t, in); spec.Linux.MaskedPaths != nil || spec.Linux.ReadonlyPaths != nil {
		t.Errorf("privileged: masked %q, read-only %q", spec.Linux.MaskedPaths, spec.Linux.ReadonlyPaths)
	}
	refused(t, func(in *ContainerInput) { in.sc().MaskedPaths = []string{"proc"} }, codes.InvalidArgument, "masked_paths")
	refused(t, func(in *ContainerInput) { in.sc().ReadonlyPaths = []string{"/a\x00"} }, codes.InvalidArgument, "readonly_paths")
}

// Annotations of users and images never reach libcontainer or systemd.
func TestAnnotationsSteerNothing(t *testing.T) {
	t.Parallel()
	plain := mustSpec(t, testInput())
	in := testInput()
	bad := map[string]string{
		"org.systemd.property.ExecStartPre": "['/bin/sh']", "run.oci.hooks.stdout": "/x",
		"io.kubernetes.cri-o.userns-mode": "auto", "cdi.k8s.io/x": "vendor.com/gpu=0",
	}
	in.Config.Annotations, in.Config.Labels = bad, bad
	in.Pod.Config.Annotations, in.Pod.Config.Labels = bad, bad
	in.Image.Labels = bad
	in.Config.Image = &runtimeapi.ImageSpec{Annotations: bad}
	a, _ := json.Marshal(plain)
	b, _ := json.Marshal(mustSpec(t, in))
	if string(a) != string(b) {
		t.Errorf("spec changed:\n%s\n%s", a, b)
	}
}
