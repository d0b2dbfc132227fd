package berthnet

import (
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"berth/cni/berthnet/links"
	"berth/internal/netns"
	"berth/internal/testutil"
)

// poses assigns another pod's address to a pod, and reports whether a datagram from that address
// arrives.
func poses(t *testing.T, pod, other, server *testPod, v6, expected bool) (arrives bool) {
	t.Helper()
	testutil.Must(t, netns.In(pod.netns, func() error {
		link, err := netlink.LinkByName("eth0")
		testutil.Must(t, err)
		bits := "/24"
		if v6 {
			bits = "/64"
		}
		addr, err := netlink.ParseAddr(other.ip(v6) + bits)
		testutil.Must(t, err)
		addr.Flags = unix.IFA_F_NODAD
		return netlink.AddrReplace(link, addr)
	}))
	return hears(t, pod, server, net.ParseIP(other.ip(v6)), v6, expected)
}

// hears reports whether a server receives a datagram from a source. It waits longer for an expected
// one.
func hears(t *testing.T, pod, server *testPod, source net.IP, v6, expected bool) bool {
	t.Helper()
	limit := dropped
	if expected {
		limit = patience
	}
	var listener net.PacketConn
	testutil.Must(t, netns.In(server.netns, func() (err error) {
		listener, err = net.ListenPacket("udp", ":99")
		return err
	}))
	defer listener.Close()
	testutil.Must(t, listener.SetReadDeadline(time.Now().Add(limit)))
	testutil.Must(t, netns.In(pod.netns, func() error {
		conn, err := net.DialUDP("udp", &net.UDPAddr{IP: source}, &net.UDPAddr{IP: net.ParseIP(server.ip(v6)), Port: 99})
		if err != nil {
			return err
		}
		defer conn.Close()
		_, err = io.WriteString(conn, "?")
		return err
	}))
	_, _, err := listener.ReadFrom(make([]byte, 1))
	return err == nil
}

// A pod cannot impersonate another one by IP or hardware address, and cannot reach the node's
// loopback without packet filter rules.
func TestSourceIsChecked(t *testing.T) {
	for _, checked := range []bool{true, false} {
		t.Run(fmt.Sprint(checked), func(t *testing.T) {
			b := newBed(t, map[string]any{"checkSource": checked})
			pod, other, server := b.attached(nil), b.attached(nil), b.attached(nil)
			for _, v6 := range []bool{false, true} {
				if !hears(t, pod, server, net.ParseIP(pod.ip(v6)), v6, true) {
					t.Errorf("a pod is not heard, IPv6 %v", v6)
				}
				if arrives := poses(t, pod, other, server, v6, !checked); arrives == checked {
					t.Errorf("a pod is heard as another one: %v, IPv6 %v", arrives, v6)
				}
			}
			testutil.Must(t, netns.In(other.netns, func() error {
				link, err := netlink.LinkByName("eth0")
				testutil.Must(t, err)
				return netlink.LinkSetHardwareAddr(link, net.HardwareAddr{2, 0, 0, 0, 0, 9})
			}))
			if arrives := hears(t, other, server, net.ParseIP(other.ip(false)), false, !checked); arrives == checked {
				t.Errorf("a pod is heard with another hardware address: %v", arrives)
			}
		})
	}
}

// Like TestLoopbackIsGuarded, without the packet filter's rules.
func TestLoopbackIsGuardedWithoutRules(t *testing.T) {
	b := newBed(t, nil)
	pod := b.attached(nil)
	flushRuleset(t)
	reachLoopback(t, pod)
}

// The limits are at devices on the node that the pod cannot change, and vanish with the pod.
func TestBandwidthIsLimitedOnNode(t *testing.T) {
	newWorld(t)
	b := newBed(t, nil)
	with := map[string]any{"runtimeConfig": map[string]any{"bandwidth": map[string]any{
		"ingressRate": 8_000_000, "ingressBurst": 4294967295, "egressRate": 80_000_000_000, "egressBurst": 800_000}}}
	pod, server := b.attached(with), b.attached(nil)
	answering(t, pod.netns, "tcp", 80)
	answering(t, server.netns, "tcp", 80)
	conversation{"to the pod", server.netns, "tcp4", "80", pod.ip(false), server.ip(false)}.check(t)
	conversation{"from the pod", pod.netns, "tcp4", "80", server.ip(false), pod.ip(false)}.check(t)
	for device, want := range map[string]string{
		links.PortName(pod.id, "eth0"):      "rate 1000000, limit 131072",
		links.ShaperName(pod.id, "eth0"):    "rate 10000000000, limit 250000000",
		links.PortName(server.id, "eth0"):   "",
		links.ShaperName(server.id, "eth0"): "no device",
	} {
		if got := limitOf(t, device); got != want {
			t.Errorf("%s has %q, want %q", device, got, want)
		}
	}
	shaper, err := netlink.LinkByName(links.ShaperName(pod.id, "eth0"))
	testutil.Must(t, err)
	if n := shaper.Attrs().Statistics.TxPackets; n == 0 {
		t.Error("traffic from the pod bypasses its limit")
	}
	if pod.result == nil || !strings.Contains(b.traces(), links.PortName(pod.id, "eth0")) {
		t.Errorf("traces are %s", b.traces())
	}
	testutil.Must(t, pod.del())
	if got := limitOf(t, links.ShaperName(pod.id, "eth0")); got != "no device" {
		t.Errorf("DEL leaves %s", got)
	}

	lost := b.attached(with) // only the reservation and the port remain
	kept, _, err := b.store().Of(lost.id, "eth0")
	testutil.Must(t, err)
	testutil.Must(t, b.store().Release(kept))
	port, err := netlink.LinkByName(links.PortName(lost.id, "eth0"))
	testutil.Must(t, err)
	testutil.Must(t, netlink.LinkDel(port))
	_, err = lost.call("GC", "", map[string]any{"cni.dev/valid-attachments": []any{}})
	testutil.Must(t, err)
	if got := limitOf(t, links.ShaperName(lost.id, "eth0")); got != "no device" {
		t.Errorf("GC leaves %s", got)
	}
}

// limitOf returns the limit of a device's traffic.
func limitOf(t *testing.T, device string) string {
	t.Helper()
	link, err := netlink.LinkByName(device)
	if err != nil {
		return "no device"
	}
	all, err := netlink.QdiscList(link)
	testutil.Must(t, err)
	at := slices.IndexFunc(all, func(q netlink.Qdisc) bool { return q.Type() == "tbf" })
	if at < 0 {
		return ""
	}
	tbf := all[at].(*netlink.Tbf)
	return fmt.Sprintf("rate %d, limit %d", tbf.Rate, tbf.Limit)
}

// After ADD the bridge forwards the pod's packets.
func TestPortForwardsAfterAdd(t *testing.T) {
	newWorld(t)
	b := newBed(t, nil)
	for range 20 {
		pod := b.attached(nil)
		port, err := netlink.LinkByName(links.PortName(pod.id, "eth0"))
		testutil.Must(t, err)
		if state := port.Attrs().OperState; state != netlink.OperUp {
			t.Errorf("the port of pod %s is %v", pod.id, state)
		}
	}
}
