package checkpoint

import (
	"slices"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"
	"github.com/opencontainers/cgroups"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
)

// cgroupOptions returns the options of the node's cgroup filesystem of version 2.
func cgroupOptions(t *testing.T) string {
	t.Helper()
	mounts := harness.Get(mountinfo.GetMounts(mountinfo.SingleEntryFilter("/sys/fs/cgroup")))(t)
	if len(mounts) != 1 {
		t.Fatalf("mounts of cgroups: %v", mounts)
	}
	return mounts[0].VFSOptions
}

// The cgroup filesystem of version 2 has one set of options on the whole node. A mount of it
// without options, in the node's cgroup namespace, clears them. Neither checkpoints and restores
// nor containers do that.
func TestCgroupOptionsAreKept(t *testing.T) {
	if !cgroups.IsCgroup2UnifiedMode() {
		t.Skip("NOT TESTED: this machine has cgroup v1, whose mounts do not change options")
	}
	before := cgroupOptions(t)
	if !slices.Contains(strings.Split(before, ","), "nsdelegate") {
		t.Skipf("NOT TESTED: the cgroup filesystem of this machine has no options to lose: %s", before)
	}
	d := startDaemon(t)
	privileged := harness.PodSecurity(func(s *runtimeapi.LinuxSandboxSecurityContext) { s.Privileged = true })
	for _, tc := range []struct {
		name   string
		pod    []harness.PodOption
		option harness.ContainerOption
	}{
		{"own cgroup namespace", nil, harness.ContainerNamed("one")},
		{"node's cgroup namespace", []harness.PodOption{privileged}, harness.Security(harness.Privileged)},
	} {
		t.Run(tc.name, func(t *testing.T) {
			kept := func(step string) { t.Helper(); harness.Equal(t, "options after "+step, cgroupOptions(t), before) }
			pod := d.RunPod(t, tc.pod...)
			c := pod.Run(t, harness.Script(counting), tc.option)
			waitCounted(t, c, 1)
			kept("the start")
			s := save(t, pod, c)
			kept("the checkpoint")
			pod.Remove(t)
			restored, list := restorePod(t, d, s.identity(t))
			list[0].Start(t)
			waitCounted(t, list[0], 1)
			kept("the restore")
			restored.Remove(t)
		})
	}
}
