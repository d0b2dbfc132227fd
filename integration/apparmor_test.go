package integration

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// defaultProfile is the AppArmor profile that RuntimeDefault stands for, which the daemon loads.
const defaultProfile = "berth-default"

func needAppArmor(t *testing.T) {
	t.Helper()
	if enabled := readLines("/sys/module/apparmor/parameters/enabled"); len(enabled) == 0 || enabled[0] != "Y" {
		t.Skip("this machine's kernel has no AppArmor")
	}
	if _, err := os.Stat("/sys/kernel/security/apparmor/profiles"); err != nil {
		t.Skip("this machine has no securityfs")
	}
	if _, err := exec.LookPath("apparmor_parser"); err != nil {
		t.Skip("apparmor_parser is not installed")
	}
}

// loadProfile loads an AppArmor profile that allows all but to write /denied, until the test ends.
func loadProfile(t *testing.T) (name string) {
	t.Helper()
	name = fmt.Sprintf("berth-test-%d", os.Getpid())
	text := fmt.Sprintf("profile %s flags=(attach_disconnected,mediate_deleted) {\n"+
		"  file,\n  capability,\n  network,\n  signal,\n  ptrace,\n  unix,\n  mount,\n  umount,\n  deny /denied w,\n}\n", name)
	parse := func(action string) error {
		cmd := exec.CommandContext(context.Background(), "apparmor_parser", "--skip-cache", action)
		cmd.Stdin = strings.NewReader(text)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("apparmor_parser %s: %w: %s", action, err, out)
		}
		return nil
	}
	must(t, parse("--replace"))
	t.Cleanup(func() { must(t, parse("--remove")) })
	return name
}

// appArmor asks for a profile as kubelet does.
func appArmor(kind runtimeapi.SecurityProfile_ProfileType, ref string) containerOption {
	return security(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.Apparmor = &runtimeapi.SecurityProfile{ProfileType: kind, LocalhostRef: ref}
	})
}

// appArmorBefore1_30 asks for a profile in the field that kubelet used then.
func appArmorBefore1_30(profile string) containerOption {
	return security(func(s *runtimeapi.LinuxContainerSecurityContext) { s.ApparmorProfile = profile }) //nolint:staticcheck // deprecated
}

// confinement is what the kernel says that a process is confined with.
func confinement(t *testing.T, pid int) string {
	t.Helper()
	label, err := os.ReadFile(fmt.Sprintf("/proc/%d/attr/current", pid))
	must(t, err)
	return strings.TrimRight(string(label), "\n\x00")
}

// What is asked for is what the kernel confines with: the container's program and what is executed in it.
func TestAppArmor(t *testing.T) {
	needAppArmor(t)
	local := loadProfile(t)
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork, podSecurity(func(s *runtimeapi.LinuxSandboxSecurityContext) { s.Privileged = true }))
	const (
		runtimeDefault = runtimeapi.SecurityProfile_RuntimeDefault
		unconfined     = runtimeapi.SecurityProfile_Unconfined
		localhost      = runtimeapi.SecurityProfile_Localhost
		// Writing here is denied by the default profile, and by /denied of the test's own.
		inDefault, inLocal = "/proc/sysrq-trigger", "/denied"
	)
	for _, tt := range []struct {
		name            string
		options         []containerOption
		want            string
		denied, allowed []string
	}{
		{"nothing asked for", nil, defaultProfile + " (enforce)", []string{inDefault}, []string{inLocal}},
		{"runtime default", []containerOption{appArmor(runtimeDefault, "")}, defaultProfile + " (enforce)", []string{inDefault}, []string{inLocal}},
		{"runtime default before 1.30", []containerOption{appArmorBefore1_30("runtime/default")}, defaultProfile + " (enforce)", []string{inDefault}, []string{inLocal}},
		{"unconfined", []containerOption{appArmor(unconfined, "")}, "unconfined", nil, []string{inDefault, inLocal}},
		{"localhost", []containerOption{appArmor(localhost, local)}, local + " (enforce)", []string{inLocal}, []string{inDefault}},
		{"localhost before 1.30", []containerOption{appArmorBefore1_30("localhost/" + local)}, local + " (enforce)", []string{inLocal}, []string{inDefault}},
		{"privileged", []containerOption{security(privileged)}, "unconfined", nil, []string{inDefault, inLocal}},
		{"privileged, runtime default", []containerOption{security(privileged), appArmor(runtimeDefault, "")}, "unconfined", nil, []string{inDefault, inLocal}},
		{"privileged, localhost", []containerOption{security(privileged), appArmor(localhost, local)}, local + " (enforce)", []string{inLocal}, []string{inDefault}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := pod.run(t, tt.options...)
			equal(t, "the program's profile", confinement(t, c.pid(t)), tt.want)
			equal(t, "profile of an exec", c.exec(t, "cat", "/proc/self/attr/current"), tt.want)
			for _, file := range tt.denied {
				equal(t, file+" is denied", c.denied(t, file), true)
			}
			for _, file := range tt.allowed {
				equal(t, file+" is denied", c.denied(t, file), false)
			}
		})
	}
}

// denied tells whether the container may not open a file to write. Nothing is written.
func (c *container) denied(t *testing.T, file string) bool {
	t.Helper()
	complaint := c.exec(t, "sh", "-c", "{ true >>"+file+"; } 2>&1; true")
	if complaint != "" && !strings.HasSuffix(complaint, "Permission denied") {
		t.Errorf("open %s: %s", file, complaint)
	}
	return complaint != ""
}

// The pod's own process is confined, too.
func TestAppArmorOfPods(t *testing.T) {
	needAppArmor(t)
	d := startDaemon(t)
	profile := func(kind runtimeapi.SecurityProfile_ProfileType) podOption {
		return podSecurity(func(s *runtimeapi.LinuxSandboxSecurityContext) {
			s.Apparmor = &runtimeapi.SecurityProfile{ProfileType: kind}
		})
	}
	equal(t, "profile of a pod", confinement(t, d.runPod(t, hostNetwork).pausePID(t)), defaultProfile+" (enforce)")
	equal(t, "profile of a pod with the default", confinement(t,
		d.runPod(t, hostNetwork, profile(runtimeapi.SecurityProfile_RuntimeDefault)).pausePID(t)), defaultProfile+" (enforce)")
	equal(t, "profile of an unconfined pod", confinement(t,
		d.runPod(t, hostNetwork, profile(runtimeapi.SecurityProfile_Unconfined)).pausePID(t)), "unconfined")
}

// A profile that the kernel does not have is never replaced by none.
func TestUnknownAppArmorProfile(t *testing.T) {
	needAppArmor(t)
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork, podSecurity(func(s *runtimeapi.LinuxSandboxSecurityContext) { s.Privileged = true }))
	for name, option := range map[string]containerOption{
		"localhost":             appArmor(runtimeapi.SecurityProfile_Localhost, "berth-no-such-profile"),
		"localhost before 1.30": appArmorBefore1_30("localhost/berth-no-such-profile"),
	} {
		t.Run(name, func(t *testing.T) {
			_, err := pod.tryCreate(t, option)
			wantCode(t, err, codes.FailedPrecondition, "berth-no-such-profile", "not loaded")
			_, err = pod.tryCreate(t, option, security(privileged))
			wantCode(t, err, codes.FailedPrecondition, "berth-no-such-profile", "not loaded")
		})
	}
}

// A runtime's program confines as libcontainer does.
func TestAppArmorWithCrun(t *testing.T) {
	needAppArmor(t)
	path := crun(t)
	local := loadProfile(t)
	d := startDaemon(t, withHandler("crun", path))
	pod := d.runPodWith(t, "crun", hostNetwork)
	for want, c := range map[string]*container{
		defaultProfile: pod.run(t),
		local:          pod.run(t, appArmor(runtimeapi.SecurityProfile_Localhost, local)),
	} {
		equal(t, "the program's profile", confinement(t, c.pid(t)), want+" (enforce)")
		equal(t, "profile of an exec", c.exec(t, "cat", "/proc/self/attr/current"), want+" (enforce)")
	}
}
