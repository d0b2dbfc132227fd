package berthnet

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"berth/internal/netns"
	"berth/internal/testutil"
)

const (
	worldNS = "/run/netns/world"
	node4   = "192.0.2.1"
	node6   = "2001:db8::1"
	other4  = "192.0.2.9" // the node's, too
	world4  = "192.0.2.2"
	world6  = "2001:db8::2"
)

// newWorld creates a network namespace outside of the node, as its neighbour, without routes to
// pods.
func newWorld(t testing.TB) {
	t.Helper()
	testutil.Must(t, netns.New(worldNS))
	t.Cleanup(func() { testutil.Must(t, netns.Remove(worldNS)) })
	testutil.Must(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "outside"}, PeerName: "node"}))
	t.Cleanup(func() {
		link, err := netlink.LinkByName("outside")
		testutil.Must(t, err)
		testutil.Must(t, netlink.LinkDel(link))
	})
	node, err := netlink.LinkByName("node")
	testutil.Must(t, err)
	ns := openFD(t, worldNS)
	testutil.Must(t, netlink.LinkSetNsFd(node, ns))
	testutil.Must(t, unix.Close(ns))
	addressed(t, "outside", node4+"/24", other4+"/24", node6+"/64")
	testutil.Must(t, netns.In(worldNS, func() error { addressed(t, "node", world4+"/24", world6+"/64"); return nil }))
}

func openFD(t testing.TB, path string) int {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	testutil.Must(t, err)
	return fd
}

func addressed(t testing.TB, name string, addrs ...string) {
	link, err := netlink.LinkByName(name)
	testutil.Must(t, err)
	for _, text := range addrs {
		addr, err := netlink.ParseAddr(text)
		testutil.Must(t, err)
		addr.Flags = unix.IFA_F_NODAD
		testutil.Must(t, netlink.AddrAdd(link, addr))
	}
	testutil.Must(t, netlink.LinkSetUp(link))
}

// answering runs a server in the namespace at path until the test ends. It answers with the
// client's address.
func answering(t testing.TB, path, network string, port int) {
	t.Helper()
	testutil.Must(t, netns.In(path, func() error {
		address := fmt.Sprintf(":%d", port)
		if strings.HasPrefix(network, "udp") {
			conn, err := net.ListenPacket(network, address)
			if err != nil {
				return err
			}
			t.Cleanup(func() { conn.Close() })
			go func() {
				buffer := make([]byte, 64)
				for {
					_, from, err := conn.ReadFrom(buffer)
					if err != nil {
						return
					}
					_, _ = conn.WriteTo([]byte(host(from)), from) // a client whose answer is lost asks again
				}
			}()
			return nil
		}
		l, err := net.Listen(network, address)
		if err != nil {
			return err
		}
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				_, _ = io.WriteString(conn, host(conn.RemoteAddr()))
				conn.Close()
			}
		}()
		return nil
	}))
}

func host(a net.Addr) string {
	ap, err := netip.ParseAddrPort(a.String())
	if err != nil {
		return err.Error()
	}
	return ap.Addr().Unmap().String()
}

// ask sends a request to a server from the namespace at path, "" for the node's, and returns the
// client's address as seen by the server.
func ask(path, network, address string, patience time.Duration) (seen string, err error) {
	run := func() error {
		conn, err := net.DialTimeout(network, address, patience)
		if err != nil {
			return err
		}
		defer conn.Close()
		if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
			return err
		}
		if strings.HasPrefix(network, "udp") {
			if _, err := io.WriteString(conn, "?"); err != nil {
				return err
			}
		}
		buffer := make([]byte, 64)
		n, err := conn.Read(buffer)
		seen = string(buffer[:n])
		return err
	}
	if path == "" {
		return seen, run()
	}
	return seen, netns.In(path, run)
}

const (
	patience = time.Minute            // twice the longest pause between two attempts to write rules
	dropped  = 300 * time.Millisecond // a dropped packet gets no answer
)

// conversation is a request with its expected result.
type conversation struct {
	what          string
	from          string // namespace
	network, port string
	to            string // address
	seen          string // client address that the server sees; "": no answer
}

func (c conversation) check(t *testing.T) {
	t.Helper()
	limit := patience
	if c.seen == "" {
		limit = dropped
	}
	seen, err := ask(c.from, c.network, net.JoinHostPort(c.to, c.port), limit)
	switch {
	case c.seen == "" && err == nil:
		t.Errorf("%s (%s to %s port %s): answered, seen as %s", c.what, c.network, c.to, c.port, seen)
	case c.seen != "" && (err != nil || seen != c.seen):
		t.Errorf("%s (%s to %s port %s): seen as %q, want %s; %v", c.what, c.network, c.to, c.port, seen, c.seen, err)
	}
}

// Each packet arrives, or does not, as expected and with the expected source.
func TestTraffic(t *testing.T) {
	newWorld(t)
	b := newBed(t, nil)
	server := b.attached(hostPorts(
		map[string]any{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"},
		map[string]any{"hostPort": 8081, "containerPort": 81, "protocol": "UDP"},
		map[string]any{"hostPort": 8082, "containerPort": 80, "protocol": "tcp", "hostIP": node4},
		map[string]any{"hostPort": 8082, "containerPort": 80, "protocol": "tcp", "hostIP": node6},
		map[string]any{"hostPort": 8083, "containerPort": 80, "protocol": "tcp", "hostIP": "127.0.0.1"},
		map[string]any{"hostPort": 8084, "containerPort": 80, "hostIP": "0.0.0.0"},
	))
	client := b.attached(nil)
	for _, where := range []string{server.netns, worldNS} {
		answering(t, where, "tcp", 80)
		answering(t, where, "udp", 81)
	}
	for _, v := range []struct {
		n                    string
		v6                   bool
		node, world, gateway string
	}{{"4", false, node4, world4, "10.99.0.1"}, {"6", true, node6, world6, "fd99::1"}} {
		pod, self := server.ip(v.v6), client.ip(v.v6)
		tcp, udp := "tcp"+v.n, "udp"+v.n
		for _, c := range []conversation{
			{"pod to pod", client.netns, tcp, "80", pod, self},
			{"pod to pod", client.netns, udp, "81", pod, self},
			{"pod to itself", server.netns, tcp, "80", pod, pod},
			{"pod to the world", client.netns, tcp, "80", v.world, v.node},
			{"pod to the world", client.netns, udp, "81", v.world, v.node},
			{"node to pod", "", tcp, "80", pod, v.gateway},
			{"world to host port", worldNS, tcp, "8080", v.node, v.world},
			{"world to host port", worldNS, udp, "8081", v.node, v.world},
			{"node to host port by its own address", "", tcp, "8080", v.node, v.node},
			{"pod to its own host port", server.netns, tcp, "8080", v.node, v.gateway},
			{"pod to its own host port", server.netns, udp, "8081", v.node, v.gateway},
			{"pod to another's host port", client.netns, tcp, "8080", v.node, v.gateway},
			{"pod to another's host port by the bridge", client.netns, tcp, "8080", v.gateway, v.gateway},
			{"world to host port of one address", worldNS, tcp, "8082", v.node, v.world},
			{"node to host port of one address", "", tcp, "8082", v.gateway, ""},
			{"world to host port of loopback", worldNS, tcp, "8083", v.node, ""},
		} {
			c.check(t)
		}
	}
	if _, err := ask("", "tcp6", "[::1]:8080", patience); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("::1, which cannot be redirected, does not refuse: %v", err)
	}
	for _, c := range []conversation{
		{"node to host port by localhost", "", "tcp4", "8080", "127.0.0.1", "10.99.0.1"},
		{"node to host port by localhost", "", "udp4", "8081", "127.0.0.1", "10.99.0.1"},
		{"world to host port of another address", worldNS, "tcp4", "8082", other4, ""},
		{"node to host port of loopback", "", "tcp4", "8083", "127.0.0.1", "10.99.0.1"},
		{"world to host port of all addresses", worldNS, "tcp4", "8084", other4, world4},
		{"world to host port of all addresses of IPv4", worldNS, "tcp6", "8084", node6, ""},
	} {
		c.check(t)
	}
}

// Packets from pods to the node's loopback addresses are dropped. Answers of pods to them pass
// (CVE-2020-8558).
func TestLoopbackIsGuarded(t *testing.T) {
	b := newBed(t, nil)
	pod := b.attached(nil)
	l, err := net.Listen("tcp4", "127.0.0.1:7000")
	testutil.Must(t, err)
	defer l.Close()
	testutil.Must(t, netns.In(pod.netns, func() error {
		lo, err := netlink.LinkByName("lo")
		testutil.Must(t, err)
		testutil.Must(t, netlink.LinkSetDown(lo)) // otherwise the pod's own loopback gets the packet
		link, err := netlink.LinkByName("eth0")
		testutil.Must(t, err)
		_, loopback, err := net.ParseCIDR("127.0.0.0/8")
		testutil.Must(t, err)
		return netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: loopback, Gw: net.ParseIP("10.99.0.1")})
	}))
	conversation{"pod to the node's loopback", pod.netns, "tcp4", "7000", "127.0.0.1", ""}.check(t)
}

// Without masquerading, other machines see the pods' own addresses and reach them.
func TestWithoutMasquerading(t *testing.T) {
	newWorld(t)
	b := newBed(t, map[string]any{"masquerade": false})
	server, client := b.attached(hostPorts(map[string]any{"hostPort": 8080, "containerPort": 80})), b.attached(nil)
	answering(t, server.netns, "tcp", 80)
	answering(t, worldNS, "tcp", 80)
	answering(t, "/proc/self/ns/net", "tcp", 7001)
	for _, v6 := range []bool{false, true} {
		gateway, node, world, subnet := "10.99.0.1", node4, world4, subnet4
		if v6 {
			gateway, node, world, subnet = "fd99::1", node6, world6, subnet6
		}
		routeTo(t, subnet, node)
		pod, self := server.ip(v6), client.ip(v6)
		for _, c := range []conversation{
			{"pod to pod", client.netns, "tcp", "80", pod, self},
			{"pod to world", client.netns, "tcp", "80", world, self},
			{"world to pod", worldNS, "tcp", "80", pod, world},
			{"world to host port", worldNS, "tcp", "8080", node, world},
			{"pod to node", client.netns, "tcp", "7001", gateway, self},
			{"node to pod", "", "tcp", "80", pod, gateway},
			{"pod to host port", client.netns, "tcp", "8080", node, gateway},
		} {
			c.check(t)
		}
	}
}

// Host ports of all addresses leave the Services of kube-proxy alone. In IPVS mode their addresses
// are the node's, on a dummy device. The kernel of the tests may lack this kind of device.
func TestHostPortsSpareServices(t *testing.T) {
	newWorld(t)
	proxy := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "kube-ipvs0"}, PeerName: "carrier"}
	testutil.Must(t, netlink.LinkAdd(proxy))
	t.Cleanup(func() { testutil.Must(t, netlink.LinkDel(proxy)) })
	addressed(t, "carrier") // IPv6 addresses need it
	addressed(t, "kube-ipvs0", "10.96.0.1/32", "fd96::1/128")
	b := newBed(t, nil)
	server := b.attached(hostPorts(map[string]any{"hostPort": 443, "containerPort": 443},
		map[string]any{"hostPort": 444, "containerPort": 443, "hostIP": "10.96.0.1"}))
	answering(t, server.netns, "tcp", 443)
	client := b.attached(nil)
	expect := func(what, service, address string) {
		t.Helper()
		gateway, world := "10.99.0.1", world4
		if address == node6 {
			gateway, world = "fd99::1", world6
		}
		for _, c := range []conversation{
			{what + ": node to its own address", "", "tcp", "443", address, address},
			{what + ": pod to the node", client.netns, "tcp", "443", address, gateway},
			{what + ": world to the node", worldNS, "tcp", "443", address, world},
			{what + ": node to Service", "", "tcp", "443", service, ""},
			{what + ": pod to Service", client.netns, "tcp", "443", service, ""},
		} {
			c.check(t)
		}
	}
	expect("before the pod", "10.96.0.1", node4)
	expect("before the pod", "fd96::1", node6)
	conversation{"host port of the Service's address", client.netns, "tcp", "444", "10.96.0.1", "10.99.0.1"}.check(t)

	const moving = "192.0.2.10"
	addressed(t, "kube-ipvs0", moving+"/32")
	testutil.Must(t, b.status(nil))
	expect("after the pod", moving, node4)
	flushRuleset(t)
	testutil.Must(t, b.status(nil))
	expect("after a flush", moving, node4)

	addr, err := netlink.ParseAddr(moving + "/32")
	testutil.Must(t, err)
	testutil.Must(t, netlink.AddrDel(proxy, addr))
	addressed(t, "outside", moving+"/32")
	testutil.Must(t, b.status(nil))
	expect("moved to the node", "10.96.0.1", moving)
}

// routeTo adds a route to pods through the node.
func routeTo(t *testing.T, subnet, gateway string) {
	testutil.Must(t, netns.In(worldNS, func() error {
		_, dst, err := net.ParseCIDR(subnet)
		testutil.Must(t, err)
		return netlink.RouteReplace(&netlink.Route{Dst: dst, Gw: net.ParseIP(gateway)})
	}))
}

// A client that keeps sending to a UDP host port from one source reaches the present owner of the
// port.
func TestFlowsOfClosedPortsAreDeleted(t *testing.T) {
	newWorld(t)
	b := newBed(t, nil)
	port := hostPorts(map[string]any{"hostPort": 8081, "containerPort": 81, "protocol": "udp"})
	var conn net.Conn
	testutil.Must(t, netns.In(worldNS, func() (err error) {
		conn, err = net.DialUDP("udp4", nil, &net.UDPAddr{IP: net.ParseIP(node4), Port: 8081})
		return err
	}))
	defer conn.Close()
	exchange := func(limit time.Duration) error {
		testutil.Must(t, conn.SetDeadline(time.Now().Add(limit)))
		if _, err := conn.Write([]byte("?")); err != nil {
			return err
		}
		_, err := conn.Read(make([]byte, 64))
		return err
	}
	if exchange(dropped) == nil {
		t.Error("answered before there is a pod")
	}
	for range 2 {
		pod := b.pod(port)
		testutil.Must(t, pod.add())
		answering(t, pod.netns, "udp", 81)
		_ = exchange(dropped) // drains the errors of the earlier datagram
		if err := exchange(patience); err != nil {
			t.Errorf("the pod is not reached: %v", err)
		}
		testutil.Must(t, pod.del())
	}
}
