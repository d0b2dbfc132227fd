// Package links creates a bridge on the node, and a pair of veth devices per pod. One device of the
// pair is a port of the bridge. The other is in the pod's network namespace.
//
// # Contract
//
// The port's name derives from the container ID and the interface, so Cut needs no other data to
// find it. Each step is one system call or may be repeated. Functions work in the network namespace
// of the calling thread, which the caller must not change meanwhile. Work in a pod's namespace runs
// on a separate thread (package netns).
//
// The package sends few requests, because each one waits for the lock of all network changes
// (RTNL). Each device has one queue, because the time to create a device grows with its queues.
package links

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
	"berth/internal/netns"
)

// Prefix is the prefix of ports' names.
const Prefix = "veth"

// PortName returns the name of an attachment's port.
func PortName(id, ifName string) string {
	sum := sha256.Sum256([]byte(id + "\x00" + ifName))
	return Prefix + hex.EncodeToString(sum[:])[:unix.IFNAMSIZ-1-len(Prefix)]
}

// portMAC returns the port's hardware address, which no packet uses.
func portMAC(id, ifName string) net.HardwareAddr {
	sum := sha256.Sum256([]byte(id + "\x01" + ifName))
	return append(net.HardwareAddr{sum[0]&^1 | 2}, sum[1:6]...) // locally administered, unicast
}

// podMAC derives the hardware address of a pod from one of its IP addresses. So neighbour caches
// stay valid when another pod gets the address.
func podMAC(ips []netip.Prefix) net.HardwareAddr {
	if b := ips[0].Addr().AsSlice(); len(b) == 4 {
		return append(net.HardwareAddr{0x0a, 0x58}, b...)
	}
	sum := sha256.Sum256(ips[0].Addr().AsSlice())
	return append(net.HardwareAddr{0x0a, 0x59}, sum[:4]...)
}

// Attachment describes a pod's connection.
type Attachment struct {
	ContainerID string
	IfName      string // in the pod
	NetNS       string // path
	Network     string // key of the network
	Bridge      *Bridge
	MTU         int
	Hairpin     bool           // the bridge may send a packet back through the port that received it
	Ingress     Limit          // of traffic to the pod
	Egress      Limit          // of traffic from the pod
	IPs         []netip.Prefix // one or two
	Routes      []Route
}

// Route is a pod's route through the bridge.
type Route struct {
	Dst     netip.Prefix
	Gateway netip.Addr
}

// Plugged has the addresses of the devices that Plug made.
type Plugged struct{ PortMAC, PodMAC net.HardwareAddr }

// alias returns the port's alias, which names its owner.
func alias(network, id, ifName string) string {
	return "berth-net " + network + " " + id + " " + ifName
}

// Plug creates the pair of devices and adds one to the bridge. The caller holds Lock, so that the
// bridge keeps its network. Errors wrap the kernel's errno: EEXIST if the port or the pod's
// interface exists.
func Plug(a Attachment) (Plugged, error) {
	made := Plugged{portMAC(a.ContainerID, a.IfName), podMAC(a.IPs)}
	ns, err := os.Open(a.NetNS)
	if err != nil {
		return made, fmt.Errorf("network namespace: %w", err)
	}
	return made, errors.Join(a.makePair(ns, made), ns.Close())
}

// SetUp sets the addresses and routes of the pod's device, and waits until the bridge forwards its
// packets.
func SetUp(a Attachment) error {
	if err := netns.In(a.NetNS, func() error { return a.setUpPod() }); err != nil {
		return err
	}
	return a.awaitForwarding()
}

// linkTimeout bounds the time until a port with a carrier forwards packets. A work queue of the
// kernel enables the port, and waits for the lock of all network devices.
const linkTimeout = 5 * time.Second

// awaitForwarding waits until the bridge forwards the pod's packets. Until then the bridge drops
// packets, and the pod would repeat its first neighbour request only after a second. The CNI plugin
// bridge also waits. awaitForwarding does not wait if a foreign bridge uses STP, because this takes
// half a minute.
func (a *Attachment) awaitForwarding() error {
	port := PortName(a.ContainerID, a.IfName)
	begin := time.Now()
	for pause := 100 * time.Microsecond; ; pause = min(2*pause, 20*time.Millisecond) {
		link, err := netlink.LinkByName(port)
		if err != nil {
			return fmt.Errorf("state of port %s: %w", port, err)
		}
		state := link.Attrs().OperState
		if state == netlink.OperUp {
			return nil
		}
		if time.Since(begin) > linkTimeout {
			return fmt.Errorf("port %s does not forward after %v: it is %v", port, linkTimeout, state)
		}
		time.Sleep(pause)
	}
}

// makePair creates the devices in their namespaces and sets up the port. The pod's device is down,
// so the port has no carrier yet. While there is no carrier, the kernel adds no IPv6 address to the
// port. setUpPort then disables IPv6 addresses.
func (a *Attachment) makePair(ns *os.File, macs Plugged) error {
	port := PortName(a.ContainerID, a.IfName)
	var host batch
	host.add("make veth "+port, unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL, nl.NewIfInfomsg(unix.AF_UNSPEC),
		name(port), nl.NewRtAttr(unix.IFLA_ADDRESS, macs.PortMAC),
		number(unix.IFLA_MTU, a.MTU), number(unix.IFLA_MASTER, a.Bridge.Index),
		number(unix.IFLA_NUM_TX_QUEUES, 1), number(unix.IFLA_NUM_RX_QUEUES, 1), a.peer(ns, macs.PodMAC))
	failpoint.Reach("net.make-pair")
	err := host.do()
	failpoint.Reach("net.pair-made")
	if err != nil {
		return err
	}
	index, err := indexOf(port)
	if err != nil {
		return err
	}
	if index == 0 {
		return fmt.Errorf("veth %s was deleted meanwhile", port)
	}
	return a.setUpPort(index)
}

// setUpPort sets up the port. Traffic limits come first.
func (a *Attachment) setUpPort(index int) error {
	var host batch
	if err := a.limitTraffic(&host, index); err != nil {
		return err
	}
	host.add("set up port", unix.RTM_NEWLINK, 0, up(index),
		nl.NewRtAttr(unix.IFLA_IFALIAS, []byte(alias(a.Network, a.ContainerID, a.IfName))), withoutAddresses(),
		hairpin(a.Hairpin))
	failpoint.Reach("net.set-up-port")
	err := host.do()
	failpoint.Reach("net.port-set-up")
	return err
}

// peer encodes the pod's device: its name, address and namespace.
func (a *Attachment) peer(ns *os.File, mac net.HardwareAddr) *nl.RtAttr {
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(unix.IFLA_INFO_KIND, []byte("veth"))
	peer := info.AddRtAttr(unix.IFLA_INFO_DATA, nil).AddRtAttr(nl.VETH_INFO_PEER, nil)
	nl.NewIfInfomsgChild(peer, unix.AF_UNSPEC)
	peer.AddRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(a.IfName))
	peer.AddRtAttr(unix.IFLA_ADDRESS, mac)
	peer.AddRtAttr(unix.IFLA_MTU, nl.Uint32Attr(uint32(a.MTU)))
	peer.AddRtAttr(unix.IFLA_NUM_TX_QUEUES, nl.Uint32Attr(1))
	peer.AddRtAttr(unix.IFLA_NUM_RX_QUEUES, nl.Uint32Attr(1))
	peer.AddRtAttr(unix.IFLA_NET_NS_FD, nl.Uint32Attr(uint32(ns.Fd())))
	return info
}

// setUpPod sets addresses and routes of the pod's device, in its namespace.
func (a *Attachment) setUpPod() error {
	index, err := indexOf(a.IfName)
	if err != nil {
		return err
	}
	if index == 0 {
		return fmt.Errorf("%s is not in the pod", a.IfName)
	}
	var pod batch
	for _, ip := range a.IPs {
		pod.addAddress(index, ip)
	}
	pod.add("set "+a.IfName+" up", unix.RTM_NEWLINK, 0, up(index))
	for _, r := range a.Routes {
		pod.addRoute(index, r)
	}
	if err := refuseRouters(a.IfName); err != nil {
		return err
	}
	failpoint.Reach("net.set-up-pod")
	err = pod.do()
	failpoint.Reach("net.pod-set-up")
	return err
}

// addAddress adds an address without duplicate address detection (NODAD), because the reservation
// makes it unique.
func (b *batch) addAddress(index int, ip netip.Prefix) {
	message := nl.NewIfAddrmsg(family(ip.Addr()))
	message.Prefixlen, message.Index = uint8(ip.Bits()), uint32(index)
	bytes := ip.Addr().AsSlice()
	parts := []nl.NetlinkRequestData{message, nl.NewRtAttr(unix.IFA_LOCAL, bytes), nl.NewRtAttr(unix.IFA_ADDRESS, bytes)}
	if ip.Addr().Is6() {
		message.IfAddrmsg.Flags = unix.IFA_F_NODAD
		parts = append(parts, number(unix.IFA_FLAGS, unix.IFA_F_NODAD))
	} else {
		parts = append(parts, nl.NewRtAttr(unix.IFA_BROADCAST, broadcast(ip)))
	}
	b.add("add address "+ip.String(), unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_EXCL, parts...)
}

func (b *batch) addRoute(index int, r Route) {
	message := nl.NewRtMsg()
	message.Family, message.Dst_len, message.Protocol = uint8(family(r.Dst.Addr())), uint8(r.Dst.Bits()), unix.RTPROT_BOOT
	parts := []nl.NetlinkRequestData{
		message,
		nl.NewRtAttr(unix.RTA_GATEWAY, r.Gateway.AsSlice()),
		number(unix.RTA_OIF, index),
	}
	if r.Dst.Bits() > 0 {
		parts = append(parts, nl.NewRtAttr(unix.RTA_DST, r.Dst.Addr().AsSlice()))
	}
	b.add("add route to "+r.Dst.String(), unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_EXCL, parts...)
}

// Cut takes the port of an attachment out of service. After it returns, the port forwards no
// packets. If remove is set, Cut also deletes the devices, for which the kernel waits about 20 ms
// for all processors. Otherwise the kernel deletes the devices in the background with the pod's
// namespace. Cut may be repeated, and ignores a missing port.
func Cut(id, ifName string, remove bool) error {
	port, shaper := PortName(id, ifName), ShaperName(id, ifName)
	var host batch
	for _, device := range []string{port, shaper} {
		index, err := indexOf(device)
		switch {
		case err != nil:
			return err
		case index == 0:
		case remove || device == shaper: // the shaper is in the node's namespace and would remain
			host.add("delete "+device, unix.RTM_DELLINK, 0, nl.NewIfInfomsg(unix.AF_UNSPEC), name(device))
			host.pass(unix.ENODEV)
		default:
			host.disable(index)
			host.pass(unix.ENODEV)
		}
	}
	if len(host.steps) == 0 {
		return nil
	}
	failpoint.Reach("net.cut")
	err := host.do()
	failpoint.Reach("net.cut-off")
	if !remove && err != nil { // it may no longer be a port of a bridge
		return Cut(id, ifName, true)
	}
	return err
}

// disable makes the bridge stop forwarding through a port and forget its neighbours. It sends a
// request to the bridge. It changes the bridge's port, not the device. A change of the device would
// notify the bridge, which would then enable the port again. The pod can enable the port by setting
// its device down and up. The bridge still sends no packets there, because it neither learns from
// the port nor floods into it. A locked port also drops traffic from the pod (Linux 5.18).
func (b *batch) disable(index int) {
	message := nl.NewIfInfomsg(unix.AF_BRIDGE)
	message.Index = int32(index)
	state := nl.NewRtAttr(unix.IFLA_PROTINFO|unix.NLA_F_NESTED, nil)
	state.AddRtAttr(nl.IFLA_BRPORT_STATE, []byte{stateDisabled})
	for _, off := range []int{nl.IFLA_BRPORT_LEARNING, nl.IFLA_BRPORT_UNICAST_FLOOD, nl.IFLA_BRPORT_MCAST_FLOOD,
		nl.IFLA_BRPORT_BCAST_FLOOD} {
		state.AddRtAttr(off, []byte{0})
	}
	state.AddRtAttr(brportLocked, []byte{1})
	state.AddRtAttr(nl.IFLA_BRPORT_FLUSH, nil)
	b.add("disable the pod's port", unix.RTM_SETLINK, 0, message, state)
}

const (
	stateDisabled = 0  // BR_STATE_DISABLED
	brportLocked  = 39 // IFLA_BRPORT_LOCKED, which older kernels ignore
)

// HasPort reports whether the node has the port of an attachment.
func HasPort(id, ifName string) (bool, error) {
	index, err := indexOf(PortName(id, ifName))
	return index != 0, err
}

// Port is a device on the node that Plug has made. It is a port of the bridge, or a shaper for the
// traffic of a port.
type Port struct{ Name, ContainerID, IfName string }

// Ports returns the devices on the node that Plug made for a network.
func Ports(network string) ([]Port, error) {
	all, err := dump(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	var ports []Port
	for _, link := range all {
		words := strings.Fields(link.Attrs().Alias)
		if len(words) != 4 || link.Attrs().Alias != alias(network, words[2], words[3]) {
			continue
		}
		if device := link.Attrs().Name; device == PortName(words[2], words[3]) || device == ShaperName(words[2], words[3]) {
			ports = append(ports, Port{device, words[2], words[3]})
		}
	}
	return ports, nil
}

// --- messages ---------------------------------------------------------------

func name(ifName string) *nl.RtAttr { return nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(ifName)) }

func number(kind, n int) *nl.RtAttr { return nl.NewRtAttr(kind, nl.Uint32Attr(uint32(n))) }

// up returns the header of a request that sets an interface up.
func up(index int) *nl.IfInfomsg {
	message := nl.NewIfInfomsg(unix.AF_UNSPEC)
	message.Index, message.Flags, message.Change = int32(index), unix.IFF_UP, unix.IFF_UP
	return message
}

// withoutAddresses keeps the kernel from adding a link-local IPv6 address to an interface.
func withoutAddresses() *nl.RtAttr {
	families := nl.NewRtAttr(unix.IFLA_AF_SPEC, nil)
	families.AddRtAttr(unix.AF_INET6, nil).AddRtAttr(unix.IFLA_INET6_ADDR_GEN_MODE, []byte{addrGenNone})
	return families
}

const addrGenNone = 1 // IN6_ADDR_GEN_MODE_NONE

// hairpin encodes whether a bridge's port may send a packet back.
func hairpin(on bool) *nl.RtAttr {
	value := []byte{0}
	if on {
		value[0] = 1
	}
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(unix.IFLA_INFO_SLAVE_KIND, []byte("bridge"))
	info.AddRtAttr(unix.IFLA_INFO_SLAVE_DATA, nil).AddRtAttr(nl.IFLA_BRPORT_MODE, value)
	return info
}

func family(ip netip.Addr) int {
	if ip.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

func broadcast(p netip.Prefix) []byte {
	b := p.Addr().AsSlice()
	for bit := p.Bits(); bit < len(b)*8; bit++ {
		b[bit/8] |= 0x80 >> (bit % 8)
	}
	return b
}

// isMissing reports whether the error means that an interface does not exist.
func isMissing(err error) bool {
	_, missing := errors.AsType[netlink.LinkNotFoundError](err)
	return missing
}
