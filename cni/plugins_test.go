package cni

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/vishvananda/netlink"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/netns"
	"berth/internal/testutil"
)

// pluginDir returns the directory of the CNI project's plugins: /opt/cni/bin, or /usr/lib/cni of
// Debian's containernetworking-plugins.
func pluginDir(t *testing.T) string {
	t.Helper()
	for _, dir := range []string{"/opt/cni/bin", "/usr/lib/cni"} {
		if _, err := os.Stat(dir + "/bridge"); err == nil {
			return dir
		}
	}
	t.Fatal("no CNI plugins in /opt/cni/bin or /usr/lib/cni: install containernetworking-plugins")
	return ""
}

// realBed has a dual-stack bridge network with host ports.
type realBed struct {
	*bed
	bridge, ipam string // interface, host-local's directory
}

func newRealBed(t *testing.T, bridge string, subnet int) *realBed {
	t.Helper()
	testutil.NeedRoot(t)
	b := &realBed{bed: newBed(t), bridge: bridge}
	b.ipam = filepath.Dir(b.conf) + "/ipam"
	b.writeConf("10-real.conflist", fmt.Sprintf(`{"cniVersion":"1.0.0","name":"real","plugins":[
		{"type":"bridge","bridge":%q,"isGateway":true,"ipMasq":true,"hairpinMode":true,"ipam":{"type":"host-local","dataDir":%q,
		 "ranges":[[{"subnet":"10.%[3]d.0.0/24"}],[{"subnet":"fd00:%[3]d::/64"}]],"routes":[{"dst":"0.0.0.0/0"},{"dst":"::/0"}]}},
		{"type":"portmap","capabilities":{"portMappings":true},"snat":true}]}`, bridge, b.ipam, subnet))
	b.start(pluginDir(t))
	testutil.Must(t, b.n.Status(context.Background()))
	return b
}

func (b *realBed) pod(id string) Pod {
	b.t.Helper()
	pod := testPod(id)
	pod.NetNS = filepath.Dir(b.conf) + "/netns-" + id
	testutil.Must(b.t, netns.New(pod.NetNS))
	b.t.Cleanup(func() { testutil.Must(b.t, netns.Remove(pod.NetNS)) })
	return pod
}

// allocated returns the addresses that host-local has assigned.
func (b *realBed) allocated() []string {
	b.t.Helper()
	entries, err := os.ReadDir(b.ipam + "/real")
	testutil.Must(b.t, err)
	var addrs []string
	for _, e := range entries {
		if e.Name() != "lock" && !strings.HasPrefix(e.Name(), "last_reserved_ip.") {
			addrs = append(addrs, e.Name())
		}
	}
	return addrs
}

// rules returns the iptables rules that mention text.
func rules(t *testing.T, text string) []string {
	t.Helper()
	var found []string
	for _, tool := range []string{"iptables", "ip6tables"} {
		out, err := exec.Command(tool+"-save", "-t", "nat").CombinedOutput()
		if err != nil {
			t.Fatalf("%s-save: %v: %s", tool, err, out)
		}
		for line := range strings.Lines(string(out)) {
			if strings.Contains(line, text) {
				found = append(found, line)
			}
		}
	}
	return found
}

func TestRealPlugins(t *testing.T) {
	b := newRealBed(t, "berth-t0", 91)
	ctx := context.Background()
	server, client := b.pod("server"), b.pod("client")
	server.PortMappings = []PortMapping{{HostPort: 18080, ContainerPort: 80, Protocol: "tcp"}}

	result, err := b.n.Add(ctx, b.plan(), server)
	testutil.Must(t, err)
	if len(result.IPs) != 2 || !result.IPs[0].Is4() || !result.IPs[1].Is6() {
		t.Fatalf("addresses %v, want IPv4 then IPv6 as the configuration has them", result.IPs)
	}
	att := b.add(client)
	wantAddresses(t, server.NetNS, result)
	stop := serveHello(t, server.NetNS, ":80")
	defer stop()
	hello(t, client.NetNS, net.JoinHostPort(result.IPs[0].String(), "80"))
	hello(t, client.NetNS, "10.91.0.1:18080") // the host port, at the bridge's address
	if len(rules(t, "server")) == 0 {
		t.Error("no rule names the pod: the check of rules below would pass in any case")
	}

	testutil.Must(t, b.n.Del(ctx, att, server))
	testutil.Must(t, b.n.Del(ctx, att, server))
	testutil.Must(t, netns.In(client.NetNS, func() error { return netlink.LinkDel(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: IfName}}) }))
	testutil.Must(t, netns.Remove(client.NetNS))
	testutil.Must(t, b.n.Del(ctx, att, client)) // the namespace is gone
	if got := b.allocated(); len(got) != 0 {
		t.Errorf("addresses still allocated: %v", got)
	}
	if got := rules(t, "server"); len(got) != 0 {
		t.Errorf("rules left: %q", got)
	}
	left, err := os.ReadDir(b.cache + "/results")
	testutil.Must(t, err)
	if len(left) != 0 {
		t.Errorf("left in the cache: %v", left)
	}
}

func wantAddresses(t *testing.T, netnsPath string, r Result) {
	t.Helper()
	testutil.Must(t, netns.In(netnsPath, func() error {
		eth0, err := netlink.LinkByName(IfName)
		if err != nil {
			return err
		}
		addrs, err := netlink.AddrList(eth0, netlink.FAMILY_ALL)
		if err != nil {
			return err
		}
		for _, ip := range r.IPs {
			if !slices.ContainsFunc(addrs, func(a netlink.Addr) bool { return a.IP.String() == ip.String() }) {
				t.Errorf("eth0 does not have %s but %v", ip, addrs)
			}
		}
		return nil
	}))
}

// serveHello answers every connection to addr in a namespace.
func serveHello(t *testing.T, netnsPath, addr string) (stop func()) {
	t.Helper()
	var l net.Listener
	testutil.Must(t, netns.In(netnsPath, func() (err error) {
		l, err = net.Listen("tcp", addr)
		return err
	}))
	var served sync.WaitGroup
	served.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return // closed
			}
			_, werr := io.WriteString(c, "hello")
			if err := c.Close(); werr != nil || err != nil {
				t.Errorf("serve: %v, %v", werr, err)
			}
		}
	})
	return func() { testutil.Must(t, l.Close()); served.Wait() }
}

func hello(t *testing.T, netnsPath, addr string) {
	t.Helper()
	var c net.Conn
	testutil.Must(t, netns.In(netnsPath, func() (err error) {
		c, err = net.Dial("tcp", addr)
		return err
	}))
	defer c.Close()
	got, err := io.ReadAll(c)
	if err != nil || string(got) != "hello" {
		t.Errorf("%s said %q, %v", addr, got, err)
	}
}

// Each pod has a different address, and all addresses are released.
func TestRealPluginsParallel(t *testing.T) {
	b := newRealBed(t, "berth-t1", 92)
	att := b.plan()
	var mu sync.Mutex // guards seen
	seen := map[string]string{}
	var pods sync.WaitGroup
	for i := range 8 {
		pod := b.pod(fmt.Sprintf("p%d", i))
		pods.Go(func() {
			r, err := b.n.Add(context.Background(), att, pod)
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			for _, ip := range r.IPs {
				if other := seen[ip.String()]; other != "" {
					t.Errorf("%s and %s both have %s", pod.ID, other, ip)
				}
				seen[ip.String()] = pod.ID
			}
		})
	}
	pods.Wait()
	if len(seen) != 16 {
		t.Errorf("%d addresses, want 16", len(seen))
	}
	for i := range 8 {
		pod := testPod(fmt.Sprintf("p%d", i))
		pod.NetNS = filepath.Dir(b.conf) + "/netns-" + pod.ID
		pods.Go(func() {
			if err := b.n.Del(context.Background(), att, pod); err != nil {
				t.Error(err)
			}
		})
	}
	pods.Wait()
	if got := b.allocated(); len(got) != 0 {
		t.Errorf("addresses still allocated: %v", got)
	}
}

// The chain's second plugin fails after the first has allocated an address. DEL has no result and
// must release it.
func TestRealPluginsFailedAdd(t *testing.T) {
	b := newRealBed(t, "berth-t2", 93)
	att := b.plan()
	pod := b.pod("p1")
	pod.PortMappings = []PortMapping{{HostPort: 80, ContainerPort: 80, Protocol: "bogus"}}
	_, err := b.n.Add(context.Background(), att, pod)
	if errdefs.Code(err) != codes.Internal || !strings.Contains(err.Error(), "portmap") {
		t.Fatalf("add: %v (%v)", err, errdefs.Code(err))
	}
	if got := b.allocated(); len(got) != 2 {
		t.Errorf("allocated %v; ADD must fail half-way for this test", got)
	}
	testutil.Must(t, b.n.Del(context.Background(), att, pod))
	if got := b.allocated(); len(got) != 0 {
		t.Errorf("addresses still allocated: %v", got)
	}
}

func TestRealPluginsGC(t *testing.T) {
	b := newRealBed(t, "berth-t3", 94)
	kept, stale := b.pod("kept"), b.pod("stale")
	b.add(kept)
	b.add(stale)
	testutil.Must(t, b.n.GC(context.Background(), []Pod{kept}))
	if got := b.allocated(); len(got) != 2 {
		t.Errorf("allocated %v, want the two of the kept pod", got)
	}
	// DEL is repeated until it succeeds, as callers do: iptables once reported its chain as busy.
	testutil.Eventually(t, "the kept pod is detached", func() bool {
		err := b.n.Del(context.Background(), b.plan(), kept)
		if err != nil {
			t.Log(err)
		}
		return err == nil
	})
}

// The bridge plugin passes the pod CIDR of UpdateRuntimeConfig to host-local.
func TestRealPluginsPodCIDR(t *testing.T) {
	b := newRealBed(t, "berth-t4", 95)
	b.writeConf("10-real.conflist", fmt.Sprintf(`{"cniVersion":"1.0.0","name":"real","plugins":[
		{"type":"bridge","bridge":%q,"capabilities":{"ipRanges":true},"ipam":{"type":"host-local","dataDir":%q}}]}`, b.bridge, b.ipam))
	testutil.Eventually(t, "the new configuration", func() bool { return len(b.n.Info().Plugins) == 1 })
	pod := b.pod("p1")
	var err error
	pod.IPRanges, err = ParsePodCIDRs("fd00:96::/64,10.96.0.0/24")
	testutil.Must(t, err)
	r, err := b.n.Add(context.Background(), b.plan(), pod)
	testutil.Must(t, err)
	if got := fmt.Sprint(r.IPs); got != "[fd00:96::2 10.96.0.2]" {
		t.Errorf("addresses %s", got)
	}
	testutil.Must(t, b.n.Del(context.Background(), b.plan(), pod))
}
