package integration

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/machine"
	"berth/integration/pages"
)

// upgradedVersion is the version in the page to which it upgrades the cluster.
const upgradedVersion = "v1.37.2"

// kubeadm makes a cluster of two nodes on berth, upgrades and removes it, with the commands of
// docs/kubeadm.md. The images contain the programs that integration/kubelet/build makes. Those of
// the version before the upgrade have the same programs. kube-proxy and DNS are left out.
func TestControlPlaneKubeadm(t *testing.T) {
	for _, name := range append(controlPlanePrograms, "kubeadm", "kubectl", "kubelet") {
		kubernetesProgram(t, name)
	}
	c := newKubeadmCluster(t, builtIn)
	for _, b := range harness.Get(pages.Read(checkoutDir))(t)["kubeadm.md"] {
		switch {
		case b.RunsIn(pages.Kubeadm):
			c.run(t, c.first, b)
		case b.RunsIn(pages.KubeadmNode):
			c.run(t, c.second, b)
		}
	}
	harness.WantText(t, "output of the page", c.output, "control-plane has initialized successfully", "condition met", "berth://", "kube-apiserver-"+kubeletNode,
		"This node has joined the cluster", "was upgraded to \""+c.version+"\"", "configuration for this node was successfully upgraded", `node "`+secondNode+`" deleted`)
	if left := machine.ReadDir("/etc/kubernetes/manifests"); len(left) > 0 {
		t.Errorf("kubeadm reset has left %v", left)
	}
	for _, m := range []*kubeadm{c.first, c.second} {
		harness.Equal(t, "pods after kubeadm reset", m.command(t, "berth", "ps", "--all", "--pods", "--quiet"), "")
	}
}

// kubeadmCluster is a control plane and a second node, as far as the page has created them.
type kubeadmCluster struct {
	first, second *kubeadm
	version       string // to which the cluster is upgraded, that of the programs
	web           string // ID of a container on the second node
	output        string // of all blocks
}

func newKubeadmCluster(t *testing.T, network string) *kubeadmCluster {
	t.Helper()
	first := &kubeadm{node: &node{dir: t.TempDir()}, env: []string{"NODE=" + secondNode, "KUBECONFIG=/etc/kubernetes/admin.conf"}}
	first.makeCgroups(t)
	first.page = newPageMachine(t)
	first.page.configure(t, network)
	first.page.serve(t)
	addNodeAddress(t)
	hosts := "127.0.0.1 localhost\n" + kubeletAddress + " " + kubeletNode + "\n" + secondAddress + " " + secondNode + "\n"
	harness.Must(t, os.WriteFile("/etc/hosts", []byte(hosts), 0o600))
	c := &kubeadmCluster{first: first, version: strings.TrimSpace(first.command(t, "kubeadm", "version", "-o", "short"))}
	c.second = newSecondNode(t, first.page, network)
	first.writeConfiguration(t)
	first.pushImages(t, c.version)
	for _, m := range []*kubeadm{c.first, c.second} {
		m.makeSlice(t)
		m.writeKubeletConfiguration(t)
		m.startKubelet(t)
		t.Cleanup(func() { m.removePodCgroups(t) }) // kubelet leaves them when it ends
		t.Cleanup(func() { m.kubelet.finish(t) })
	}
	return c
}

// run runs a block of the page on a machine, and checks what the block has changed.
func (c *kubeadmCluster) run(t *testing.T, m *kubeadm, b pages.Block) {
	t.Helper()
	if strings.Contains(b.Text, "kubeadm reset") {
		m.kubelet.stop(t) // kubeadm makes systemd do it
	}
	b.Text = c.adapt(b.Text)
	out := m.run(t, b)
	c.output += out
	switch {
	case strings.Contains(b.Text, "token create"):
		c.second.env = joinVariables(t, out)
	case strings.Contains(b.Text, "wait --for=create"):
		c.runDeployment(t)
	case strings.Contains(b.Text, "kubeadm upgrade apply"):
		image := c.first.command(t, "kubectl", "get", "pod", "-n", "kube-system", "kube-apiserver-"+kubeletNode, "-o", "jsonpath={.spec.containers[0].image}")
		harness.Equal(t, "image of the API server", image, "registry.k8s.io/kube-apiserver:"+c.version)
	case strings.Contains(b.Text, "kubeadm upgrade node"):
		c.restartKubelets(t)
	}
}

// adapt changes the page's commands for this cluster, which has no DNS, and for a machine with
// cgroup v1.
func (c *kubeadmCluster) adapt(text string) string {
	ignored := []string{"CoreDNSUnsupportedPlugins", "CoreDNSMigration"}
	if !machine.Cgroup2() {
		ignored = append(ignored, "SystemVerification")
	}
	ignore := " --ignore-preflight-errors=" + strings.Join(ignored, ",")
	return strings.NewReplacer(upgradedVersion, c.version, "kubeadm join", "kubeadm join"+ignore,
		"kubeadm upgrade plan", "kubeadm upgrade plan"+ignore, "kubeadm upgrade node", "kubeadm upgrade node"+ignore,
		"kubeadm upgrade apply", "kubeadm upgrade apply --skip-phases=addon"+ignore).Replace(text)
}

// joinVariables returns the variables of the page's kubeadm join, from the command that kubeadm
// printed.
func joinVariables(t *testing.T, command string) []string {
	t.Helper()
	found := regexp.MustCompile(`--token (\S+) --discovery-token-ca-cert-hash (\S+)`).FindStringSubmatch(command)
	if found == nil {
		t.Fatalf("kubeadm token create printed %q", command)
	}
	return []string{"TOKEN=" + found[1], "HASH=" + found[2]}
}

// runDeployment runs a pod on the second node. The first one has the taint of control planes.
func (c *kubeadmCluster) runDeployment(t *testing.T) {
	t.Helper()
	c.first.command(t, "kubectl", "create", "deployment", "web", "--image", "docker.io/library/busybox:latest", "--", "sleep", "100000")
	c.first.command(t, "kubectl", "wait", "--for=condition=Available", fmt.Sprintf("--timeout=%v", kubeletPatience), "deployment/web")
	c.web = c.container(t)
	harness.WantText(t, "pods on the second node", c.second.command(t, "berth", "ps", "--pods"), "web-")
	harness.WantText(t, "ID of the container", c.web, "berth://")
}

// container returns the ID of the Deployment's container.
func (c *kubeadmCluster) container(t *testing.T) string {
	t.Helper()
	return c.first.command(t, "kubectl", "get", "pods", "-l", "app=web", "-o", "jsonpath={.items[*].status.containerStatuses[*].containerID}")
}

// restartKubelets restarts both kubelets with the configuration that the upgrade wrote. The pod on
// the second node lives on, and accepts an exec.
func (c *kubeadmCluster) restartKubelets(t *testing.T) {
	t.Helper()
	for _, m := range []*kubeadm{c.first, c.second} {
		harness.WantText(t, "kubelet's configuration", m.command(t, "cat", "/var/lib/kubelet/config.yaml"), "unix:///run/berth/berth.sock")
		m.kubelet.stop(t)
		m.startKubelet(t)
	}
	c.second.kubelet.waitFor(t, "the pod accepts an exec", func() error {
		out, err := c.first.try(t, "kubectl", "exec", "deployment/web", "--", "cat", "/proc/1/comm")
		if err == nil && out != "sleep\n" {
			err = fmt.Errorf("the exec printed %q", out)
		}
		return err
	})
	harness.Equal(t, "container after the upgrade", c.container(t), c.web)
}

// controlPlanePrograms are the programs whose images kubeadm pulls by their names.
var controlPlanePrograms = []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"}

// kubeadm is a machine with berth, and with a kubelet that kubeadm configures.
type kubeadm struct {
	*node
	page  *pageNode
	enter []string // the command that enters the machine's namespaces; nil: those of the test
	env   []string // variables of the page's blocks
}

func (k *kubeadm) path() string {
	return "PATH=" + strings.Join([]string{os.Getenv(kubernetesEnv), harness.BinDir, os.Getenv("PATH")}, ":")
}

// run runs a block of the page on the machine.
func (k *kubeadm) run(t *testing.T, b pages.Block) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*kubeletPatience)
	defer cancel()
	env := append([]string{k.path(), "SCRIPT=" + b.Text}, k.env...)
	if k.enter != nil {
		b.Text = strings.Join(k.enter, " ") + ` bash -euo pipefail -c "$SCRIPT"`
	}
	out, err := b.Run(ctx, k.page.dir, env...)
	if err != nil {
		t.Fatalf("%v\nkubelet's log:\n%s\nthe daemon's log:\n%s", err, k.kubelet.tail(), k.page.daemon.tail())
	}
	t.Logf("%s:\n%s", b.Name(), out)
	return out
}

// command runs a command on the machine and returns its output.
func (k *kubeadm) command(t *testing.T, args ...string) string {
	t.Helper()
	out, err := k.try(t, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func (k *kubeadm) try(t *testing.T, args ...string) (string, error) {
	t.Helper()
	args = slices.Concat(k.enter, []string{"env", k.path()}, k.env, args)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 2*kubeletPatience) // also in cleanups
	defer cancel()
	var out, complaint bytes.Buffer
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = k.page.dir, &out, &complaint
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, complaint.String())
	}
	return out.String(), nil
}

// writeConfiguration writes the page's kubeadm.yaml with the settings for this machine.
func (k *kubeadm) writeConfiguration(t *testing.T) {
	t.Helper()
	config := ""
	for _, b := range harness.Get(pages.Read(checkoutDir))(t)["kubeadm.md"] {
		if strings.HasPrefix(b.Text, "# kubeadm.yaml\n") {
			config = b.Text
		}
	}
	const node, initialization, version = "nodeRegistration:\n", "kind: InitConfiguration\n", "kubernetesVersion: v1.37.1\n"
	for _, part := range []string{node, initialization, version} {
		if !strings.Contains(config, part) {
			t.Fatalf("kubeadm.yaml in the page lacks %q:\n%s", part, config)
		}
	}
	config = strings.Replace(config, initialization, initialization+"skipPhases: [addon]\n", 1)
	var ignored []string
	if runtime.NumCPU() < 2 { // in a guest
		ignored = append(ignored, "NumCPU")
	}
	if !machine.Cgroup2() {
		ignored = append(ignored, "SystemVerification")
		config += "---\napiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nfailCgroupV1: false\n"
	}
	own := fmt.Sprintf("%s  name: %s\n  ignorePreflightErrors: [%s]\n", node, kubeletNode, strings.Join(ignored, ", "))
	config = strings.Replace(config, node, own, 1)
	harness.Must(t, os.WriteFile(k.page.dir+"/kubeadm.yaml", []byte(config), 0o600))
}

// pushImages pushes the images that kubeadm pulls for the page's configuration and for another
// version. Those of the control plane have its programs. Of the others only pause runs, in the job
// with which an upgrade begins.
func (k *kubeadm) pushImages(t *testing.T, version string) {
	t.Helper()
	other := harness.BuildImage(t, v1.Config{Entrypoint: []string{"true"}})
	images := map[string]v1.Image{}
	for _, program := range controlPlanePrograms {
		images[program] = k.imageOf(t, program)
	}
	list := k.command(t, "kubeadm", "config", "images", "list", "--config", "kubeadm.yaml") +
		k.command(t, "kubeadm", "config", "images", "list", "--kubernetes-version", version)
	for name := range strings.FieldsSeq(list) {
		repository := strings.TrimPrefix(name, "registry.k8s.io/")
		program, _, _ := strings.Cut(repository, ":")
		img, found := images[program]
		if !found {
			img = other
		}
		harness.Get(harness.Registry.Push(repository, img))(t)
	}
}

// imageOf returns an image that contains a program. Programs that are links to one file share its
// layer.
func (k *kubeadm) imageOf(t *testing.T, program string) v1.Image {
	t.Helper()
	file := harness.Get(filepath.EvalSymlinks(kubernetesProgram(t, program)))(t)
	body := harness.Get(os.ReadFile(file))(t)
	name := filepath.Base(file)
	tree := fixture.Tree{fixture.Dir("usr", 0o755), fixture.Dir("usr/local", 0o755), fixture.Dir("usr/local/bin", 0o755)}
	tree = append(tree, fixture.File("usr/local/bin/"+name, 0o755, string(body)))
	layers := []v1.Layer{harness.PackLayer(t, tree, fixture.Plain)}
	if name != program {
		layers = append(layers, harness.PackLayer(t, fixture.Tree{fixture.Symlink("usr/local/bin/"+program, name)}, fixture.Plain))
	}
	return harness.Get(fixture.ImageOf(v1.Config{Env: []string{"PATH=/usr/local/bin"}}, layers...))(t)
}

// writeKubeletConfiguration writes kubelet's settings for this machine, a second directory beside
// kubeadm's file.
func (k *kubeadm) writeKubeletConfiguration(t *testing.T) {
	t.Helper()
	writeBelow(t, k.dir, "kubelet.conf.d/10-machine.conf", fmt.Appendf(nil, `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cgroupRoot: %s
failSwapOn: false
oomScoreAdj: 0
maxOpenFiles: 20000
imageGCHighThresholdPercent: 100
evictionHard: {memory.available: 1Mi, nodefs.available: 1Mi, imagefs.available: 1Mi, pid.available: "10"}
`, k.cgroup()))
}

// makeSlice makes the cgroup of the pods if systemd manages cgroups. The properties make systemd
// enable the controllers that kubelet expects.
func (k *kubeadm) makeSlice(t *testing.T) {
	t.Helper()
	if !harness.SystemdDriver() {
		return
	}
	slice := harness.Machine + "-kubelet" + k.suffix + ".slice"
	cpus := fmt.Sprintf("AllowedCPUs=0-%d", runtime.NumCPU()-1)
	for _, args := range [][]string{{"set-property", "--runtime", slice, "CPUWeight=100", "MemoryAccounting=yes", "TasksAccounting=yes", cpus}, {"start", slice}} {
		systemctl(t, args...)
	}
	t.Cleanup(func() { systemctl(t, "stop", slice); systemctl(t, "revert", slice) })
}

func systemctl(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.CommandContext(context.WithoutCancel(t.Context()), "systemctl", args...).CombinedOutput(); err != nil {
		t.Errorf("systemctl %s: %v: %s", strings.Join(args, " "), err, out)
	}
}

// startKubelet does what systemd does for kubelet's unit: it starts kubelet with kubeadm's files as
// soon as they exist.
func (k *kubeadm) startKubelet(t *testing.T) {
	t.Helper()
	const script = `until [ -e /var/lib/kubelet/config.yaml ] && . /var/lib/kubelet/kubeadm-flags.env; do read -rt 0.2 <> <(:) || :; done
exec "$1" --bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf --kubeconfig=/etc/kubernetes/kubelet.conf \
	--config=/var/lib/kubelet/config.yaml --config-dir="$2" --v=2 $KUBELET_KUBEADM_ARGS`
	args := []string{"env", k.path(), "bash", "-c", script, "kubelet", kubernetesProgram(t, "kubelet"), filepath.Join(k.dir, "kubelet.conf.d")}
	k.kubelet = startProgram(t, "kubelet", k.dir+"/kubelet.log", slices.Concat(k.enter, k.withOwnSysctls(t, args))...)
}
