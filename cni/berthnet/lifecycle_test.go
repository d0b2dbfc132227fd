package berthnet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	types040 "github.com/containernetworking/cni/pkg/types/040"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"

	"berth/cni/berthnet/addresses"
	"berth/cni/berthnet/links"
	"berth/cni/berthnet/rules"
	"berth/internal/netns"
	"berth/internal/testutil"
)

// asProgram returns a libcni that executes this test binary as the plugin, and the bed's
// configuration as a list.
func (b *bed) asProgram() (*libcni.CNIConfig, *libcni.NetworkConfigList) {
	b.t.Helper()
	bin := b.t.TempDir()
	self, err := os.Executable()
	testutil.Must(b.t, err)
	testutil.Must(b.t, os.Symlink(self, filepath.Join(bin, Type)))
	plugin := map[string]any{"capabilities": map[string]bool{"portMappings": true, "ipRanges": true}}
	for key, value := range b.conf {
		plugin[key] = value
	}
	data, err := json.Marshal(map[string]any{"cniVersion": b.conf["cniVersion"], "name": b.conf["name"], "plugins": []any{plugin}})
	testutil.Must(b.t, err)
	list, err := libcni.NetworkConfFromBytes(data)
	testutil.Must(b.t, err)
	return libcni.NewCNIConfigWithCacheDir([]string{bin}, b.t.TempDir(), &invoke.DefaultExec{RawExec: &invoke.RawExec{Stderr: os.Stderr}}), list
}

func (p *testPod) runtimeConf() *libcni.RuntimeConf {
	return &libcni.RuntimeConf{ContainerID: p.id, NetNS: p.netns, IfName: "eth0", CapabilityArgs: map[string]any{
		"portMappings": []any{map[string]any{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}}}}
}

func codeOf(err error) uint {
	if e, ok := errors.AsType[*types.Error](err); ok {
		return e.Code
	}
	return 0
}

// The program passes the conformance cases of the specification with libcni.
func TestConformance(t *testing.T) {
	for _, v := range []string{"0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"} {
		t.Run(v, func(t *testing.T) {
			ctx := context.Background()
			b := newBed(t, map[string]any{"cniVersion": v})
			lib, list := b.asProgram()
			if _, err := lib.ValidateNetworkList(ctx, list); err != nil {
				t.Fatal(err)
			}
			has := func(than string) bool { return strings.Compare(v, than) >= 0 }
			if has("1.1.0") {
				testutil.Must(t, lib.GetStatusNetworkList(ctx, list))
			}
			p := b.pod(nil)
			rt := p.runtimeConf()
			result, err := lib.AddNetworkList(ctx, list, rt)
			testutil.Must(t, err)
			if result.Version() != v {
				t.Errorf("the result is of version %s", result.Version())
			}
			if v == "0.4.0" {
				old, err := types040.GetResult(result)
				testutil.Must(t, err)
				if len(old.IPs) != 2 || old.IPs[0].Version != "4" || old.IPs[1].Version != "6" {
					t.Errorf("addresses of version 0.4.0: %v", old.IPs)
				}
			}
			if has("0.4.0") {
				testutil.Must(t, lib.CheckNetworkList(ctx, list, rt))
			}
			if _, err := lib.AddNetworkList(ctx, list, rt); err == nil || !strings.Contains(err.Error(), "already") {
				t.Errorf("a second ADD of the same attachment: %v", err)
			}
			if has("0.4.0") {
				testutil.Must(t, lib.CheckNetworkList(ctx, list, rt)) // the refused ADD changed nothing
			}
			if has("1.1.0") {
				testutil.Must(t, lib.GCNetworkList(ctx, list, &libcni.GCArgs{ValidAttachments: []types.GCAttachment{{ContainerID: p.id, IfName: "eth0"}}}))
				testutil.Must(t, lib.CheckNetworkList(ctx, list, rt))
			}
			testutil.Must(t, lib.DelNetworkList(ctx, list, rt))
			if left := b.traces(); left != "" {
				t.Errorf("DEL leaves %s", left)
			}
			for range 2 {
				testutil.Must(t, lib.DelNetworkList(ctx, list, rt))
			}
			rt.NetNS = ""
			testutil.Must(t, lib.DelNetworkList(ctx, list, rt))
		})
	}
}

func (b *bed) openPorts() []rules.HostPort {
	b.t.Helper()
	all, err := b.plugin.filter.Ports(b.key())
	testutil.Must(b.t, err)
	return all
}

func TestResult(t *testing.T) {
	b := newBed(t, map[string]any{"dns": map[string]any{"nameservers": []string{"192.0.2.53"}}, "routes": []map[string]string{{"dst": "10.0.0.0/8"}, {"dst": "::/0"}}})
	p := b.attached(nil)
	out, err := json.Marshal(p.result)
	testutil.Must(t, err)
	bridge, err := netlink.LinkByName("bn0")
	testutil.Must(t, err)
	var mac string
	testutil.Must(t, netns.In(p.netns, func() error {
		link, err := netlink.LinkByName("eth0")
		mac = link.Attrs().HardwareAddr.String()
		return err
	}))
	port, err := netlink.LinkByName(links.PortName(p.id, "eth0"))
	testutil.Must(t, err)
	want := fmt.Sprintf(`{"cniVersion":"1.1.0","dns":{"nameservers":["192.0.2.53"]},"interfaces":[{"mac":%q,"name":"bn0"},{"mac":%q,"name":%q},{"mac":%q,"name":"eth0","sandbox":%q}],`+
		`"ips":[{"address":"10.99.0.2/24","gateway":"10.99.0.1","interface":2},{"address":"fd99::2/64","gateway":"fd99::1","interface":2}],`+
		`"routes":[{"dst":"10.0.0.0/8","gw":"10.99.0.1"},{"dst":"::/0","gw":"fd99::1"}]}`,
		bridge.Attrs().HardwareAddr, port.Attrs().HardwareAddr, port.Attrs().Name, mac, p.netns)
	if string(out) != want {
		t.Errorf("the result is\n%s\nwant\n%s", out, want)
	}
	if n := len(mustAddrs(t, port)); n != 0 {
		t.Errorf("the port has %d addresses", n)
	}
}

var default4 = &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}

func mustAddrs(t *testing.T, l netlink.Link) []netlink.Addr {
	addrs, err := netlink.AddrList(l, netlink.FAMILY_ALL)
	testutil.Must(t, err)
	return addrs
}

func TestMTU(t *testing.T) {
	mtuIn := func(p *testPod) (mtu int) {
		testutil.Must(t, netns.In(p.netns, func() error {
			link, err := netlink.LinkByName("eth0")
			mtu = link.Attrs().MTU
			return err
		}))
		return mtu
	}
	if mtu := mtuIn(newBed(t, map[string]any{"mtu": 9000, "bridge": "bn1", "subnets": []string{"10.96.0.0/24"}}).attached(nil)); mtu != 9000 {
		t.Errorf("MTU %d, want 9000", mtu)
	}
	newWorld(t)
	outside, err := netlink.LinkByName("outside")
	testutil.Must(t, err)
	testutil.Must(t, netlink.LinkSetMTU(outside, 1400))
	testutil.Must(t, netlink.RouteAdd(&netlink.Route{LinkIndex: outside.Attrs().Index, Dst: default4}))
	b := newBed(t, nil)
	for _, when := range []string{"of the first pod", "when the bridge was empty once more"} {
		p := b.attached(nil)
		if mtu := mtuIn(p); mtu != 1400 {
			t.Errorf("MTU %d %s, want 1400, the MTU of the interface with the default route", mtu, when)
		}
		testutil.Must(t, p.del())
	}
}

// CHECK reports every difference from the state after ADD.
func TestCheck(t *testing.T) {
	b := newBed(t, nil)
	with := hostPorts(map[string]any{"hostPort": 8080, "containerPort": 80})
	inPod := func(p *testPod, change func(netlink.Link) error) {
		testutil.Must(t, netns.In(p.netns, func() error {
			link, err := netlink.LinkByName("eth0")
			testutil.Must(t, err)
			return change(link)
		}))
	}
	for _, c := range []struct {
		what   string
		change func(*testPod)
		want   string
	}{
		{"nothing", func(*testPod) {}, ""},
		{"the link is down", func(p *testPod) { inPod(p, netlink.LinkSetDown) }, "is down"},
		{"an address is gone", func(p *testPod) {
			inPod(p, func(l netlink.Link) error { return netlink.AddrDel(l, &mustAddrs(t, l)[0]) })
		}, "does not have the address 10.99.0."},
		{"a route is gone", func(p *testPod) {
			inPod(p, func(l netlink.Link) error {
				return netlink.RouteDel(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: default4})
			})
		}, "has no route to 0.0.0.0/0"},
		{"another hardware address", func(p *testPod) {
			inPod(p, func(l netlink.Link) error { return netlink.LinkSetHardwareAddr(l, []byte{2, 1, 1, 1, 1, 1}) })
		}, "hardware address"},
		{"the veth is gone", func(p *testPod) { testutil.Must(t, links.Cut(p.id, "eth0", true)) }, "port of container"},
		{"the port is off the bridge", func(p *testPod) {
			link, err := netlink.LinkByName(links.PortName(p.id, "eth0"))
			testutil.Must(t, err)
			testutil.Must(t, netlink.LinkSetNoMaster(link))
		}, "is not a port of bridge bn0"},
		{"a host port is closed", func(p *testPod) {
			testutil.Must(t, b.plugin.filter.ClosePorts(b.key(), b.openPorts()[:1]))
		}, "is not open"},
		{"the reservation is gone", func(p *testPod) {
			kept, _, err := addresses.Inspect(b.dir+"/test").Of(p.id, "eth0")
			testutil.Must(t, err)
			testutil.Must(t, b.plugin.filter.ClosePorts(b.key(), b.openPorts()))
			testutil.Must(t, addresses.Inspect(b.dir+"/test").Release(kept))
		}, "no address is reserved"},
		{"the rules are gone", func(*testPod) { b.removeRules() }, "rules of network test-"},
	} {
		t.Run(c.what, func(t *testing.T) {
			p := b.attached(with)
			c.change(p)
			check := map[string]any{"prevResult": p.result}
			for key, value := range with {
				check[key] = value
			}
			_, err := p.call("CHECK", p.netns, check)
			if (c.want == "") != (err == nil) || err != nil && (!strings.Contains(err.Error(), c.want) || codeOf(err) == 0) {
				t.Errorf("CHECK returns %v, want %q", err, c.want)
			}
			testutil.Must(t, p.del())
			if left := b.kept(); len(left) > 0 {
				t.Errorf("DEL leaves %v", left)
			}
		})
	}
	p := b.attached(nil)
	if _, err := p.call("CHECK", p.netns, nil); codeOf(err) != types.ErrInvalidNetworkConfig {
		t.Errorf("CHECK without prevResult: %v", err)
	}
}

// GC removes only attachments that are not valid, with or without a reservation.
func TestGC(t *testing.T) {
	b := newBed(t, nil)
	port := func(n int) map[string]any { return hostPorts(map[string]any{"hostPort": n, "containerPort": 80}) }
	valid, stale, lost := b.attached(port(8080)), b.attached(port(8081)), b.attached(port(8082))
	other := newBed(t, map[string]any{"name": "other", "dataDir": b.dir, "bridge": "bn1", "subnets": []string{"10.97.0.0/24"}})
	others := other.attached(nil)
	before := len(valid.traces())
	store := addresses.Inspect(b.dir + "/test")
	kept, ok, err := store.Of(lost.id, "eth0")
	testutil.Must(t, err)
	if !ok {
		t.Fatal("no reservation")
	}
	testutil.Must(t, store.Release(kept))
	_, err = valid.call("GC", "", map[string]any{"cni.dev/valid-attachments": []types.GCAttachment{{ContainerID: valid.id, IfName: "eth0"}}})
	testutil.Must(t, err)
	left := b.traces()
	for what, p := range map[string]*testPod{"stale": stale, "lost": lost} {
		if strings.Contains(left, links.PortName(p.id, "eth0")) || strings.Contains(left, p.id) {
			t.Errorf("%s: objects are left:\n%s", what, left)
		}
	}
	if !strings.Contains(left, links.PortName(valid.id, "eth0")) || !strings.Contains(left, "tcp port 8080") || strings.Contains(left, "8081") || strings.Contains(left, "8082") {
		t.Errorf("wrong objects are left (%d bytes of listing before GC):\n%s", before, left)
	}
	if left := other.traces(); !strings.Contains(left, links.PortName(others.id, "eth0")) {
		t.Errorf("another network's port is gone:\n%s", left)
	}
}

// Errors have the specification's codes, and failed calls leave nothing.
func TestErrorsHaveSpecifiedCodes(t *testing.T) {
	b := newBed(t, map[string]any{"subnets": []string{"10.99.0.0/30"}}) // room for one pod
	for _, c := range []struct {
		what string
		with map[string]any
		code uint
	}{
		{"version", map[string]any{"cniVersion": "0.2.0"}, types.ErrIncompatibleCNIVersion},
		{"no subnet", map[string]any{"subnets": []string{}}, types.ErrInvalidNetworkConfig},
		{"bad subnet", map[string]any{"subnets": []string{"10.0.0.0/31"}}, types.ErrInvalidNetworkConfig},
		{"type", map[string]any{"mtu": "big"}, types.ErrDecodingFailure},
		{"data directory", map[string]any{"dataDir": "/dev/null/x"}, types.ErrInternal},
		{"bridge", map[string]any{"bridge": "lo"}, types.ErrInternal},
	} {
		t.Run(c.what, func(t *testing.T) {
			p := b.pod(c.with)
			if err := p.add(); codeOf(err) != c.code {
				t.Errorf("%s: %v, want code %d", c.what, err, c.code)
			}
		})
	}
	_, err := b.pod(nil).call("BOIL", "", nil)
	if codeOf(err) != types.ErrInvalidEnvironmentVariables {
		t.Errorf("unknown verb: %v", err)
	}
	if err := func() error { p := b.pod(nil); p.netns = "/run/netns/nowhere"; return p.add() }(); codeOf(err) != types.ErrInternal {
		t.Errorf("no namespace: %v", err)
	}
	// A configuration that ADD refuses must not block DEL.
	refused := b.pod(map[string]any{"subnets": []string{"10.0.0.0/31"}, "runtimeConfig": map[string]any{
		"ipRanges": []any{[]any{map[string]any{"subnet": "none"}}}, "portMappings": []any{map[string]any{"hostPort": 80, "containerPort": 80, "protocol": "icmp"}}}})
	if err := refused.add(); err == nil {
		t.Error("ADD accepted the configuration")
	}
	testutil.Must(t, refused.del())
	if left := b.traces(); left != "" {
		t.Errorf("failed ADDs leave %s", left)
	}
	first := b.attached(hostPorts(map[string]any{"hostPort": 8080, "containerPort": 80}))
	if err := b.pod(nil).add(); codeOf(err) != types.ErrTryAgainLater {
		t.Errorf("no address is free: %v", err)
	}
	if _, err := first.call("STATUS", "", nil); err != nil { // a full node continues to run its pods
		t.Errorf("STATUS with no address free: %v", err)
	}
	wide := map[string]any{"runtimeConfig": map[string]any{"ipRanges": []any{[]any{map[string]any{"subnet": "10.98.0.0/24"}}},
		"portMappings": []any{map[string]any{"hostPort": 8080, "containerPort": 80}}}}
	before := b.traces()
	if err := b.pod(wide).add(); codeOf(err) != types.ErrTryAgainLater || !strings.Contains(err.Error(), first.ip(false)) {
		t.Errorf("a host port that is in use: %v", err)
	}
	if after := b.traces(); after != before {
		t.Errorf("failed ADD leaves\n%s, before\n%s", after, before)
	}
}

// Concurrent ADDs of the daemon and of programs get different addresses.
func TestConcurrentAddsGetDistinctAddresses(t *testing.T) {
	b := newBed(t, nil)
	lib, list := b.asProgram()
	const each = 12
	var pods []*testPod
	for range 2 * each {
		pods = append(pods, b.pod(nil))
	}
	errs := make(chan error)
	for i, p := range pods {
		go func() {
			if i < each {
				errs <- p.add()
				return
			}
			result, err := lib.AddNetworkList(context.Background(), list, &libcni.RuntimeConf{ContainerID: p.id, NetNS: p.netns, IfName: "eth0"})
			if err == nil {
				p.result, err = types100.NewResultFromResult(result)
			}
			errs <- err
		}()
	}
	for range pods {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	seen := map[string]bool{}
	for _, p := range pods {
		if p.result == nil {
			continue
		}
		for _, v6 := range []bool{false, true} {
			if ip := p.ip(v6); seen[ip] {
				t.Errorf("%s is assigned twice", ip)
			} else {
				seen[ip] = true
			}
		}
	}
	for _, p := range pods {
		go func() { errs <- p.del() }()
	}
	for range pods {
		testutil.Must(t, <-errs)
	}
	for _, p := range pods {
		testutil.Must(t, netns.Remove(p.netns)) // its devices vanish in the background
	}
	if left := b.kept(); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// DEL disconnects the pod at once. Its devices vanish with the namespace.
func TestDelDisconnectsPod(t *testing.T) {
	b := newBed(t, nil)
	server, client := b.attached(nil), b.attached(nil)
	answering(t, server.netns, "tcp", 80)
	ip := server.ip(false)
	conversation{"pod to pod", client.netns, "tcp", "80", ip, client.ip(false)}.check(t)
	testutil.Must(t, server.del())
	conversation{"pod to pod after DEL", client.netns, "tcp", "80", ip, ""}.check(t)
	conversation{"node to pod after DEL", "", "tcp", "80", ip, ""}.check(t)
	for range 5 {
		next := b.attached(nil)
		if _, err := netip.ParseAddr(next.ip(false)); err != nil || next.ip(false) == ip {
			t.Errorf("%s is assigned again at once; %v", ip, err)
		}
	}
}

// A connection that cannot be closed keeps a pod's namespace for more than a minute. Its bridge
// port is deleted earlier.
func TestPortOfLingeringNamespaceIsDeleted(t *testing.T) {
	b := newBed(t, nil)
	b.plugin.leavingTime = time.Millisecond
	pod := b.attached(nil)
	listener, err := net.Listen("tcp4", "10.99.0.1:0")
	testutil.Must(t, err)
	defer listener.Close()
	var conn net.Conn
	testutil.Must(t, netns.In(pod.netns, func() error {
		conn, err = net.Dial("tcp4", listener.Addr().String())
		return err
	}))
	peer, err := listener.Accept()
	testutil.Must(t, err)
	defer peer.Close()
	testutil.Must(t, pod.del())
	testutil.Must(t, conn.Close()) // the peer gets no FIN
	testutil.Must(t, netns.Remove(pod.netns))
	testutil.Eventually(t, "the port is gone", func() bool {
		there, err := links.HasPort(pod.id, "eth0")
		testutil.Must(t, err)
		return !there
	})
}
