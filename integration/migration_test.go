package integration

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/pages"
)

// A node moves from containerd to berth and back, with the commands of docs/migration.md. A
// Deployment runs on each runtime, and berth uses the image from containerd's disk: the registry
// serves it once.
func TestControlPlaneMigration(t *testing.T) {
	m := newMigration(t)
	m.systemctl(t, "start", "containerd", "kubelet")
	m.awaitRuntime(t, "containerd")
	m.kubectl(t, "create", "deployment", "web", "--image", m.image, "--replicas", "2", "--", "sleep", "100000")
	m.awaitPods(t, "containerd")
	pulls := m.manifestPulls()
	runtimes := map[string]string{"Check": "berth", "Go back": "containerd"}
	for _, b := range harness.Get(pages.Read(checkoutDir))(t)["migration.md"] {
		if !b.RunsIn(pages.Migration) {
			continue
		}
		m.run(t, b)
		if want := runtimes[b.Heading]; want != "" && strings.Contains(b.Text, "get node") {
			m.awaitPods(t, want)
		}
	}
	harness.Equal(t, "pulls from the registry after the first one", m.manifestPulls()-pulls, 0)
	m.kubectl(t, "delete", "deployment", "web")
	m.awaitNoPods(t)
}

// migration is a cluster whose node has units for kubelet, containerd and berth.
type migration struct {
	*cluster
	page  *pageNode
	units string
	image string
}

func newMigration(t *testing.T) *migration {
	t.Helper()
	for _, name := range append(controlPlanePrograms, "kubectl", "kubelet") {
		kubernetesProgram(t, name)
	}
	bin := os.Getenv(containerdEnv)
	if bin == "" {
		t.Skipf("%s is not set: export %[1]s=$(integration/containerd/build)", containerdEnv)
	}
	n := &node{dir: t.TempDir(), config: clusterKubelet}
	n.makeCgroups(t)
	m := &migration{cluster: &cluster{node: n, dir: n.dir + "/cluster"}, page: newPageMachine(t), units: n.dir + "/units"}
	harness.Must(t, os.MkdirAll(m.cluster.dir, 0o700))
	addNodeAddress(t)
	t.Cleanup(func() { m.removePodCgroups(t) })
	t.Cleanup(func() { harness.RemoveLink(t, "cni0") })
	t.Cleanup(func() { resetBerth(t) })
	m.image = harness.Registry.Host + "/migration:v1"
	harness.Get(harness.Registry.Push("migration:v1", harness.BuildImage(t, v1.Config{})))(t)
	m.writeFiles(t, bin)
	m.writeUnits(t, bin)
	m.writeKeys(t)
	m.startControlPlane(t)
	t.Cleanup(func() { m.stopUnits(t) })
	return m
}

// writeFiles writes the configuration of containerd, the network and kubelet in their usual places.
func (m *migration) writeFiles(t *testing.T, bin string) {
	t.Helper()
	harness.Must(t, os.Mkdir(m.page.disk+"/containerd", 0o711))
	harness.Must(t, os.Mkdir("/var/lib/containerd", 0o711))
	bind(t, m.page.disk+"/containerd", "/var/lib/containerd")
	for _, dir := range []string{"/etc/cni/net.d", "/etc/containerd", "/etc/berth"} {
		harness.Must(t, os.RemoveAll(dir))
	}
	writeBelow(t, "/etc/cni/net.d", "10-test.conflist", []byte(fixture.Conflist("test", "/var/lib/cni/networks", fixture.Range4)))
	writeBelow(t, "/etc", "crictl.yaml", []byte("runtime-endpoint: unix://"+containerdSocket+"\n"))
	pause := harness.Get(fixture.Image(v1.Config{Cmd: []string{"sleep", "100000"}}))(t)
	pauseName := harness.Get(harness.Registry.Push("pause:latest", pause))(t)
	config := fmt.Sprintf(containerdConfig, "/var/lib/containerd", containerdSocket, pauseName, filepath.Join(bin, "runc"), harness.PluginDir, "/etc/cni/net.d")
	config = strings.NewReplacer("/var/lib/containerd/root", "/var/lib/containerd", "/var/lib/containerd/state", "/run/containerd").Replace(config)
	writeBelow(t, "/etc/containerd", "config.toml", []byte(config))
	m.d = &harness.Daemon{Socket: containerdSocket, LogDir: "/var/log/pods"}
	writeBelow(t, "/var/lib/kubelet", "config.yaml", []byte(m.configuration()))
	harness.Must(t, os.MkdirAll(m.manifests(), 0o755))
}

// writeUnits writes the programs of the units, and systemctl, which starts and stops them.
func (m *migration) writeUnits(t *testing.T, bin string) {
	t.Helper()
	kubelet := m.withOwnSysctls(t, []string{kubernetesProgram(t, "kubelet"), "--config", "/var/lib/kubelet/config.yaml", "--kubeconfig", m.kubeconfig(),
		"--hostname-override", kubeletNode, "--node-ip", kubeletAddress, "--v", "2"})
	for name, args := range map[string][]string{
		"kubelet":    kubelet,
		"containerd": {filepath.Join(bin, "containerd"), "--log-level", "warn"},
		"berth":      {filepath.Join(harness.BinDir, harness.DaemonProgram)},
	} {
		script := "exec"
		for _, arg := range args {
			script += " '" + strings.ReplaceAll(arg, "'", `'\''`) + "'"
		}
		writeBelow(t, m.units, name+".sh", []byte(script+"\n"))
	}
	for name, socket := range map[string]string{"containerd": containerdSocket, "berth": "/run/berth/berth.sock"} {
		writeBelow(t, m.units, name+".ready", fmt.Appendf(nil, "berth version --socket unix://%s\n", socket))
	}
	harness.Must(t, os.Symlink(harness.Get(filepath.Abs("testdata/systemctl"))(t), m.units+"/systemctl"))
}

// env returns the environment of the page's commands.
func (m *migration) env() []string {
	path := []string{m.units, os.Getenv(containerdEnv), os.Getenv(kubernetesEnv), harness.BinDir, os.Getenv("PATH")}
	return []string{"PATH=" + strings.Join(path, ":"), "UNITS=" + m.units, "NODE=" + kubeletNode, "KUBECONFIG=" + m.kubeconfig(),
		"OLD=containerd", "OLD_SOCKET=unix://" + containerdSocket}
}

func (m *migration) run(t *testing.T, b pages.Block) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*kubeletPatience)
	defer cancel()
	out, err := b.Run(ctx, m.page.dir, m.env()...)
	if err != nil {
		t.Fatalf("%v\n%s", err, m.logs())
	}
	t.Logf("%s:\n%s", b.Name(), out)
}

// logs returns the last lines of the units' logs.
func (m *migration) logs() string {
	out, err := exec.Command("tail", "-n", "30", m.units+"/kubelet.log", m.units+"/containerd.log", m.units+"/berth.log").CombinedOutput()
	return fmt.Sprintf("%s(%v)", out, err)
}

func (m *migration) systemctl(t *testing.T, args ...string) {
	t.Helper()
	cmd := exec.Command(m.units+"/systemctl", args...)
	cmd.Env = append(os.Environ(), m.env()...)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("systemctl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

func (m *migration) stopUnits(t *testing.T) {
	t.Helper()
	if t.Failed() {
		t.Log(m.logs())
	}
	m.systemctl(t, "stop", "kubelet", "containerd", "berth")
}

// awaitRuntime waits until the node is ready and reports a runtime.
func (m *migration) awaitRuntime(t *testing.T, name string) {
	t.Helper()
	harness.Must(t, harness.PollUpTo(kubeletPatience, kubeletPause, func() error {
		out, _, err := m.try("", "get", "node", kubeletNode, "-o", "jsonpath={.status.nodeInfo.containerRuntimeVersion}")
		if err == nil && !strings.HasPrefix(out, name+"://") {
			err = fmt.Errorf("the runtime is %q", out)
		}
		return err
	}))
	m.wait(t, "node/"+kubeletNode, "condition=Ready")
}

// awaitPods waits until the Deployment's pods run on a runtime.
func (m *migration) awaitPods(t *testing.T, runtime string) {
	t.Helper()
	m.awaitRuntime(t, runtime)
	m.wait(t, "deployment/web", "condition=Available")
	ids := m.kubectl(t, "get", "pods", "-l", "app=web", "--field-selector", "status.phase=Running", "-o", "jsonpath={.items[*].status.containerStatuses[*].containerID}")
	if n := strings.Count(ids, runtime+"://"); n != 2 {
		t.Errorf("%d of 2 containers run on %s: %s", n, runtime, ids)
	}
}

// awaitNoPods waits until containerd has no pods.
func (m *migration) awaitNoPods(t *testing.T) {
	t.Helper()
	harness.Must(t, harness.PollUpTo(kubeletPatience, kubeletPause, func() error {
		out, err := exec.Command(filepath.Join(harness.BinDir, "berth"), "ps", "--all", "--pods", "--quiet", "--socket", "unix://"+containerdSocket).CombinedOutput()
		if err == nil && len(out) > 0 {
			err = fmt.Errorf("pods %s", out)
		}
		return err
	}))
}

// manifestPulls returns how often the registry served the Deployment's image.
func (m *migration) manifestPulls() int {
	return harness.Registry.Count("GET", "/migration/manifests/v1") + harness.Registry.Count("HEAD", "/migration/manifests/v1")
}
