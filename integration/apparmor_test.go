package integration

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
)

// defaultProfile is the AppArmor profile that the daemon loads and that RuntimeDefault selects.
const defaultProfile = "berth-default"

// appArmor requests a profile in the field that kubelet uses since 1.30.
func appArmor(kind runtimeapi.SecurityProfile_ProfileType, ref string) harness.ContainerOption {
	return harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.Apparmor = &runtimeapi.SecurityProfile{ProfileType: kind, LocalhostRef: ref}
	})
}

// appArmorBefore1_30 requests a profile in the field that older kubelets use.
func appArmorBefore1_30(profile string) harness.ContainerOption {
	return harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) { s.ApparmorProfile = profile }) //nolint:staticcheck // deprecated
}

// The kernel applies the requested profile to the container's command and to execs.
func TestAppArmor(t *testing.T) {
	machine.NeedAppArmor(t)
	local := machine.LoadProfile(t)
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork, harness.PodSecurity(func(s *runtimeapi.LinuxSandboxSecurityContext) { s.Privileged = true }))
	const (
		runtimeDefault = runtimeapi.SecurityProfile_RuntimeDefault
		unconfined     = runtimeapi.SecurityProfile_Unconfined
		localhost      = runtimeapi.SecurityProfile_Localhost
		// The default profile denies writes to inDefault, the test's own profile writes to inLocal.
		inDefault, inLocal = "/proc/sysrq-trigger", "/denied"
	)
	for _, tt := range []struct {
		name            string
		options         []harness.ContainerOption
		want            string
		denied, allowed []string
	}{
		{"no profile requested", nil, defaultProfile + " (enforce)", []string{inDefault}, []string{inLocal}},
		{"runtime default", []harness.ContainerOption{appArmor(runtimeDefault, "")}, defaultProfile + " (enforce)", []string{inDefault}, []string{inLocal}},
		{"runtime default before 1.30", []harness.ContainerOption{appArmorBefore1_30("runtime/default")}, defaultProfile + " (enforce)", []string{inDefault}, []string{inLocal}},
		{"unconfined", []harness.ContainerOption{appArmor(unconfined, "")}, "unconfined", nil, []string{inDefault, inLocal}},
		{"localhost", []harness.ContainerOption{appArmor(localhost, local)}, local + " (enforce)", []string{inLocal}, []string{inDefault}},
		{"localhost before 1.30", []harness.ContainerOption{appArmorBefore1_30("localhost/" + local)}, local + " (enforce)", []string{inLocal}, []string{inDefault}},
		{"privileged", []harness.ContainerOption{harness.Security(harness.Privileged)}, "unconfined", nil, []string{inDefault, inLocal}},
		{"privileged, runtime default", []harness.ContainerOption{harness.Security(harness.Privileged), appArmor(runtimeDefault, "")}, "unconfined", nil, []string{inDefault, inLocal}},
		{"privileged, localhost", []harness.ContainerOption{harness.Security(harness.Privileged), appArmor(localhost, local)}, local + " (enforce)", []string{inLocal}, []string{inDefault}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := pod.Run(t, tt.options...)
			harness.Equal(t, "profile of the command", machine.Confinement(t, c.Pid(t)), tt.want)
			harness.Equal(t, "profile of an exec", c.Exec(t, "cat", "/proc/self/attr/current"), tt.want)
			for _, file := range tt.denied {
				harness.Equal(t, file+" is denied", isDenied(t, c, file), true)
			}
			for _, file := range tt.allowed {
				harness.Equal(t, file+" is denied", isDenied(t, c, file), false)
			}
		})
	}
}

// isDenied reports whether the container is denied to open a file for writing. It writes nothing.
func isDenied(t *testing.T, c *harness.Container, file string) bool {
	t.Helper()
	message := c.Exec(t, "sh", "-c", "{ true >>"+file+"; } 2>&1; true")
	if message != "" && !strings.HasSuffix(message, "Permission denied") {
		t.Errorf("open %s: %s", file, message)
	}
	return message != ""
}

// The default profile also confines the pause process.
func TestAppArmorOfPods(t *testing.T) {
	machine.NeedAppArmor(t)
	d := harness.StartDaemon(t)
	profile := func(kind runtimeapi.SecurityProfile_ProfileType) harness.PodOption {
		return harness.PodSecurity(func(s *runtimeapi.LinuxSandboxSecurityContext) {
			s.Apparmor = &runtimeapi.SecurityProfile{ProfileType: kind}
		})
	}
	harness.Equal(t, "profile of a pod", machine.Confinement(t, d.RunPod(t, harness.HostNetwork).PausePID(t)), defaultProfile+" (enforce)")
	harness.Equal(t, "profile of a pod with the default", machine.Confinement(t,
		d.RunPod(t, harness.HostNetwork, profile(runtimeapi.SecurityProfile_RuntimeDefault)).PausePID(t)), defaultProfile+" (enforce)")
	harness.Equal(t, "profile of an unconfined pod", machine.Confinement(t,
		d.RunPod(t, harness.HostNetwork, profile(runtimeapi.SecurityProfile_Unconfined)).PausePID(t)), "unconfined")
}

// A container whose profile is not loaded is refused. It never runs unconfined.
func TestUnknownAppArmorProfile(t *testing.T) {
	machine.NeedAppArmor(t)
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork, harness.PodSecurity(func(s *runtimeapi.LinuxSandboxSecurityContext) { s.Privileged = true }))
	for name, option := range map[string]harness.ContainerOption{
		"localhost":             appArmor(runtimeapi.SecurityProfile_Localhost, "berth-no-such-profile"),
		"localhost before 1.30": appArmorBefore1_30("localhost/berth-no-such-profile"),
	} {
		t.Run(name, func(t *testing.T) {
			_, err := pod.TryCreate(t, option)
			harness.WantCode(t, err, codes.FailedPrecondition, "berth-no-such-profile", "not loaded")
			_, err = pod.TryCreate(t, option, harness.Security(harness.Privileged))
			harness.WantCode(t, err, codes.FailedPrecondition, "berth-no-such-profile", "not loaded")
		})
	}
}

// An OCI runtime confines a container in the same way as libcontainer.
func TestAppArmorWithCrun(t *testing.T) {
	machine.NeedAppArmor(t)
	path := harness.Crun(t)
	local := machine.LoadProfile(t)
	d := harness.StartDaemon(t, harness.WithHandler("crun", path))
	pod := runPodWith(t, d, "crun", harness.HostNetwork)
	for want, c := range map[string]*harness.Container{
		defaultProfile: pod.Run(t),
		local:          pod.Run(t, appArmor(runtimeapi.SecurityProfile_Localhost, local)),
	} {
		harness.Equal(t, "profile of the command", machine.Confinement(t, c.Pid(t)), want+" (enforce)")
		harness.Equal(t, "profile of an exec", c.Exec(t, "cat", "/proc/self/attr/current"), want+" (enforce)")
	}
}
