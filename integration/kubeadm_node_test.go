package integration

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"berth/integration/harness"
)

const (
	secondNode    = "node2"
	secondAddress = "192.0.2.11"
	clusterPods   = "10.244.0.0/16" // addresses of pods in docs/kubeadm.md
)

// newSecondNode makes a second machine with a daemon in its default directories: mount, network and
// UTS namespaces inside those of the test. The other end of the first machine's eth0 is its eth0.
func newSecondNode(t *testing.T, first *pageNode, network string) *kubeadm {
	t.Helper()
	k := &kubeadm{
		node: &node{dir: first.disk + "/" + secondNode, suffix: "2"},
		page: &pageNode{dir: first.dir, disk: first.disk + "/" + secondNode},
	}
	harness.Must(t, os.MkdirAll(k.page.disk+"/berth", 0o711))
	k.makeCgroups(t)
	k.startMachine(t)
	k.configure(t, network)
	k.startDaemon(t)
	return k
}

// startMachine makes the namespaces. A process holds them until the end of the test.
func (k *kubeadm) startMachine(t *testing.T) {
	t.Helper()
	harness.Must(t, os.MkdirAll("/etc/kubernetes", 0o755)) // below the first machine's overlay
	const script = `set -e
hostname "$2"
for dir in dbus systemd; do [ ! -d /run/$dir ] || { mkdir "$1/$dir" && mount --rbind /run/$dir "$1/$dir"; }; done
umount --recursive --lazy /run /var/lib /var/log # those of the first machine, in this namespace only
for dir in /run /etc/kubernetes /etc/berth /var/lib /var/log; do mount -t tmpfs -o mode=0755 tmpfs "$dir"; done
for dir in dbus systemd; do [ ! -d "$1/$dir" ] || { mkdir /run/$dir && mount --rbind "$1/$dir" /run/$dir; }; done # cgroups are systemd's
mkdir -p /run/lock /run/tmp
mkdir -m 0711 /var/lib/berth
mount --bind "$1/berth" /var/lib/berth
mount --make-rshared /
ip link set lo up
echo 1 >/proc/sys/net/ipv4/ip_forward
: >"$1/ready"
exec sleep infinity`
	holder := startProgram(t, "the second machine", k.page.disk+"/machine.log",
		"unshare", "--mount", "--net", "--uts", "bash", "-c", script, "machine", k.page.disk, secondNode)
	t.Cleanup(func() { holder.stop(t) })
	holder.waitFor(t, "it is ready", func() error {
		_, err := os.Stat(k.page.disk + "/ready")
		return err
	})
	pid := strconv.Itoa(holder.cmd.Process.Pid)
	k.enter = []string{"nsenter", "--target", pid, "--mount", "--net", "--uts"}
	first := &kubeadm{page: k.page}
	first.command(t, "ip", "link", "set", "eth0-peer", "netns", pid)
	for _, args := range []string{
		"link set eth0-peer name eth0", "address add " + secondAddress + "/24 dev eth0", "link set eth0 up", "route add default via 192.0.2.1",
	} {
		k.command(t, append([]string{"ip"}, strings.Fields(args)...)...)
	}
}

// configure lets the daemon use a type of network, and the test's registry for every name.
func (k *kubeadm) configure(t *testing.T, network string) {
	t.Helper()
	const script = `mkdir -p /etc/berth/certs.d/_default
printf '[network]\ntype = "%s"\nno_masquerade = ["%s"]\n' "$3" "$2" >/etc/berth/config.toml
printf 'server = "%s"\n' "$1" >/etc/berth/certs.d/_default/hosts.toml`
	k.command(t, "bash", "-euc", script, "configure", forwardRegistry(t), clusterPods, network)
}

// forwardRegistry serves the test's registry, which listens on loopback, at the first machine's
// address, and returns its URL.
func forwardRegistry(t *testing.T) string {
	t.Helper()
	listener := harness.Get(net.Listen("tcp", kubeletAddress+":0"))(t)
	server := &http.Server{Handler: httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: harness.Registry.Host})}
	done := make(chan error)
	go func() { done <- server.Serve(listener) }()
	t.Cleanup(func() {
		harness.Must(t, server.Close())
		<-done // always http.ErrServerClosed
	})
	return fmt.Sprintf("http://%s", listener.Addr())
}

// startDaemon starts the daemon. At the end of the test berth reset removes it and everything that
// it has.
func (k *kubeadm) startDaemon(t *testing.T) {
	t.Helper()
	berthd := filepath.Join(harness.BinDir, harness.DaemonProgram)
	k.page.daemon = startProgram(t, "the second berth", k.page.disk+"/berth.log", append(k.enter, berthd)...)
	t.Cleanup(func() { k.page.daemon.finish(t) })
	t.Cleanup(func() { k.command(t, "berth", "reset", "--yes", "--stop-daemon", "--grace-period", "1s") })
	k.page.daemon.waitFor(t, "it answers", func() error {
		_, err := k.try(t, "berth", "version")
		return err
	})
}
