package integration

import (
	"fmt"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
)

// interfaceSysctls sets sysctls of a pod's interface, in both notations.
func interfaceSysctls(c *runtimeapi.PodSandboxConfig) {
	harness.Sysctl("net.ipv4.conf.eth0.arp_ignore", "1")(c)
	harness.Sysctl("net/ipv4/conf/eth0/arp_announce", "2")(c)
	harness.Sysctl("kernel.shm_rmid_forced", "1")(c)
}

// wantInterfaceSysctls checks these sysctls in a container of the pod.
func wantInterfaceSysctls(t *testing.T, pod *harness.Pod) {
	t.Helper()
	c := pod.Run(t)
	harness.Equal(t, "values", c.Exec(t, "cat", "/proc/sys/net/ipv4/conf/eth0/arp_ignore", "/proc/sys/net/ipv4/conf/eth0/arp_announce",
		"/proc/sys/kernel/shm_rmid_forced"), "1\n2\n1")
}

// Sysctls of a pod's interface are set when the interface exists, even if the plugin is slow. They
// override values that the plugin sets.
func TestInterfaceSysctlsWithSlowPlugin(t *testing.T) {
	plugin := newFakePlugin(t, "slow", `sleep 1
nsenter --net="$CNI_NETNS" ip link add eth0 type bridge >&2 || exit 1
nsenter --net="$CNI_NETNS" sh -c "echo 8 >/proc/sys/net/ipv4/conf/eth0/arp_ignore" || exit 1
`+fakeResult)
	d := harness.StartDaemon(t, withBinDir(plugin.dir), harness.WithHandler("crun", harness.Crun(t)),
		harness.WithNetwork(`{"cniVersion": "1.0.0", "name": "slow", "plugins": [{"type": "slow"}]}`))
	tests := []struct {
		name, handler string
		options       []harness.PodOption
	}{
		{"pause's own program", "", nil},
		{"user namespace", "", []harness.PodOption{userNamespace(13 * usernsLength)}},
		{"another runtime", "crun", nil},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			pod := runPodWith(t, d, test.handler, append(test.options, interfaceSysctls)...)
			wantInterfaceSysctls(t, pod)
			pod.Remove(t)
		})
	}
}

// berth's own network takes about as long as the start of pause.
func TestInterfaceSysctlsWithOwnNetwork(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithOwnNetwork())
	for i := range 10 {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			pod := d.RunPod(t, interfaceSysctls)
			wantInterfaceSysctls(t, pod)
			pod.Remove(t)
		})
	}
}

// A sysctl of a missing interface is an error with the interface's name, and nothing of the pod is
// left.
func TestSysctlOfAnotherInterface(t *testing.T) {
	d := harness.StartDaemon(t)
	_, err := d.Cri.RunPodSandbox(t.Context(), d.PodConfig(t, harness.Sysctl("net.ipv4.conf.eth7.arp_ignore", "1")), "")
	if err == nil || !strings.Contains(err.Error(), "eth7") {
		t.Errorf("error %v", err)
	}
	harness.Equal(t, "number of pods", len(harness.Get(d.Cri.ListPodSandbox(t.Context(), nil))(t)), 0)
}
