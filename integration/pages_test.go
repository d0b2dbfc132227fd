package integration

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"

	"berth/image/peers/peerstest"
	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/pages"
)

const checkoutDir = ".." // of the sources, in which blocks of pages run

// Shell blocks of the operators' pages run on a node, page by page, in the order of the page. The
// commands are those of the page: the node has berth's default directories, and a registry that
// serves every name.
func TestPages(t *testing.T) {
	all := harness.Get(pages.Read(checkoutDir))(t)
	for _, page := range slices.Sorted(maps.Keys(all)) {
		blocks := slices.DeleteFunc(all[page], func(b pages.Block) bool { return !b.RunsIn(pages.Machine) })
		if len(blocks) == 0 {
			continue
		}
		t.Run(page, func(t *testing.T) {
			n := newPageNode(t)
			if prepare := preparePage[page]; prepare != nil {
				prepare(t, n)
			}
			for _, b := range blocks {
				n.run(t, b)
			}
		})
	}
}

// crictlEnv names the program crictl. Its module cannot be fetched from every proxy, so no script
// builds it.
const crictlEnv = "BERTH_CRICTL"

// The page's commands of crictl run with the page's configuration.
func TestPagesCrictl(t *testing.T) {
	crictl := os.Getenv(crictlEnv)
	if crictl == "" {
		t.Skipf("%s is not set", crictlEnv)
	}
	n := newPageNode(t)
	harness.Must(t, os.Symlink(crictl, n.dir+"/crictl"))
	n.run(t, pages.Block{Page: "kubelet.md", Text: "berth run --detach contrib/examples/web.yaml", ExitCodes: []int{0}})
	for _, b := range harness.Get(pages.Read(checkoutDir))(t)["kubelet.md"] {
		if strings.HasPrefix(b.Text, "# /etc/crictl.yaml\n") {
			harness.Must(t, os.WriteFile("/etc/crictl.yaml", []byte(b.Text), 0o600))
		}
		if b.RunsIn(pages.Crictl) {
			n.run(t, b)
		}
	}
}

// Each TOML block that begins with the path of berth's configuration is a configuration that berth
// accepts.
func TestPagesConfigure(t *testing.T) {
	const path = "/etc/berth/config.toml"
	ca := peerstest.NewCA(t)
	cert, key := ca.Node()
	files := strings.NewReplacer("/etc/berth/peers/node.pem", cert, "/etc/berth/peers/node.key", key, "/etc/berth/peers/ca.pem", ca.File)
	for _, blocks := range harness.Get(pages.Read(checkoutDir))(t) {
		for _, b := range blocks {
			if b.Language != "toml" || !strings.HasPrefix(b.Text, "# "+path) {
				continue
			}
			file := filepath.Join(t.TempDir(), "config.toml")
			harness.Must(t, os.WriteFile(file, []byte(files.Replace(b.Text)), 0o600))
			if out, err := exec.CommandContext(t.Context(), filepath.Join(harness.BinDir, "berth"), "config", "check", "--config", file).CombinedOutput(); err != nil {
				t.Errorf("%s: %v\n%s", b.Name(), err, out)
			}
		}
	}
}

// preparePage makes what the blocks of a page expect beside a running daemon.
var preparePage = map[string]func(*testing.T, *pageNode){
	"checkpoint.md": prepareCheckpoint,
	"images.md":     prepareImages,
	"run.md": func(t *testing.T, n *pageNode) {
		t.Helper()
		harness.Must(t, os.Symlink(n.dir+"/contrib/examples/web.yaml", n.dir+"/app.yaml"))
	},
	"tracing.md": func(t *testing.T, n *pageNode) {
		t.Helper()
		n.run(t, pages.Block{Page: "tracing.md", Text: "berth run --detach contrib/examples/web.yaml", ExitCodes: []int{0}})
	},
}

// prepareCheckpoint installs CRIU and runs the page's pod.
func prepareCheckpoint(t *testing.T, n *pageNode) {
	t.Helper()
	criu := os.Getenv("BERTH_TEST_CRIU")
	if criu == "" {
		t.Skip("NOT TESTED: no CRIU (BERTH_TEST_CRIU)")
	}
	script := fmt.Appendf(nil, "#!/bin/sh\nexec %s \"$@\"\n", criu)
	harness.Must(t, os.WriteFile("/usr/local/sbin/criu", script, 0o755)) // below the node's overlay
	const pod = `berth run --detach - <<'END'
apiVersion: v1
kind: Pod
metadata: {name: web}
spec:
  terminationGracePeriodSeconds: 0
  containers:
  - {name: app, image: docker.io/library/busybox:latest, command: [sh, -c, 'while :; do sleep 1; done']}
END
`
	n.run(t, pages.Block{Page: "checkpoint.md", Text: pod, ExitCodes: []int{0}})
}

// prepareImages makes the archives that the page loads, and the disks of the runtimes from which it
// imports images.
func prepareImages(t *testing.T, n *pageNode) {
	t.Helper()
	img := harness.BuildImage(t, v1.Config{})
	harness.Must(t, os.Symlink(dockerArchive(t, "example.com/app:v0", img), n.dir+"/app.tar"))
	path := harness.Get(layout.Write(n.dir+"/oci-layout", empty.Index))(t)
	harness.Must(t, path.AppendImage(img))
	const name = "docker.io/library/busybox:1.36"
	for dir, store := range map[string]string{
		"/var/lib/containerd":         containerdStore(t, []string{name}, img),
		"/var/lib/containers/storage": crioStore(t, name, img),
	} {
		harness.Must(t, os.MkdirAll(filepath.Dir(dir), 0o755))
		harness.Must(t, os.Symlink(store, dir))
	}
}

// pageNode is a machine with a daemon in its default directories.
type pageNode struct {
	dir    string // in which the blocks run; it has the programs and examples of the checkout
	disk   string // contains everything that the node writes
	daemon *program
}

func newPageNode(t *testing.T) *pageNode {
	t.Helper()
	n := newPageMachine(t)
	n.configure(t, builtIn)
	n.serve(t)
	return n
}

// newPageMachine prepares the directories, but no daemon.
func newPageMachine(t *testing.T) *pageNode {
	t.Helper()
	n := &pageNode{disk: harness.Get(os.MkdirTemp("/var/tmp", "berth-pages-"))(t)}
	t.Cleanup(func() { harness.Must(t, os.RemoveAll(n.disk)) })
	before := harness.MachineSnapshot(nil)
	t.Cleanup(func() { harness.NoMachineLeaks(t, before, nil) })
	n.hideDirectories(t)
	n.makeCheckout(t)
	return n
}

// hideDirectories gives the node its own directories, so that the blocks leave the machine
// unchanged.
func (n *pageNode) hideDirectories(t *testing.T) {
	t.Helper()
	for _, dir := range []string{"/etc", "/usr/local", "/root"} {
		n.overlay(t, dir)
	}
	hideBelowTmpfs(t, "/var/lib")
	hideBelowTmpfs(t, "/var/log")
	harness.Must(t, os.Mkdir("/var/lib/berth", 0o711)) // on a disk, because EROFS images on tmpfs cannot be mounted
	harness.Must(t, os.Mkdir(n.disk+"/berth", 0o711))
	bind(t, n.disk+"/berth", "/var/lib/berth")
}

// overlay makes the changes below dir go to the node's disk.
func (n *pageNode) overlay(t *testing.T, dir string) {
	t.Helper()
	name := strings.ReplaceAll(dir, "/", "-")
	upper, work := n.disk+"/upper"+name, n.disk+"/work"+name
	harness.Must(t, os.Mkdir(upper, 0o755))
	harness.Must(t, os.Mkdir(work, 0o755))
	harness.Must(t, syscall.Mount("overlay", dir, "overlay", 0, fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", dir, upper, work)))
	t.Cleanup(func() { harness.Must(t, syscall.Unmount(dir, 0)) })
}

func bind(t *testing.T, from, to string) {
	t.Helper()
	harness.Must(t, syscall.Mount(from, to, "", syscall.MS_BIND, ""))
	t.Cleanup(func() { harness.Must(t, syscall.Unmount(to, 0)) })
}

// makeCheckout makes the directory of the blocks, with links to the checkout's parts that pages
// name.
func (n *pageNode) makeCheckout(t *testing.T) {
	t.Helper()
	n.dir = n.disk + "/checkout"
	harness.Must(t, os.Mkdir(n.dir, 0o755))
	harness.Must(t, os.Symlink(harness.BinDir, n.dir+"/bin"))
	harness.Must(t, os.Symlink(harness.Get(filepath.Abs(checkoutDir+"/contrib"))(t), n.dir+"/contrib"))
}

// builtIn is the network.type of the built-in network.
const builtIn = "berth-net"

// configure lets berth use a type of network, and the test's registry for every name.
func (n *pageNode) configure(t *testing.T, network string) {
	t.Helper()
	harness.Must(t, os.RemoveAll("/etc/berth"))
	writeBelow(t, "/etc/berth", "config.toml", fmt.Appendf(nil, "[network]\ntype = %q\nno_masquerade = [%q]\n[checkpoint]\nrestore = \"trusted\"\n", network, clusterPods))
	writeBelow(t, "/etc/berth", "certs.d/_default/hosts.toml", fmt.Appendf(nil, "server = %q\n", "http://"+harness.Registry.Host))
	img := harness.Get(fixture.Image(v1.Config{Cmd: []string{"sh"}}))(t)
	for _, name := range []string{"library/busybox:latest", "library/busybox:1.36", "team/app:v1"} {
		harness.Get(harness.Registry.Push(name, img))(t)
	}
}

// serve starts the daemon. At the end of the test berth reset removes it and everything that it
// has.
func (n *pageNode) serve(t *testing.T) {
	t.Helper()
	n.daemon = startProgram(t, "berth", n.disk+"/berth.log", filepath.Join(harness.BinDir, harness.DaemonProgram))
	t.Cleanup(func() {
		n.daemon.finish(t)
	})
	t.Cleanup(func() { resetBerth(t) })
	n.daemon.waitFor(t, "it answers", func() error {
		return exec.CommandContext(t.Context(), filepath.Join(harness.BinDir, "berth"), "version").Run()
	})
}

// resetBerth removes the daemon in the default directories and everything that it has.
func resetBerth(t *testing.T) {
	t.Helper()
	out, err := exec.Command(filepath.Join(harness.BinDir, "berth"), "reset", "--yes", "--stop-daemon", "--grace-period", "1s").CombinedOutput()
	if err != nil {
		t.Errorf("berth reset: %v\n%s", err, out)
	}
}

// run runs a block of a page.
func (n *pageNode) run(t *testing.T, b pages.Block) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), harness.Patience)
	defer cancel()
	out, err := b.Run(ctx, n.dir, "PATH="+harness.BinDir+":"+n.dir+":"+os.Getenv("PATH"))
	if err != nil {
		t.Errorf("%v\nthe daemon's log:\n%s", err, n.daemon.tail())
		return
	}
	t.Logf("%s:\n%s", b.Name(), out)
}
