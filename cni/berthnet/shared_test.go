package berthnet

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"berth/cni/berthnet/conf"
	"berth/cni/berthnet/links"
	"berth/cni/berthnet/rules"
	"berth/internal/netns"
	"berth/internal/testutil"
)

// Tests with other users of the node: daemons with other directories, other networks, and programs
// that flush the packet filter.

// A daemon with another directory has another network. It must use another bridge, and its GC
// ignores this network.
func TestNetworksWithOtherDirectoriesAreSeparate(t *testing.T) {
	newWorld(t)
	ours := newBed(t, nil)
	port := hostPorts(map[string]any{"hostPort": 8080, "containerPort": 80})
	pod := ours.attached(port)
	answering(t, pod.netns, "tcp", 80)

	same := newBed(t, nil) // same name and bridge
	if err := same.pod(nil).add(); codeOf(err) != types.ErrInvalidNetworkConfig || !strings.Contains(err.Error(), "1 pods of network "+ours.key()) {
		t.Errorf("ADD to another's bridge: %v", err)
	}
	other := newBed(t, map[string]any{"bridge": "bn1", "subnets": []string{"10.98.0.0/24"}})
	others := other.attached(nil)
	for _, b := range []*bed{same, other} {
		_, err := b.pod(nil).call("GC", "", map[string]any{"cni.dev/valid-attachments": []any{}})
		testutil.Must(t, err)
	}
	conversation{"host port", worldNS, "tcp4", "8080", node4, world4}.check(t)
	if left := ours.traces(); !strings.Contains(left, links.PortName(pod.id, "eth0")) || strings.Contains(other.traces(), links.PortName(others.id, "eth0")) {
		t.Errorf("GC of two other networks, one with a pod, leaves\n%s\n%s", left, other.traces())
	}
	if _, err := pod.call("GC", "", nil); codeOf(err) != types.ErrInvalidNetworkConfig {
		t.Errorf("GC without valid attachments: %v", err)
	}
	conversation{"host port", worldNS, "tcp4", "8080", node4, world4}.check(t)

	testutil.Must(t, pod.del())
	testutil.Must(t, links.Cut(pod.id, "eth0", true)) // as when the namespace is removed
	next := same.attached(port)                       // takes the free bridge and deletes its former network's rules
	answering(t, next.netns, "tcp", 80)
	conversation{"host port of the new owner", worldNS, "tcp4", "8080", node4, world4}.check(t)
	networks, err := same.plugin.filter.Networks()
	testutil.Must(t, err)
	if slices.Contains(networks, ours.key()) || !slices.Contains(networks, same.key()) {
		t.Errorf("tables of networks %v", networks)
	}
}

// The network uses a bridge that the administrator created, and the bridge keeps its addresses. A
// bridge with another owner is refused.
func TestBridgeOfAdministratorIsUsed(t *testing.T) {
	b := newBed(t, nil)
	testutil.Must(t, netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "bn0"}}))
	addressed(t, "bn0", "192.0.2.129/25")
	link, err := netlink.LinkByName("bn0")
	testutil.Must(t, err)
	testutil.Must(t, netlink.LinkSetAlias(link, "foreign"))
	if err := b.pod(nil).add(); codeOf(err) != types.ErrInvalidNetworkConfig || !strings.Contains(err.Error(), "foreign") {
		t.Errorf("a bridge with an alias: %v", err)
	}
	testutil.Must(t, netlink.LinkSetAlias(link, ""))
	testutil.Must(t, b.attached(nil).del())
	if addrs := fmt.Sprint(mustAddrs(t, link)); !strings.Contains(addrs, "192.0.2.129/25") || !strings.Contains(addrs, "10.99.0.1/24") {
		t.Errorf("the bridge has %s", addrs)
	}
}

// flushRuleset deletes all rules, like a reload of nftables.service.
func flushRuleset(t *testing.T) {
	t.Helper()
	conn, err := nftables.New()
	testutil.Must(t, err)
	conn.FlushRuleset()
	testutil.Must(t, conn.Flush())
}

// ADD and STATUS restore deleted rules.
func TestFlushedRulesetIsRestored(t *testing.T) {
	newWorld(t)
	b := newBed(t, nil)
	pod := b.attached(hostPorts(map[string]any{"hostPort": 8080, "containerPort": 80}))
	gone := b.attached(hostPorts(map[string]any{"hostPort": 8081, "containerPort": 80}))
	answering(t, pod.netns, "tcp", 80)
	answering(t, worldNS, "tcp", 80)
	testutil.Must(t, gone.del())
	check := func() {
		t.Helper()
		conversation{"host port", worldNS, "tcp4", "8080", node4, world4}.check(t)
		conversation{"host port by localhost", "", "tcp4", "8080", "127.0.0.1", "10.99.0.1"}.check(t)
		conversation{"pod to the world", pod.netns, "tcp4", "80", world4, node4}.check(t)
		if ports := b.openPorts(); len(ports) != 2 {
			t.Errorf("open are %v", ports)
		}
	}
	check()
	for what, mend := range map[string]func(){
		"STATUS": func() { _, err := pod.call("STATUS", "", nil); testutil.Must(t, err) },
		"ADD":    func() { testutil.Must(t, b.attached(nil).del()) },
	} {
		flushRuleset(t)
		if ports := b.openPorts(); len(ports) != 0 {
			t.Fatalf("the rules exist before %s: %v", what, ports)
		}
		mend()
		check()
	}
}

// ownTable returns the network's table. Tests change it like other programs.
func (b *bed) ownTable() *nftables.Table {
	return &nftables.Table{Family: nftables.TableFamilyINet, Name: rules.TablePrefix + b.key()}
}

// marker returns the marker chain of the network's table.
func (b *bed) marker(conn *nftables.Conn) *nftables.Chain {
	b.t.Helper()
	all, err := conn.ListChainsOfTableFamily(nftables.TableFamilyINet)
	testutil.Must(b.t, err)
	for _, c := range all {
		if c.Table.Name == b.ownTable().Name && strings.HasPrefix(c.Name, "made-from-") {
			return c
		}
	}
	b.t.Fatal("there is no marker")
	return nil
}

// "nft flush table" deletes the rules but neither the table nor its chains. CHECK reports it, and
// STATUS and ADD restore the rules.
func TestFlushedTableIsRestored(t *testing.T) {
	newWorld(t)
	b := newBed(t, nil)
	pod := b.attached(hostPorts(map[string]any{"hostPort": 8080, "containerPort": 80}))
	answering(t, pod.netns, "tcp", 80)
	answering(t, worldNS, "tcp", 80)
	conn, err := nftables.New()
	testutil.Must(t, err)
	check := func(when string) {
		t.Helper()
		conversation{"host port " + when, worldNS, "tcp4", "8080", node4, world4}.check(t)
		conversation{"pod to the world " + when, pod.netns, "tcp4", "80", world4, node4}.check(t)
	}
	check("before")
	for what, mend := range map[string]func(){
		"STATUS": func() { testutil.Must(t, b.status(nil)) },
		"ADD":    func() { testutil.Must(t, b.attached(nil).del()) },
	} {
		conn.FlushTable(b.ownTable())
		testutil.Must(t, conn.Flush())
		with := map[string]any{"prevResult": pod.result, "runtimeConfig": pod.with["runtimeConfig"]}
		if _, err := pod.call("CHECK", pod.netns, with); err == nil || !strings.Contains(err.Error(), "rules of network test-") {
			t.Errorf("CHECK before %s: %v", what, err)
		}
		mend()
		check("after " + what)
		if _, err := pod.call("CHECK", pod.netns, with); err != nil {
			t.Errorf("CHECK after %s: %v", what, err)
		}
	}
}

// A table of an earlier version, whose marker has no rule, is rewritten once, without closing host
// ports. A chain that only the earlier version had is deleted.
func TestMarkerWithoutRule(t *testing.T) {
	b := newBed(t, nil)
	b.attached(hostPorts(map[string]any{"hostPort": 8080, "containerPort": 80}))
	n, err := conf.Parse(b.stdin(nil))
	testutil.Must(t, err)
	restore := func() bool {
		t.Helper()
		written, err := b.plugin.of(n).restore(t.Context())
		testutil.Must(t, err)
		return written
	}
	others := &rules.Filter{}
	defer func() { testutil.Must(t, others.Close()) }()
	conn, err := nftables.New()
	testutil.Must(t, err)
	for range 10 {
		conn.FlushChain(b.marker(conn))
		isolation := conn.AddChain(&nftables.Chain{Table: b.ownTable(), Name: "forward", Type: nftables.ChainTypeFilter,
			Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter})
		conn.AddRule(&nftables.Rule{Table: isolation.Table, Chain: isolation, Exprs: []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}}})
		testutil.Must(t, conn.Flush())
		done, fewest := make(chan struct{}), make(chan int)
		go func() {
			least := 2
			for {
				open, err := others.Ports(b.key())
				if err != nil {
					t.Error(err)
				}
				least = min(least, len(open))
				select {
				case <-done:
					fewest <- least
					return
				default:
				}
			}
		}()
		written := restore()
		close(done)
		if least := <-fewest; !written || least != 2 {
			t.Errorf("the table is rewritten: %v; %d host ports were open", written, least)
		}
		if restore() {
			t.Error("the table is rewritten twice")
		}
		if _, err := conn.ListChain(isolation.Table, isolation.Name); err == nil || !strings.Contains(err.Error(), unix.ENOENT.Error()) {
			t.Errorf("reading the chain of the earlier version: %v", err)
		}
	}
}

// A flush while the rules are being written must not close host ports permanently.
func TestFlushWhileInstalling(t *testing.T) {
	b := newBed(t, nil)
	pod := b.attached(hostPorts(map[string]any{"hostPort": 8080, "containerPort": 80}))
	kept, ok, err := b.store().Of(pod.id, "eth0")
	testutil.Must(t, err)
	if !ok {
		t.Fatal("nothing is reserved")
	}
	note, err := b.store().Noted(kept)
	testutil.Must(t, err)
	pods := []rules.Pod{{ID: pod.id}}
	testutil.Must(t, json.Unmarshal(note, &pods[0].Ports))
	bridge, err := links.FindBridge("bn0")
	testutil.Must(t, err)
	network := b.unattached(t, pod).rules(bridge)
	others := &rules.Filter{}
	defer func() { testutil.Must(t, others.Close()) }()
	for i := range 120 {
		network.Masquerade = !network.Masquerade // forces a change of the existing table
		installed := make(chan error, 1)
		go func() { installed <- b.plugin.filter.Install(network, pods) }()
		for range i % 12 { // delays the flush a little more each time
			_, err := others.Networks()
			testutil.Must(t, err)
		}
		flushRuleset(t)
		testutil.Must(t, <-installed)
		there, err := b.plugin.filter.Installed(network)
		testutil.Must(t, err)
		if open := b.openPorts(); there && len(open) != 2 {
			t.Fatalf("in round %d open are %v", i, open)
		}
		if !there {
			testutil.Must(t, b.plugin.filter.Install(network, pods))
		}
	}
}

func TestKernelSettingsOfBridge(t *testing.T) {
	b := newBed(t, nil)
	pod := b.attached(nil)
	files := map[string]string{"/proc/sys/net/ipv4/ip_forward": "0", "/proc/sys/net/ipv6/conf/all/forwarding": "0", "/proc/sys/net/ipv4/conf/bn0/route_localnet": "0"}
	for file, value := range files {
		testutil.Must(t, os.WriteFile(file, []byte(value), 0))
	}
	_, err := pod.call("STATUS", "", nil)
	testutil.Must(t, err)
	for file := range files {
		if value, err := os.ReadFile(file); err != nil || string(value) != "1\n" {
			t.Errorf("%s is %q; %v", file, value, err)
		}
	}
}

// IPv6 that the administrator has disabled stays disabled.
func TestDisabledIPv6StaysDisabled(t *testing.T) {
	const file = "/proc/sys/net/ipv6/conf/all/disable_ipv6"
	testutil.Must(t, os.WriteFile(file, []byte("1"), 0))
	defer func() { testutil.Must(t, os.WriteFile(file, []byte("0"), 0)) }()
	if err := newBed(t, nil).pod(nil).add(); err == nil || !strings.Contains(err.Error(), "disable_ipv6") {
		t.Errorf("ADD: %v", err)
	}
	newBed(t, map[string]any{"subnets": []string{subnet4}}).attached(nil)
	if value, err := os.ReadFile("/proc/sys/net/ipv6/conf/bn0/disable_ipv6"); err != nil || string(value) != "1\n" {
		t.Errorf("the bridge has disable_ipv6 %q; %v", value, err)
	}
}

// A subnet that the node reaches through another interface is refused, and nothing is created.
func TestOverlappingSubnetIsRefused(t *testing.T) {
	newWorld(t)
	outside, err := netlink.LinkByName("outside")
	testutil.Must(t, err)
	route := func(dst string) {
		_, n, err := net.ParseCIDR(dst)
		testutil.Must(t, err)
		testutil.Must(t, netlink.RouteAdd(&netlink.Route{LinkIndex: outside.Attrs().Index, Dst: n}))
	}
	route("10.64.0.0/10") // a wider route is no obstacle
	route("10.99.0.128/25")
	for subnet, want := range map[string]string{subnet4: "route to 10.99.0.128/25", "192.0.0.0/8": "192.0.2.1/24", "2001:db8::/48": "2001:db8::1/64"} {
		b := newBed(t, map[string]any{"subnets": []string{subnet}})
		if err := b.pod(nil).add(); codeOf(err) != types.ErrInvalidNetworkConfig || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", subnet, err, want)
		}
		if _, err := netlink.LinkByName("bn0"); err == nil {
			t.Errorf("%s: there is a bridge", subnet)
		}
	}
	newBed(t, map[string]any{"subnets": []string{"10.99.1.0/24"}}).attached(nil)
}

// After a change of the node's pod CIDR the bridge has exactly the gateways of its pods.
func TestBridgeHasOnlyGatewaysOfItsPods(t *testing.T) {
	b := newBed(t, nil)
	old := b.attached(nil)
	cidr := func(subnet string) map[string]any {
		return map[string]any{"runtimeConfig": map[string]any{"ipRanges": []any{[]any{map[string]any{"subnet": subnet}}}}}
	}
	gateways := func(when string, want ...string) {
		t.Helper()
		bridge, err := links.FindBridge("bn0")
		testutil.Must(t, err)
		var have []string
		for _, p := range bridge.Prefixes {
			have = append(have, p.String())
		}
		if !slices.Equal(have, want) {
			t.Errorf("%s the bridge has %v, want %v", when, have, want)
		}
	}
	first := b.attached(cidr("10.98.0.0/24"))
	gateways("with an old pod", "10.98.0.1/24", "10.99.0.1/24", "fd99::1/64")
	answering(t, old.netns, "tcp", 80)
	conversation{"new pod to old pod", first.netns, "tcp4", "80", old.ip(false), first.ip(false)}.check(t)
	testutil.Must(t, old.del())
	b.attached(cidr("10.98.0.0/24"))
	gateways("without", "10.98.0.1/24")
	if routes, err := netlink.RouteGet(net.ParseIP("10.99.0.9")); err == nil && routes[0].LinkIndex != 0 {
		link, err := netlink.LinkByIndex(routes[0].LinkIndex)
		if err == nil && link.Attrs().Name == "bn0" {
			t.Error("there is still a route to the old subnet")
		}
	}
}

// A pod may have the maximal number of host ports, and all of them are restored after a flush.
func TestManyHostPortsAreRestored(t *testing.T) {
	const many = 4096
	b := newBed(t, nil)
	var ports []map[string]any
	for i := range many {
		ports = append(ports, map[string]any{"hostPort": 20000 + i, "containerPort": 80 + i%100, "protocol": []string{"tcp", "udp"}[i%2]})
	}
	pod := b.attached(hostPorts(ports...))
	if n := len(b.openPorts()); n != 2*many {
		t.Errorf("%d are open", n)
	}
	answering(t, pod.netns, "tcp", 80)
	conversation{"a host port", "", "tcp4", "20000", "127.0.0.1", "10.99.0.1"}.check(t)
	flushRuleset(t)
	_, err := pod.call("STATUS", "", nil)
	testutil.Must(t, err)
	if n := len(b.openPorts()); n != 2*many {
		t.Errorf("%d are open after a flush", n)
	}
	testutil.Must(t, pod.del())
	if left := b.kept(); len(left) > 0 {
		t.Errorf("%d objects are left", len(left))
	}
}

// Redirections by other programs, such as kube-proxy's node ports, keep clients' addresses.
func TestOthersRedirections(t *testing.T) {
	newWorld(t)
	b := newBed(t, nil)
	pod := b.attached(hostPorts(map[string]any{"hostPort": 8080, "containerPort": 80}))
	answering(t, pod.netns, "tcp", 80)
	redirect(t, 30080, pod.ip(false), 80)
	defer flushRuleset(t)
	conversation{"world to node port", worldNS, "tcp4", "30080", node4, world4}.check(t)
	conversation{"world to host port", worldNS, "tcp4", "8080", node4, world4}.check(t)
}

// redirect adds another program's rule that redirects a port of the node.
func redirect(t *testing.T, port uint16, ip string, to uint16) {
	t.Helper()
	conn, err := nftables.New()
	testutil.Must(t, err)
	table := conn.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: "others"})
	chain := conn.AddChain(&nftables.Chain{Table: table, Name: "pre", Type: nftables.ChainTypeNAT, Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityNATDest})
	be := func(n uint16) []byte { return []byte{byte(n >> 8), byte(n)} }
	conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{6}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: be(port)},
		&expr.Immediate{Register: 1, Data: netip.MustParseAddr(ip).AsSlice()}, &expr.Immediate{Register: 2, Data: be(to)},
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: 2, RegAddrMin: 1, RegProtoMin: 2},
	}})
	testutil.Must(t, conn.Flush())
}

// Flows of other programs by the same port as a host port continue.
func TestOthersFlowsAreKept(t *testing.T) {
	newWorld(t)
	b := newBed(t, nil)
	client := b.attached(nil)
	answering(t, worldNS, "udp", 53)
	var conn net.Conn
	testutil.Must(t, netns.In(client.netns, func() (err error) { // like a resolver's, through masquerading
		conn, err = net.DialUDP("udp4", nil, &net.UDPAddr{IP: net.ParseIP(world4), Port: 53})
		return err
	}))
	defer conn.Close()
	exchange := func() (string, error) {
		testutil.Must(t, conn.SetDeadline(time.Now().Add(patience)))
		if _, err := io.WriteString(conn, "?"); err != nil {
			return "", err
		}
		buffer := make([]byte, 64)
		n, err := conn.Read(buffer)
		return string(buffer[:n]), err
	}
	if seen, err := exchange(); seen != node4 {
		t.Fatalf("seen as %q; %v", seen, err)
	}
	before := flowsTo(t, 53)
	pod := b.attached(hostPorts(map[string]any{"hostPort": 53, "containerPort": 53, "protocol": "udp"}))
	testutil.Must(t, pod.del())
	if after := flowsTo(t, 53); len(before) != 1 || !slices.Equal(before, after) {
		t.Errorf("conversations before: %v, after: %v", before, after)
	}
}

// flowsTo returns the IPv4 flows to a UDP port.
func flowsTo(t *testing.T, port uint16) (all []string) {
	t.Helper()
	found, err := netlink.ConntrackTableList(netlink.ConntrackTable, netlink.FAMILY_V4)
	testutil.Must(t, err)
	for _, f := range found {
		if f.Forward.Protocol == 17 && f.Forward.DstPort == port {
			all = append(all, fmt.Sprint(f.Forward.SrcIP, f.Forward.SrcPort, f.Forward.DstIP, f.Reverse.DstIP, f.Reverse.DstPort))
		}
	}
	return all
}

// After DEL the pod receives nothing, even if it sets its device down and up.
func TestCutPortStaysDisabled(t *testing.T) {
	b := newBed(t, nil)
	server, client := b.attached(nil), b.attached(nil)
	answering(t, server.netns, "tcp", 80)
	answering(t, client.netns, "tcp", 80)
	testutil.Must(t, server.del())
	testutil.Must(t, netns.In(server.netns, func() error {
		link, err := netlink.LinkByName("eth0")
		testutil.Must(t, err)
		testutil.Must(t, netlink.LinkSetDown(link))
		testutil.Must(t, netlink.LinkSetUp(link))
		for _, r := range server.result.Routes {
			dst := types100.IPConfig{Address: r.Dst}.Address
			_ = netlink.RouteReplace(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: &dst, Gw: r.GW}) // the route vanished with the device
		}
		return nil
	}))
	conversation{"pod that was cut off to pod", server.netns, "tcp4", "80", client.ip(false), ""}.check(t)
	conversation{"pod to pod that was cut off", client.netns, "tcp4", "80", server.ip(false), ""}.check(t)
}

// With Passive STATUS changes nothing.
func TestPassiveStatusChangesNothing(t *testing.T) {
	b := newBed(t, nil)
	pod := b.attached(nil)
	flushRuleset(t)
	b.plugin.Passive = true
	_, err := pod.call("STATUS", "", nil)
	testutil.Must(t, err)
	if networks, err := b.plugin.filter.Networks(); err != nil || len(networks) != 0 {
		t.Errorf("tables of %v; %v", networks, err)
	}
}
