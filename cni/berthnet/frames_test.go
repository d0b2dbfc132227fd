package berthnet

import (
	"encoding/binary"
	"fmt"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"berth/internal/netns"
	"berth/internal/testutil"
)

// Receivers remove VLAN tags with VID 0. The kernel removes the first of two before the check of
// source addresses, so the check must handle the second.
func TestSourceIsCheckedInTaggedFrames(t *testing.T) {
	for _, checked := range []bool{true, false} {
		for tags := range 3 {
			t.Run(fmt.Sprintf("%v, %d tags", checked, tags), func(t *testing.T) {
				b := newBed(t, map[string]any{"checkSource": checked})
				pod, other, server := b.attached(nil), b.attached(nil), b.attached(nil)
				listener := listens(t, server, 99)
				if tags < 2 || !checked { // a frame with more tags is dropped
					pod.sendFrame(t, server, datagram(pod, server, 99), tags)
					if !receives(t, listener, patience) {
						t.Error("the pod is not heard")
					}
				}
				pod.sendFrame(t, server, datagram(other, server, 99), tags)
				bound := patience
				if checked {
					bound = dropped
				}
				if arrives := receives(t, listener, bound); arrives == checked {
					t.Errorf("the pod is heard as another one: %v", arrives)
				}
			})
		}
	}
}

// listens opens an IPv4 UDP socket in a pod.
func listens(t *testing.T, p *testPod, port int) (listener net.PacketConn) {
	t.Helper()
	testutil.Must(t, netns.In(p.netns, func() (err error) {
		listener, err = net.ListenPacket("udp4", fmt.Sprintf(":%d", port))
		return err
	}))
	t.Cleanup(func() { testutil.Must(t, listener.Close()) })
	return listener
}

func receives(t *testing.T, listener net.PacketConn, bound time.Duration) bool {
	t.Helper()
	testutil.Must(t, listener.SetReadDeadline(time.Now().Add(bound)))
	_, _, err := listener.ReadFrom(make([]byte, 1))
	return err == nil
}

// datagram returns an IPv4 packet with a UDP datagram that has no checksum.
func datagram(from, to *testPod, port uint16) []byte {
	const size = 28
	p := []byte{0x45, 0, 0, size, 0, 0, 0, 0, 64, unix.IPPROTO_UDP, 0, 0}
	p = slices.Concat(p, net.ParseIP(from.ip(false)).To4(), net.ParseIP(to.ip(false)).To4())
	var sum uint32
	for i := 0; i < len(p); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(p[i:]))
	}
	binary.BigEndian.PutUint16(p[10:], ^uint16(sum>>16+sum&0xffff))
	for _, n := range []uint16{port, port, size - 20, 0} {
		p = binary.BigEndian.AppendUint16(p, n)
	}
	return p
}

// sendFrame sends a packet with the pod's hardware address and VLAN tags, which needs CAP_NET_RAW.
func (p *testPod) sendFrame(t *testing.T, to *testPod, packet []byte, tags int) {
	t.Helper()
	testutil.Must(t, netns.In(p.netns, func() error {
		link, err := netlink.LinkByName("eth0")
		testutil.Must(t, err)
		frame := slices.Concat(to.mac(t), link.Attrs().HardwareAddr)
		for range tags {
			frame = append(frame, 0x81, 0, 0, 0)
		}
		frame = slices.Concat(frame, []byte{8, 0}, packet)
		socket, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		testutil.Must(t, err)
		defer unix.Close(socket)
		return unix.Sendto(socket, frame, 0, &unix.SockaddrLinklayer{Ifindex: link.Attrs().Index})
	}))
}

func (p *testPod) mac(t *testing.T) net.HardwareAddr {
	t.Helper()
	for _, i := range p.result.Interfaces {
		if i.Sandbox != "" {
			mac, err := net.ParseMAC(i.Mac)
			testutil.Must(t, err)
			return mac
		}
	}
	t.Fatalf("the pod has no interface: %v", p.result)
	return nil
}
