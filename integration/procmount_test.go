package integration

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image/erofs"
	"berth/integration/harness"
)

// With procMount: Unmasked (KEP-4265, allowed only in user namespaces) the container sees all of
// proc. A nested user namespace may then mount another proc, which container engines in containers
// need. The kernel refuses that mount while paths of proc are hidden (mount_too_revealing in
// fs/namespace.c).
func TestUnmaskedProc(t *testing.T) {
	const base = 17 * usernsLength
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, userNamespace(base))
	unmasked := harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.MaskedPaths, s.ReadonlyPaths = nil, nil
		// The default AppArmor profile allows no mounts.
		s.Apparmor = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Unconfined}
	})
	const look = `mkdir -p /mnt; stat -c %F /proc/keys; grep -q " /proc/" /proc/self/mountinfo && echo hidden || echo all
		unshare -U -r -m -p -f mount -t proc proc /mnt 2>/dev/null && echo mounted || echo refused`
	harness.Equal(t, "masked", pod.Sh(t, look, inUserNamespace(base)), "character special file\nhidden\nrefused\n")
	harness.Equal(t, "unmasked", pod.Sh(t, look, inUserNamespace(base), unmasked), "regular empty file\nall\nmounted\n")
}

// mountsWithProc returns the lines that Kubernetes' tests DefaultProcMount and ProcMount count, and
// the number of read-only mounts in them.
func mountsWithProc(t *testing.T, c *harness.Container) (lines []string, readOnly int) {
	t.Helper()
	out := strings.TrimSpace(c.Exec(t, "/bin/sh", "-ec", "mount | grep /proc"))
	return strings.Split(out, "\n"), strings.Count(out, "(ro")
}

// Kubernetes' tests count the lines of mounts that contain "/proc". With Unmasked this must be only
// proc, so the root's line must not name layers below /proc.
func TestMountsWithProc(t *testing.T) {
	for i, driver := range []string{"directory", "erofs"} {
		t.Run(driver, func(t *testing.T) {
			if err := erofs.Probe("/var/tmp"); driver == "erofs" && errors.Is(err, errors.ErrUnsupported) {
				t.Skip("NOT TESTED: ", err)
			}
			base := uint32(20+i) * usernsLength
			d := harness.StartDaemon(t, harness.WithLayerDriver(driver))
			masked := harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
				s.MaskedPaths, s.ReadonlyPaths = []string{"/proc/keys"}, []string{"/proc/bus", "/proc/sys"}
			})
			unmasked := harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) { s.MaskedPaths, s.ReadonlyPaths = nil, nil })

			host := d.RunPod(t)
			lines, readOnly := mountsWithProc(t, host.Run(t, masked))
			harness.Equal(t, "default, mounts: "+fmt.Sprintf("%q", lines), len(lines), 4)
			harness.Equal(t, "default, read-only mounts", readOnly, 2)

			pod := d.RunPod(t, userNamespace(base))
			lines, readOnly = mountsWithProc(t, pod.Run(t, inUserNamespace(base), unmasked))
			harness.Equal(t, "unmasked, mounts: "+fmt.Sprintf("%q", lines), len(lines), 1)
			harness.Equal(t, "unmasked, read-only mounts", readOnly, 0)
		})
	}
}
