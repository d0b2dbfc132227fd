package confine

import (
	"encoding/json"
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

func TestPulledProfilesRefused(t *testing.T) {
	for name, p := range map[string]*runtimeapi.SecurityProfile{
		"type":         {ProfileType: runtimeapi.SecurityProfile_OCI},
		"reference":    {OciRef: "r.example/p@sha256:" + strings.Repeat("a", 64)},
		"base profile": {BaseProfile: &runtimeapi.SecurityProfileBase{}},
	} {
		for _, privileged := range []bool{false, true} {
			err := SetSeccomp(NewProfile(p, ""), SeccompDefaults{}, privileged, host.Facts{}, nil, aSpec())
			if errdefs.Code(err) != codes.InvalidArgument {
				t.Errorf("%s, privileged %t: %v", name, privileged, err)
			}
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
