package integration

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"berth/integration/harness"
	"berth/integration/pages"
)

// A kubelet without a control plane runs the pods of docs/standalone.md, with the page's
// configuration and commands.
func TestKubeletStandalone(t *testing.T) {
	kubernetesProgram(t, "kubelet")
	addNodeAddress(t)
	page := newPageNode(t)
	n := &node{dir: page.disk + "/kubelet"}
	harness.Must(t, os.MkdirAll(n.dir, 0o755))
	n.makeCgroups(t)
	t.Cleanup(func() { n.removePodCgroups(t) })
	blocks := harness.Get(pages.Read(checkoutDir))(t)["standalone.md"]

	const config = "/etc/kubernetes/kubelet.yaml"
	for _, b := range blocks {
		if strings.HasPrefix(b.Text, "# "+config+"\n") {
			writeBelow(t, filepath.Dir(config), filepath.Base(config), []byte(b.Text))
		}
	}
	harness.Must(t, os.MkdirAll("/etc/kubernetes/manifests", 0o755))
	// What only a machine of the tests needs.
	writeBelow(t, "/etc/kubernetes/kubelet.d", "tests.conf", fmt.Appendf(nil, `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cgroupDriver: cgroupfs
cgroupRoot: %s
failCgroupV1: false
failSwapOn: false
oomScoreAdj: 0
maxOpenFiles: 20000
protectKernelDefaults: true
evictionHard: {memory.available: 1Mi, nodefs.available: 1Mi, imagefs.available: 1Mi, pid.available: "10"}
`, n.cgroup()))
	n.kubelet = startProgram(t, "kubelet", n.dir+"/kubelet.log", n.withOwnSysctls(t, []string{
		kubernetesProgram(t, "kubelet"), "--config", config, "--config-dir", "/etc/kubernetes/kubelet.d",
		"--hostname-override", kubeletNode, "--node-ip", kubeletAddress,
	})...)
	t.Cleanup(func() { n.kubelet.finish(t) })

	for _, b := range blocks {
		if b.RunsIn(pages.Kubelet) {
			page.run(t, b)
		}
	}
	n.kubelet.waitFor(t, "the pod is removed", func() error {
		out, err := exec.CommandContext(t.Context(), filepath.Join(harness.BinDir, "berth"), "ps", "--all", "--pods", "--quiet").CombinedOutput()
		if err == nil && len(out) > 0 {
			err = fmt.Errorf("pods: %s", out)
		}
		return err
	})
}
