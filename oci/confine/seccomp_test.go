package confine

import (
	"encoding/json"
	"io/fs"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/host"
)

// aSpec returns the parts of a spec that profiles' conditions use.
func aSpec() *specs.Spec {
	return &specs.Spec{Process: &specs.Process{Capabilities: capabilitySets(defaultCapabilities, nil)}, Linux: &specs.Linux{}}
}

func TestSeccompProfilesRefused(t *testing.T) {
	t.Parallel()
	spec := aSpec()
	for body, want := range map[string]string{
		``:                          "unexpected end",
		`[]`:                        "cannot unmarshal",
		`{"x":1} {}`:                "after top-level value",
		`null`:                      "neither",
		`{"defaultAction":"ALLOW"}`: `defaultAction "ALLOW"`,
		`{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[null]}`:                                                                 "syscalls[0] is null",
		`{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["a"],"action":"NO"}]}`:                                        `action "NO" for a`,
		`{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["a"],"action":"SCMP_ACT_LOG","args":[{"op":"X"}]}]}`:          `operator "X" for a`,
		`{"defaultAction":"SCMP_ACT_ALLOW","architectures":["SCMP_ARCH_X86"],"archMap":[{"architecture":"SCMP_ARCH_X86_64"}]}`: "archMap",
	} {
		t.Run(body, func(t *testing.T) {
			_, err := parseProfile([]byte(body), spec)
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: got %v, want %q", body, err, want)
			}
		})
	}
}

// testPulled is the reference of pulledProfiles' profile.
const testPulled = "r.example/p@sha256:aa"

func pulledProfiles(ref string) ([]byte, error) {
	if ref != testPulled {
		return nil, errdefs.NotFound("%s is not present", ref)
	}
	return []byte(`{"defaultAction":"SCMP_ACT_LOG"}`), nil
}

// profileFiles are Localhost profiles by path.
type profileFiles map[string]string

func (f profileFiles) ReadProfile(path string) ([]byte, error) {
	body, ok := f[path]
	if !ok {
		return nil, fs.ErrNotExist
	}
	return []byte(body), nil
}

func (profileFiles) AppArmorLoaded(string) (bool, error) { return true, nil }

func TestPulledProfile(t *testing.T) {
	const unconfined, localhost = runtimeapi.SecurityProfile_Unconfined, runtimeapi.SecurityProfile_Localhost
	files := profileFiles{
		"/base":   `{"defaultAction":"SCMP_ACT_TRAP","listenerMetadata":"x"}`,
		"/agent":  `{"defaultAction":"SCMP_ACT_ALLOW","listenerPath":"/run/agent"}`,
		"/notify": `{"defaultAction":"SCMP_ACT_NOTIFY"}`,
	}
	base := func(kind runtimeapi.SecurityProfileBase_BaseType, path string) *runtimeapi.SecurityProfileBase {
		return &runtimeapi.SecurityProfileBase{Type: kind, LocalhostRef: path}
	}
	oci := func(ref string, base *runtimeapi.SecurityProfileBase) *runtimeapi.SecurityProfile {
		return &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_OCI, OciRef: ref, BaseProfile: base}
	}
	local := runtimeapi.SecurityProfileBase_Localhost
	for name, c := range map[string]struct {
		profile *runtimeapi.SecurityProfile
		code    codes.Code
		base    string // part of the JSON of the base
	}{
		"default base":            {oci(testPulled, nil), codes.OK, `"defaultAction":"SCMP_ACT_ERRNO"`},
		"RuntimeDefault":          {oci(testPulled, base(0, "")), codes.OK, `"defaultAction":"SCMP_ACT_ERRNO"`},
		"Localhost":               {oci(testPulled, base(local, "/base")), codes.OK, `{"defaultAction":"SCMP_ACT_TRAP"}`},
		"prefix":                  {oci(testPulled, base(local, "localhost//base")), codes.OK, `{"defaultAction":"SCMP_ACT_TRAP"}`},
		"absent":                  {oci("r.example/p@sha256:bb", nil), codes.NotFound, ""},
		"no reference":            {oci("", nil), codes.InvalidArgument, ""},
		"no path":                 {oci(testPulled, base(local, "")), codes.InvalidArgument, ""},
		"path and RuntimeDefault": {oci(testPulled, base(0, "/base")), codes.InvalidArgument, ""},
		"unknown base":            {oci(testPulled, base(7, "")), codes.InvalidArgument, ""},
		"absent base":             {oci(testPulled, base(local, "/none")), codes.InvalidArgument, ""},
		"base with an agent":      {oci(testPulled, base(local, "/agent")), codes.InvalidArgument, ""},
		"base that notifies":      {oci(testPulled, base(local, "/notify")), codes.InvalidArgument, ""},
		"localhost_ref": {&runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_OCI, OciRef: testPulled,
			LocalhostRef: "/base"}, codes.InvalidArgument, ""},
		"reference of RuntimeDefault": {&runtimeapi.SecurityProfile{OciRef: testPulled}, codes.InvalidArgument, ""},
		"reference of Unconfined":     {&runtimeapi.SecurityProfile{ProfileType: unconfined, OciRef: testPulled}, codes.InvalidArgument, ""},
		"base of Localhost": {&runtimeapi.SecurityProfile{ProfileType: localhost, LocalhostRef: "/base", BaseProfile: base(0, "")},
			codes.InvalidArgument, ""},
	} {
		t.Run(name, func(t *testing.T) {
			spec := aSpec()
			err := SetSeccomp(NewProfile(c.profile, ""), SeccompDefaults{Pulled: pulledProfiles}, false, host.Facts{Seccomp: true}, files, spec)
			if errdefs.Code(err) != c.code {
				t.Fatalf("SetSeccomp = %v", err)
			}
			if err != nil {
				return
			}
			p := spec.Linux.Seccomp
			if p.DefaultAction != specs.ActLog || p.ListenerPath != "" || !strings.Contains(p.ListenerMetadata, c.base) {
				t.Errorf("profile %s with the base %s", p.DefaultAction, p.ListenerMetadata)
			}
		})
	}
}

// Where a pulled profile cannot be used, the request fails. A privileged container has no filter,
// but its request is checked.
func TestPulledProfileRefused(t *testing.T) {
	p := &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_OCI, OciRef: testPulled}
	set := func(p *runtimeapi.SecurityProfile, defaults SeccompDefaults, privileged bool) error {
		return SetSeccomp(NewProfile(p, ""), defaults, privileged, host.Facts{Seccomp: true}, nil, aSpec())
	}
	if err := set(p, SeccompDefaults{}, false); errdefs.Code(err) != codes.FailedPrecondition {
		t.Errorf("another runtime: %v", err)
	}
	if err := set(p, SeccompDefaults{}, true); err != nil {
		t.Errorf("privileged: %v", err)
	}
	files := profileFiles{"/node": `{"defaultAction":"SCMP_ACT_NOTIFY"}`}
	err := SetSeccomp(NewProfile(p, ""), SeccompDefaults{File: "/node", Pulled: pulledProfiles}, false, host.Facts{Seccomp: true}, files, aSpec())
	if errdefs.Code(err) != codes.FailedPrecondition {
		t.Errorf("a node's profile with a listener as the base: %v", err)
	}
	bad := &runtimeapi.SecurityProfile{OciRef: testPulled}
	if err := set(bad, SeccompDefaults{}, true); errdefs.Code(err) != codes.InvalidArgument {
		t.Errorf("privileged with a bad request: %v", err)
	}
	for _, p := range []*runtimeapi.SecurityProfile{p, bad, {BaseProfile: &runtimeapi.SecurityProfileBase{}}} {
		err := SetAppArmor(AppArmorProfile(p, ""), true, host.Facts{AppArmor: true}, profileFiles{}, aSpec())
		if errdefs.Code(err) != codes.InvalidArgument {
			t.Errorf("apparmor %v: %v", p, err)
		}
	}
}

// A profile that permits by default has a denial without a condition (addPlainDenial).
func TestPermissiveProfileHasPlainDenial(t *testing.T) {
	for body, want := range map[string]int{
		`{"defaultAction":"SCMP_ACT_ALLOW"}`: 1,
		`{"defaultAction":"SCMP_ACT_LOG"}`:   1,
		`{"defaultAction":"SCMP_ACT_ERRNO"}`: 0,
		`{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["lookup_dcookie"],"action":"SCMP_ACT_KILL"}]}`:                               1,
		`{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["lookup_dcookie"],"action":"SCMP_ACT_ALLOW"}]}`:                              2,
		`{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["lookup_dcookie"],"action":"SCMP_ACT_KILL","args":[{"op":"SCMP_CMP_EQ"}]}]}`: 2,
	} {
		p, err := parseProfile([]byte(body), aSpec())
		if err != nil || len(p.Syscalls) != want {
			t.Errorf("%s: %v, %v", body, p, err)
		}
	}
}

func FuzzSeccompProfile(f *testing.F) {
	spec := aSpec()
	f.Add([]byte(`{"defaultAction":"SCMP_ACT_ERRNO","syscalls":[{"names":["read"],"action":"SCMP_ACT_ALLOW"}]}`))
	f.Add([]byte(`{"defaultAction":"SCMP_ACT_ERRNO","syscalls":[null,{"name":"x","includes":{"caps":["CAP_BPF"],"minKernel":"4.8"}}]}`))
	f.Add([]byte(`{"SYSCALLS":[null],"defaultAction":"SCMP_ACT_ERRNO"}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		p, err := parseProfile(body, spec)
		if err != nil {
			return
		}
		if _, err := json.Marshal(p); err != nil {
			t.Error(err)
		}
		if !seccompActions[p.DefaultAction] {
			t.Errorf("default action %q", p.DefaultAction)
		}
	})
}
