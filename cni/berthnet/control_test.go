package berthnet

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"berth/cni/berthnet/links"
	"berth/internal/testutil"
)

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
