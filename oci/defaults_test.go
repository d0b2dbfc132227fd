package oci

import (
	"slices"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/testutil"
	"berth/oci/confine"
)

// The node's variables replace berth's. Those of images and pods replace the node's.
func TestDefaultEnvironment(t *testing.T) {
	t.Parallel()
	in := testInput()
	in.Defaults.Env = []string{"PROXY=node", "PATH=/node", "A=node", "B=node", "EMPTY="}
	in.Image.Env = []string{"A=image", "B=image"}
	in.Config.Envs = []*runtimeapi.KeyValue{{Key: "B", Value: []byte("pod")}}
	env := mustSpec(t, in).Process.Env
	for _, want := range []string{"PROXY=node", "PATH=/node", "A=image", "B=pod", "EMPTY="} {
		if !slices.Contains(env, want) {
			t.Errorf("no %s in %q", want, env)
		}
	}
}

func TestDefaultRlimits(t *testing.T) {
	t.Parallel()
	in := testInput()
	in.Defaults.Rlimits = []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: 1, Hard: 2}}
	spec := mustSpec(t, in)
	if !slices.Equal(spec.Process.Rlimits, in.Defaults.Rlimits) {
		t.Errorf("limits %v", spec.Process.Rlimits)
	}
	if exec := ExecProcess(spec, []string{"sh"}, false); !slices.Equal(exec.Rlimits, in.Defaults.Rlimits) {
		t.Errorf("limits of an exec %v", exec.Rlimits)
	}
}

func TestDefaultSeccompProfile(t *testing.T) {
	t.Parallel()
	const file = "/etc/berth/seccomp.json"
	asks := func(kind runtimeapi.SecurityProfile_ProfileType) *runtimeapi.SecurityProfile {
		return &runtimeapi.SecurityProfile{ProfileType: kind}
	}
	for name, c := range map[string]struct {
		defaults confine.SeccompDefaults
		asks     *runtimeapi.SecurityProfile
		want     specs.LinuxSeccompAction // the default action; empty: no profile
	}{
		"RuntimeDefault":             {confine.SeccompDefaults{File: file}, asks(runtimeapi.SecurityProfile_RuntimeDefault), specs.ActLog},
		"built-in":                   {confine.SeccompDefaults{}, asks(runtimeapi.SecurityProfile_RuntimeDefault), specs.ActErrno},
		"Unconfined":                 {confine.SeccompDefaults{File: file, Unset: true}, asks(runtimeapi.SecurityProfile_Unconfined), ""},
		"no request":                 {confine.SeccompDefaults{File: file}, nil, ""},
		"no request, with a default": {confine.SeccompDefaults{Unset: true}, nil, specs.ActErrno},
		"no request, with a file":    {confine.SeccompDefaults{File: file, Unset: true}, nil, specs.ActLog},
	} {
		t.Run(name, func(t *testing.T) {
			in := testInput()
			files := testFiles()
			files.profiles = map[string]string{file: `{"defaultAction": "SCMP_ACT_LOG"}`}
			in.Files, in.Defaults.Seccomp = files, c.defaults
			in.sc().Seccomp = c.asks
			got := mustSpec(t, in).Linux.Seccomp
			if (got == nil) != (c.want == "") || got != nil && got.DefaultAction != c.want {
				t.Errorf("profile %+v, want %q", got, c.want)
			}
		})
	}
	in := testInput()
	in.Defaults.Seccomp = confine.SeccompDefaults{File: "/none"}
	in.sc().Seccomp = asks(runtimeapi.SecurityProfile_RuntimeDefault)
	_, err := ContainerSpec(in)
	testutil.WantError(t, err, codes.FailedPrecondition, "the node's default profile", "/none")
}

func TestPauseCPUs(t *testing.T) {
	t.Parallel()
	in := testSandbox()
	in.CPUs = "0-1"
	spec, err := SandboxSpec(in)
	testutil.Must(t, err)
	if got := spec.Linux.Resources.CPU.Cpus; got != "0-1" {
		t.Errorf("CPUs %q", got)
	}
}
