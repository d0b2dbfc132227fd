package integration

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image/profile"
	"berth/image/registry/registrytest"
	"berth/integration/harness"
	"berth/integration/machine"
)

// putProfile publishes a profile and pulls it. It returns the reference and the digest of the
// stored profile.
func putProfile(t *testing.T, d *harness.Daemon, reg *registrytest.Server, content string) (ref, digest string) {
	t.Helper()
	top := reg.PutArtifact("profile", "v1", profile.MediaType, registrytest.File{Content: []byte(content)})
	ref = reg.Host() + "/profile@" + top.Digest.String()
	harness.Get(d.Images.PullSecurityProfile(t.Context(), &runtimeapi.ImageSpec{Image: ref, UserSpecifiedImage: ref}, nil,
		&runtimeapi.PodSandboxConfig{}, runtimeapi.SecurityProfileKind_Seccomp))(t)
	list := harness.Get(d.Images.ListSecurityProfiles(t.Context()))(t)
	harness.Equal(t, "profiles", len(list), 1)
	return ref, list[0].GetDigest()
}

// ociProfile requests a pulled profile. An empty base is RuntimeDefault, otherwise it is a path.
func ociProfile(ref, base string) *runtimeapi.SecurityProfile {
	p := &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_OCI, OciRef: ref}
	if base != "" {
		p.BaseProfile = &runtimeapi.SecurityProfileBase{Type: runtimeapi.SecurityProfileBase_Localhost, LocalhostRef: base}
	}
	return p
}

func withSeccomp(p *runtimeapi.SecurityProfile) harness.ContainerOption {
	return harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) { s.Seccomp = p })
}

// wantDenied checks that commands of an exec fail because of a system call, and that others do not.
func wantDenied(t *testing.T, c *harness.Container, denied ...string) {
	t.Helper()
	c.Exec(t, "sh", "-c", "touch /tmp/x && rm -r /tmp/x")
	for _, command := range denied {
		_, stderr, err := c.Pod.D.Cri.ExecSync(t.Context(), c.Id, strings.Fields(command), 0)
		if harness.ExitCode(err) != 1 || !strings.Contains(string(stderr), "not permitted") {
			t.Errorf("%s: %v %s", command, err, stderr)
		}
	}
}

// A container with a pulled profile may do what both the profile and its base permit, in its
// command and in execs, also after the daemon has restarted and the profile was removed.
func TestSeccompProfileOCI(t *testing.T) {
	reg := registrytest.New(t)
	d := harness.StartDaemon(t)
	harness.Equal(t, "seccomp_profile_oci", harness.Get(d.Cri.Status(t.Context(), false))(t).GetFeatures().GetSeccompProfileOci(), true)
	ref, digest := putProfile(t, d, reg,
		`{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["mkdir","mkdirat"],"action":"SCMP_ACT_ERRNO"}]}`)
	reg.Close() // nothing below asks it
	base := filepath.Join(t.TempDir(), "base.json")
	harness.Must(t, os.WriteFile(base,
		[]byte(`{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["sethostname"],"action":"SCMP_ACT_ERRNO"}]}`), 0o600))

	pod := d.RunPod(t, harness.PodSecurity(func(s *runtimeapi.LinuxSandboxSecurityContext) { s.Seccomp = ociProfile(ref, "") }))
	harness.Equal(t, "filters of the pause", machine.StatusField(t, pod.PausePID(t), "Seccomp_filters"), "1")
	capable := harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.Capabilities.AddCapabilities = []string{"SYS_ADMIN"}
	})
	script := harness.Script("mkdir /tmp/d; hostname x; echo ran; sleep 100000")
	byDefault := pod.Run(t, withSeccomp(ociProfile(ref, "")), script)
	local := pod.Run(t, withSeccomp(ociProfile(ref, base)), capable, script)
	removed := pod.Create(t, withSeccomp(ociProfile(ref, base)))
	for _, c := range []*harness.Container{byDefault, local} {
		harness.Equal(t, "filters", machine.StatusField(t, c.Pid(t), "Seccomp_filters"), "1")
		c.WaitOutput(t, "ran\n")
		harness.WantText(t, "the output", c.Output(t), "mkdir: can't create directory '/tmp/d': Operation not permitted")
		harness.WantText(t, "the output", c.Output(t), "sethostname: Operation not permitted")
	}
	check := func() {
		t.Helper()
		wantDenied(t, byDefault, "mkdir /tmp/d", "unshare -r true")
		wantDenied(t, local, "mkdir /tmp/d", "hostname x")
		local.Exec(t, "unshare", "-u", "true") // RuntimeDefault would deny it
	}
	check()
	harness.Must(t, d.Images.RemoveSecurityProfile(t.Context(), digest))
	d.Restart(t)
	check()
	for name, err := range map[string]error{
		"create": second(pod.TryCreate(t, withSeccomp(ociProfile(ref, "")))),
		"start":  d.Cri.StartContainer(t.Context(), removed.Id),
	} {
		harness.Equal(t, "code of "+name+" without the profile", status.Code(err), codes.NotFound)
		harness.WantText(t, "error of "+name, err.Error(), ref)
	}
}

func second[T any](_ T, err error) error { return err }

// A runtime that knows one profile cannot use a pulled profile with its base.
func TestSeccompProfileOCIOfOtherRuntimes(t *testing.T) {
	reg := registrytest.New(t)
	d := harness.StartDaemon(t, harness.WithHandler("crun", harness.Crun(t)))
	ref, digest := putProfile(t, d, reg, `{"defaultAction":"SCMP_ACT_ALLOW"}`)
	pod := runPodWith(t, d, "crun", harness.HostNetwork)
	_, err := pod.TryCreate(t, withSeccomp(ociProfile(ref, "")))
	harness.Equal(t, "code", status.Code(err), codes.FailedPrecondition)
	_, err = d.Cri.RunPodSandbox(t.Context(),
		d.PodConfig(t, harness.HostNetwork, harness.PodSecurity(func(s *runtimeapi.LinuxSandboxSecurityContext) { s.Seccomp = ociProfile(ref, "") })), "crun")
	harness.Equal(t, "code of the sandbox", status.Code(err), codes.FailedPrecondition)
	harness.Must(t, d.Images.RemoveSecurityProfile(t.Context(), digest))
}

// libseccomp 2.5 loses denials with conditions if no rule without a condition is for a call of the
// architecture (addPlainDenial in package confine).
func TestConditionalDenialsOfLocalhostProfile(t *testing.T) {
	d := harness.StartDaemon(t)
	file := filepath.Join(t.TempDir(), "profile.json")
	harness.Must(t, os.WriteFile(file, []byte(`{"defaultAction":"SCMP_ACT_ALLOW",
		"architectures":["SCMP_ARCH_X86_64","SCMP_ARCH_X86","SCMP_ARCH_X32"],
		"syscalls":[{"names":["umount"],"action":"SCMP_ACT_ERRNO"},
			{"names":["mkdir"],"action":"SCMP_ACT_ERRNO","args":[{"index":1,"value":511,"op":"SCMP_CMP_EQ"}]}]}`), 0o600))
	c := d.RunPod(t, harness.HostNetwork).Run(t,
		withSeccomp(&runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Localhost, LocalhostRef: file}))
	wantDenied(t, c, "mkdir /tmp/d")
}
