package packages

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/pages"
)

const (
	// containerdEnv names the directory of containerd and runc, see integration/containerd/build.
	containerdEnv = "BERTH_CONTAINERD"
	// crioEnv names the directory of CRI-O, see integration/crio/build.
	crioEnv = "BERTH_CRIO"
	// programs is where the installation instructions of both runtimes put programs.
	programs = "/usr/local/bin"
	// netd has the node's network for containerd, CRI-O and berth.
	netd = "/etc/cni/net.d"
	// moved is the name of the pod that moves between runtimes.
	moved = "moved"
)

// oldRuntime is a runtime from which a node moves to berth. Its name is the same for systemd and
// for berth's commands.
type oldRuntime struct {
	name      string
	socket    string // a URL
	inStatus  string // its name in the status of a container
	bin       string // directory of its programs and unit
	configure func(t *testing.T, r oldRuntime)
}

// A node with another runtime and a static pod moves to berth and back, with the commands of
// docs/migration.md and systemd's units. The runtime has its default configuration and the network
// of its documentation. The node has no control plane, so the lines with kubectl are left out;
// TestControlPlaneMigration runs them.
func TestMigrationInGuest(t *testing.T) {
	if os.Getenv(pagesEnv) == "" {
		t.Skip(pagesEnv + " is not set: run contrib/guest -packages systemd")
	}
	addAddress(t)
	completeCPUInfo(t)
	for _, r := range []oldRuntime{
		{"containerd", "unix:///run/containerd/containerd.sock", "containerd", os.Getenv(containerdEnv), configureContainerd},
		{"crio", "unix:///var/run/crio/crio.sock", "cri-o", os.Getenv(crioEnv), configureCRIO},
	} {
		t.Run(r.name, func(t *testing.T) {
			if r.bin == "" {
				t.Skipf("no directory of %s is set: run contrib/guest -packages systemd", r.name)
			}
			r.start(t)
			r.startPod(t)
			r.startBerthBeside(t)
			pulls := pullsOfBase()
			r.runPage(t)
			harness.Equal(t, "pulls of the pod's image after the first one", pullsOfBase()-pulls, 0)
			r.resetKeepsPod(t)
		})
	}
}

// start installs the runtime with its default configuration and starts its unit.
func (r oldRuntime) start(t *testing.T) {
	t.Helper()
	for _, dir := range []string{netd, manifests, "/etc/crictl.yaml"} { // of another test
		harness.Must(t, os.RemoveAll(dir))
	}
	linkAll(t, "/usr/lib/cni", "/opt/cni/bin")
	linkAll(t, r.bin, programs)
	r.configure(t, r)
	unit := string(harness.Get(os.ReadFile(filepath.Join(r.bin, r.name+".service")))(t))
	write(t, "/etc/systemd/system/"+r.name+".service", unit)
	run(t, "systemctl", "daemon-reload")
	t.Cleanup(func() { r.stop(t) })
	if out, err := try("systemctl", "enable", "--now", r.name); err != nil {
		log, _ := try("journalctl", "--no-pager", "--lines", "60", "--output", "cat", "--unit", r.name)
		t.Fatalf("start %s: %v\n%s\n%s", r.name, err, out, log)
	}
}

// stop stops the runtime and removes what would disturb another runtime.
func (r oldRuntime) stop(t *testing.T) {
	t.Helper()
	run(t, "systemctl", "disable", "--now", r.name)
	for _, left := range []string{netd, "/run/nri"} { // the socket would be replaced by berth's
		harness.Must(t, os.RemoveAll(left))
	}
	harness.RemoveLink(t, "cni0")
}

// linkAll creates a link in a directory for each file of another.
func linkAll(t *testing.T, from, to string) {
	t.Helper()
	harness.Must(t, os.MkdirAll(to, 0o755))
	for _, e := range harness.Get(os.ReadDir(from))(t) {
		link := filepath.Join(to, e.Name())
		harness.Must(t, os.RemoveAll(link))
		harness.Must(t, os.Symlink(filepath.Join(from, e.Name()), link))
	}
}

// pushPause stores the pause image that a default configuration names.
func pushPause(t *testing.T, config string) {
	t.Helper()
	name := regexp.MustCompile(`registry\.k8s\.io/(pause:[0-9.]+)`).FindStringSubmatch(config)
	if name == nil {
		t.Fatalf("the configuration names no pause image:\n%s", config)
	}
	img := harness.Get(fixture.Image(v1.Config{Cmd: []string{"sleep", "100000"}}))(t)
	harness.Get(harness.Registry.Push(name[1], img))(t)
}

// containerdNetwork is the network of containerd's documentation and script/setup/install-cni.
const containerdNetwork = `{
  "cniVersion": "1.0.0",
  "name": "containerd-net",
  "plugins": [
    {
      "type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": true, "promiscMode": true,
      "ipam": {
        "type": "host-local",
        "ranges": [[{"subnet": "10.88.0.0/16"}], [{"subnet": "2001:4860:4860::/64"}]],
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]
      }
    },
    {"type": "portmap", "capabilities": {"portMappings": true}}
  ]
}
`

// configureContainerd writes containerd's default configuration. The tests' registry stands in for
// registry.k8s.io. containerd 2.4 does not look into its default directories for mirrors, so a
// fragment names the first.
func configureContainerd(t *testing.T, r oldRuntime) {
	config := run(t, filepath.Join(programs, "containerd"), "config", "default")
	write(t, "/etc/containerd/config.toml", config)
	pushPause(t, config)
	write(t, "/etc/containerd/conf.d/registry.toml", `version = 4
[plugins.'io.containerd.cri.v1.images'.registry]
config_path = "/etc/containerd/certs.d"
`)
	write(t, "/etc/containerd/certs.d/registry.k8s.io/hosts.toml", fmt.Sprintf("[host.\"http://%s\"]\n", harness.Registry.Host))
	write(t, filepath.Join(netd, "10-containerd-net.conflist"), containerdNetwork)
}

// configureCRIO writes what CRI-O's packages have beside its built-in defaults: a signature policy
// and a network. The tests' registry stands in for registry.k8s.io.
func configureCRIO(t *testing.T, r oldRuntime) {
	pushPause(t, run(t, filepath.Join(programs, "crio"), "config", "--default"))
	write(t, "/etc/containers/policy.json", `{"default": [{"type": "insecureAcceptAnything"}]}`)
	write(t, "/etc/containers/registries.conf.d/test.conf", fmt.Sprintf(`[[registry]]
location = %[1]q
insecure = true
[[registry]]
prefix = "registry.k8s.io"
location = %[1]q
insecure = true
`, harness.Registry.Host))
	const network = "11-crio-ipv4-bridge.conflist"
	write(t, filepath.Join(netd, network), string(harness.Get(os.ReadFile(filepath.Join(r.bin, "cni", network)))(t)))
}

// startPod installs berth and starts a static pod on the other runtime.
func (r oldRuntime) startPod(t *testing.T) {
	t.Helper()
	install(t, "old")
	t.Cleanup(func() { run(t, "apt-get", "purge", "--yes", "berth") })
	harness.Equal(t, "unit file beside "+r.name, property(t, "berth.service", "UnitFileState"), "disabled")
	t.Cleanup(func() { r.removePods(t) })
	write(t, "/var/lib/kubelet/config.yaml", strings.Replace(kubeletConfig, "unix:///run/berth/berth.sock", r.socket, 1))
	startKubeletWith(t, "/var/lib/kubelet/config.yaml")
	applyPod(t, moved)
	r.awaitPod(t, r.inStatus)
}

// removePods ends the node's pods on the other runtime.
func (r oldRuntime) removePods(t *testing.T) {
	t.Helper()
	run(t, "systemctl", "stop", "kubelet")
	harness.Must(t, os.RemoveAll(filepath.Join(manifests, moved+".yaml")))
	for _, pod := range strings.Fields(run(t, "berth", "ps", "--all", "--pods", "--quiet", "--no-trunc", "--socket", r.socket)) {
		run(t, "berth", "rm", "--force", "--socket", r.socket, pod)
	}
}

// startBerthBeside starts berth on a node whose NRI socket belongs to the other runtime, with the
// configuration that the page advises for plugins of that socket.
func (r oldRuntime) startBerthBeside(t *testing.T) {
	t.Helper()
	write(t, "/etc/berth/config.d/nri.toml", "nri.socket = \"/var/run/nri/nri.sock\"\n")
	out, err := try("berth", "check")
	if err == nil {
		t.Errorf("berth check finds nothing beside %s:\n%s", r.name, out)
	}
	harness.WantText(t, "output of berth check", out, "other runtime", "NRI socket", r.name+" (pid", ", 0 failures")
	run(t, "systemctl", "start", "berth")
	runsInstalled(t)
	harness.WantText(t, "berth's log", run(t, "journalctl", "--output", "cat", "--unit", "berth"), "no NRI plugin can connect")
	run(t, "systemctl", "stop", "berth")
	r.awaitPod(t, r.inStatus)
}

// runPage runs the commands of the page. The pod follows the node's runtime. As in an operator's
// shell, variables that a block exports reach the next blocks.
func (r oldRuntime) runPage(t *testing.T) {
	t.Helper()
	const keepExports = "[ ! -e exports ] || . ./exports\ntrap 'export -p > exports' EXIT\n"
	dir := t.TempDir()
	for _, b := range harness.Get(pages.Read(os.Getenv(pagesEnv)))(t)["migration.md"] {
		if !b.RunsIn(pages.Migration) {
			continue
		}
		if b.Heading == "Check" {
			r.awaitPod(t, "berth")
			harness.WantText(t, "output of berth check", run(t, "berth", "check", "--verbose"), "NRI socket", "berthd (pid")
		}
		b.Text = keepExports + withoutKubectl(b.Text)
		out, err := b.Run(t.Context(), dir, "OLD="+r.name, "OLD_SOCKET="+r.socket)
		if err != nil {
			t.Fatal(err) // the next blocks depend on it
		}
		t.Logf("%s:\n%s", b.Name(), out)
	}
}

// resetKeepsPod removes berth's files from a node that has moved back. The pod of the other runtime
// runs on.
func (r oldRuntime) resetKeepsPod(t *testing.T) {
	t.Helper()
	was := r.awaitPod(t, r.inStatus)
	t.Log(run(t, "berth", "reset", "--yes"))
	harness.Equal(t, "container after berth reset", r.awaitPod(t, r.inStatus), was)
}

// withoutKubectl returns a script without the lines that need an API server.
func withoutKubectl(script string) string {
	kept := ""
	for line := range strings.Lines(script) {
		if !strings.Contains(line, "kubectl ") {
			kept += line
		}
	}
	return kept
}

// pullsOfBase returns how often the registry was asked for the image of the pod.
func pullsOfBase() int {
	return harness.Registry.Count("GET", "/base/manifests/latest") + harness.Registry.Count("HEAD", "/base/manifests/latest")
}

// awaitPod waits until the pod serves on a runtime, and returns its container's ID.
func (r oldRuntime) awaitPod(t *testing.T, runtime string) string {
	t.Helper()
	id := ""
	eventually(t, "the pod serves on "+runtime, func() error {
		pod, err := findPod(moved)
		if err != nil {
			return err
		}
		for _, s := range pod.Status.ContainerStatuses {
			if s.Ready && strings.HasPrefix(s.ContainerID, runtime+"://") {
				id = s.ContainerID
				return serves(pod.Status.PodIP, moved)
			}
		}
		return fmt.Errorf("its status is %+v", pod.Status)
	}, r.name)
	return id
}
