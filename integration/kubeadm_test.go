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
	"berth/integration/machine"
	"berth/integration/pages"
)

// kubeadm makes a control plane in static pods on berth, with the commands of docs/kubeadm.md. The
// images contain the programs that integration/kubelet/build makes. kube-proxy and DNS are left out.
func TestControlPlaneKubeadm(t *testing.T) {
	for _, name := range append(controlPlanePrograms, "kubeadm", "kubectl", "kubelet") {
		kubernetesProgram(t, name)
	}
	k := &kubeadm{node: &node{dir: t.TempDir()}}
	k.makeCgroups(t)
	k.page = newPageNode(t)
	addNodeAddress(t)
	harness.Must(t, os.WriteFile("/etc/hosts", []byte("127.0.0.1 localhost\n"+kubeletAddress+" "+kubeletNode+"\n"), 0o600))
	k.writeConfiguration(t)
	k.pushImages(t)
	k.startKubelet(t)
	all := ""
	for _, b := range harness.Get(pages.Read(checkoutDir))(t)["kubeadm.md"] {
		if !b.RunsIn(pages.Kubeadm) {
			continue
		}
		if strings.Contains(b.Text, "kubeadm reset") {
			k.kubelet.stop(t) // kubeadm makes systemd do it
		}
		all += k.run(t, b)
	}
	harness.WantText(t, "output of the page", all, "control-plane has initialized successfully", "condition met", "berth://", "kube-apiserver-"+kubeletNode)
	if left := machine.ReadDir("/etc/kubernetes/manifests"); len(left) > 0 {
		t.Errorf("kubeadm reset has left %v", left)
	}
	out := k.command(t, "berth", "pods", "--quiet")
	harness.Equal(t, "pods after kubeadm reset", out, "")
}

// controlPlanePrograms are the programs whose images kubeadm pulls by their names.
var controlPlanePrograms = []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"}

// kubeadm is a machine with berth, and with a kubelet that kubeadm configures.
type kubeadm struct {
	*node
	page *pageNode
}

func (k *kubeadm) path() string {
	return "PATH=" + strings.Join([]string{os.Getenv(kubernetesEnv), harness.BinDir, os.Getenv("PATH")}, ":")
}

func (k *kubeadm) run(t *testing.T, b pages.Block) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*kubeletPatience)
	defer cancel()
	out, err := b.Run(ctx, k.page.dir, k.path())
	if err != nil {
		t.Fatalf("%v\nkubelet's log:\n%s\nthe daemon's log:\n%s", err, k.kubelet.tail(), k.page.daemon.tail())
	}
	t.Logf("%s:\n%s", b.Name(), out)
	return out
}

func (k *kubeadm) command(t *testing.T, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "env", append([]string{k.path()}, args...)...)
	cmd.Dir = k.page.dir
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v", strings.Join(args, " "), err)
	}
	return string(out)
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
	const node, initialization, version = "nodeRegistration:\n", "kind: InitConfiguration\n", "v1.37.2"
	for _, part := range []string{node, initialization, version} {
		if !strings.Contains(config, part) {
			t.Fatalf("kubeadm.yaml in the page lacks %q:\n%s", part, config)
		}
	}
	config = strings.Replace(config, version, strings.TrimSpace(k.command(t, "kubeadm", "version", "-o", "short")), 1)
	config = strings.Replace(config, initialization, initialization+"skipPhases: [addon]\n", 1)
	own := node + "  name: " + kubeletNode + "\n"
	if !machine.Cgroup2() {
		own += "  ignorePreflightErrors: [SystemVerification]\n"
		config += "---\napiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nfailCgroupV1: false\n"
	}
	config = strings.Replace(config, node, own, 1)
	harness.Must(t, os.WriteFile(k.page.dir+"/kubeadm.yaml", []byte(config), 0o600))
}

// pushImages pushes the images that kubeadm pulls. Those of the control plane have its programs, the
// others never run.
func (k *kubeadm) pushImages(t *testing.T) {
	t.Helper()
	other := harness.BuildImage(t, v1.Config{})
	for name := range strings.FieldsSeq(k.command(t, "kubeadm", "config", "images", "list", "--config", "kubeadm.yaml")) {
		repository := strings.TrimPrefix(name, "registry.k8s.io/")
		img := other
		for _, program := range controlPlanePrograms {
			if strings.HasPrefix(repository, program+":") {
				img = k.imageOf(t, program)
			}
		}
		harness.Get(harness.Registry.Push(repository, img))(t)
	}
}

// imageOf returns an image that contains a program.
func (k *kubeadm) imageOf(t *testing.T, program string) v1.Image {
	t.Helper()
	body := harness.Get(os.ReadFile(kubernetesProgram(t, program)))(t)
	tree := fixture.Tree{fixture.Dir("usr", 0o755), fixture.Dir("usr/local", 0o755), fixture.Dir("usr/local/bin", 0o755)}
	tree = append(tree, fixture.File("usr/local/bin/"+program, 0o755, string(body)))
	layer := harness.Get(tree.Layer(fixture.Plain))(t)
	return harness.Get(fixture.ImageOf(v1.Config{Env: []string{"PATH=/usr/local/bin"}}, layer))(t)
}

// startKubelet starts what systemd does for kubelet's unit: it starts kubelet with kubeadm's files as
// soon as they exist. A second directory has the settings for this machine.
func (k *kubeadm) startKubelet(t *testing.T) {
	t.Helper()
	writeBelow(t, k.dir, "kubelet.conf.d/10-machine.conf", fmt.Appendf(nil, `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cgroupRoot: %s
failSwapOn: false
oomScoreAdj: 0
maxOpenFiles: 20000
evictionHard: {memory.available: 1Mi, nodefs.available: 1Mi, imagefs.available: 1Mi, pid.available: "10"}
`, k.cgroup()))
	const script = `until [ -e /var/lib/kubelet/config.yaml ] && . /var/lib/kubelet/kubeadm-flags.env; do read -rt 0.2 <> <(:) || :; done
exec "$1" --bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf --kubeconfig=/etc/kubernetes/kubelet.conf \
	--config=/var/lib/kubelet/config.yaml --config-dir="$2" --v=2 $KUBELET_KUBEADM_ARGS`
	args := []string{"env", k.path(), "bash", "-c", script, "kubelet", kubernetesProgram(t, "kubelet"), filepath.Join(k.dir, "kubelet.conf.d")}
	k.kubelet = startProgram(t, "kubelet", k.dir+"/kubelet.log", k.withOwnSysctls(t, args)...)
	t.Cleanup(func() { k.removePodCgroups(t) }) // kubelet leaves them when it ends
	t.Cleanup(func() { k.kubelet.finish(t) })
}
