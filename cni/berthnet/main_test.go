package berthnet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"berth/cni/berthnet/conf"
	"berth/cni/berthnet/rules"
	"berth/internal/netns"
	"berth/internal/testutil"
)

const insideVar = "BERTH_NET_TEST_INSIDE"

// TestMain runs the tests in new network and mount namespaces. With the plugin's file name the test
// binary is the plugin.
func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == Type {
		Main()
		return
	}
	if os.Getenv(insideVar) != "" {
		if err := enterTestNamespaces(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(m.Run())
	}
	testutil.MainNeedsRoot()
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), insideVar+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS, Pdeathsig: unix.SIGKILL}
	err := cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		os.Exit(exit.ExitCode())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "run tests of package berthnet in namespaces:", err)
		os.Exit(1)
	}
}

func enterTestNamespaces() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := os.MkdirAll("/run/netns", 0o755); err != nil {
		return err
	}
	if err := unix.Mount("run", "/run/netns", "tmpfs", 0, ""); err != nil {
		return fmt.Errorf("mount /run/netns: %w", err)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	return netlink.LinkSetUp(lo)
}

// bed is a network with its own directory. The test's network namespace is the node.
type bed struct {
	t      testing.TB
	dir    string
	conf   map[string]any
	plugin *Plugin
}

const subnet4, subnet6 = "10.99.0.0/24", "fd99::/64"

func newBed(t testing.TB, changes map[string]any) *bed {
	b := &bed{t: t, plugin: &Plugin{}, dir: t.TempDir(), conf: map[string]any{"cniVersion": "1.1.0", "name": "test", "type": Type, "bridge": "bn0",
		"subnets": []string{subnet4, subnet6}}}
	b.conf["dataDir"] = b.dir
	for key, value := range changes {
		b.conf[key] = value
	}
	t.Cleanup(func() {
		b.removeRules()
		testutil.Must(t, b.plugin.Close())
	})
	t.Cleanup(func() {
		if link, err := netlink.LinkByName(b.conf["bridge"].(string)); err == nil {
			testutil.Must(t, netlink.LinkDel(link))
		}
	})
	return b
}

// removeRules deletes the network's table if it exists.
func (b *bed) removeRules() {
	b.t.Helper()
	conn, err := nftables.New()
	testutil.Must(b.t, err)
	table := conn.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: rules.TablePrefix + b.key()})
	conn.DelTable(table)
	testutil.Must(b.t, conn.Flush())
}

// key returns the network's key.
func (b *bed) key() string {
	n, err := conf.Parse(b.stdin(nil))
	testutil.Must(b.t, err)
	return n.Key()
}

// testPod is a container with a network namespace.
type testPod struct {
	*bed
	id, netns string
	with      map[string]any // of the configuration
	result    *types100.Result
}

var podCount int

// pod returns a new pod that is not attached.
func (b *bed) pod(with map[string]any) *testPod {
	b.t.Helper()
	podCount++
	p := &testPod{bed: b, id: fmt.Sprintf("%060x-%03d", podCount, podCount), with: with}
	p.netns = "/run/netns/" + p.id
	testutil.Must(b.t, netns.New(p.netns))
	b.t.Cleanup(func() { testutil.Must(b.t, netns.Remove(p.netns)) })
	return p
}

// attached returns a new, attached pod.
func (b *bed) attached(with map[string]any) *testPod {
	b.t.Helper()
	p := b.pod(with)
	testutil.Must(b.t, p.add())
	b.t.Cleanup(func() { testutil.Must(b.t, p.del()) })
	return p
}

func hostPorts(ports ...map[string]any) map[string]any {
	return map[string]any{"runtimeConfig": map[string]any{"portMappings": ports}}
}

func (b *bed) stdin(with map[string]any) []byte {
	all := map[string]any{}
	for key, value := range b.conf {
		all[key] = value
	}
	for key, value := range with {
		all[key] = value
	}
	data, err := json.Marshal(all)
	testutil.Must(b.t, err)
	return data
}

func (p *testPod) call(verb, netns string, with map[string]any) ([]byte, error) {
	return p.plugin.Exec(context.Background(), p.stdin(with), []string{"CNI_COMMAND=" + verb, "CNI_CONTAINERID=" + p.id, "CNI_NETNS=" + netns, "CNI_IFNAME=eth0", "CNI_PATH=/nowhere"})
}

func (p *testPod) add() error {
	out, err := p.call("ADD", p.netns, p.with)
	if err != nil {
		return err
	}
	p.result = &types100.Result{}
	return json.Unmarshal(out, p.result)
}

func (p *testPod) del() error {
	_, err := p.call("DEL", netns.Existing(p.netns), p.with)
	return err
}

func (p *testPod) ip(v6 bool) string {
	for _, ip := range p.result.IPs {
		if (ip.Address.IP.To4() == nil) == v6 {
			return ip.Address.IP.String()
		}
	}
	p.t.Fatalf("the pod has no address with IPv6 %v: %v", v6, p.result)
	return ""
}

// traces lists all objects of attachments: ports, addresses, host ports.
func (b *bed) traces() string {
	b.t.Helper()
	var all []string
	list, err := netlink.LinkList()
	testutil.Must(b.t, err)
	for _, l := range list {
		of := strings.Fields(l.Attrs().Alias) // only complete ones, because another network's port may be vanishing with its namespace
		if l.Type() == "veth" && (len(of) < 2 || of[0] != "berth-net" || of[1] == b.key()) {
			all = append(all, l.Attrs().Name)
		}
	}
	return strings.Join(append(all, b.kept()...), "\n")
}
