package integration

import (
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
)

// Without masked and read-only paths (procMount: Unmasked, which kubelet allows in user namespaces only, KEP-4265)
// the container sees all of proc, and so may what it puts into a user namespace mount one of its own: that is
// what it is for, a container engine in a container. The kernel refuses it to who has paths of proc
// hidden (mount_too_revealing in fs/namespace.c).
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
