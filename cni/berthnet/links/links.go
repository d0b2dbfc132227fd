// Package links makes what pods are connected by: a bridge on the node, and for each pod a pair of veth devices, one of them
// a port of the bridge, the other one in the pod's network namespace.
//
// # Contract
//
// The name of the port follows from the container's ID and the interface, so that Cut finds it with nothing else. Each step is
// one call of the kernel or may be repeated. Functions work in the network namespace of the calling thread, which the
// caller does not change; what they do in a pod's they do on a thread of its own (package netns).
//
// Few calls of the kernel, since each of them waits for the lock of all network changes (RTNL), and the devices have one queue each:
// more would only make them slower to make, by as many as there are processors.
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

// Prefix is what the names of ports begin with.
const Prefix = "veth"

// PortName is the name of an attachment's port.
func PortName(id, ifName string) string {
	sum := sha256.Sum256([]byte(id + "\x00" + ifName))
	return Prefix + hex.EncodeToString(sum[:])[:unix.IFNAMSIZ-1-len(Prefix)]
}

// portMAC is the port's hardware address. Nobody sends to it.
func portMAC(id, ifName string) net.HardwareAddr {
	sum := sha256.Sum256([]byte(id + "\x01" + ifName))
	return append(net.HardwareAddr{sum[0]&^1 | 2}, sum[1:6]...) // locally administered, one station
}

// podMAC is the hardware address of a pod with these IP addresses. It follows from one of them, so that what others
// remember of that one's last owner is still true.
func podMAC(ips []netip.Prefix) net.HardwareAddr {
	if b := ips[0].Addr().AsSlice(); len(b) == 4 {
		return append(net.HardwareAddr{0x0a, 0x58}, b...)
	}
	sum := sha256.Sum256(ips[0].Addr().AsSlice())
	return append(net.HardwareAddr{0x0a, 0x59}, sum[:4]...)
}

// Attachment is how a pod is connected.
type Attachment struct {
	ContainerID string
	IfName      string // in the pod
	NetNS       string // path
	Network     string // its key
	Bridge      *Bridge
	MTU         int
	Hairpin     bool           // the bridge sends back by this port what came by it
	Isolated    bool           // and nothing from this port to others that are isolated
	CheckSource bool           // the pod can send with its own addresses only
	Ingress     Limit          // of what the pod receives
	Egress      Limit          // of what it sends
	IPs         []netip.Prefix // one or two
	Routes      []Route
}

func (a *Attachment) addresses() (all []netip.Addr) {
	for _, ip := range a.IPs {
		all = append(all, ip.Addr())
	}
	return all
}

// Route is a route of the pod's by the bridge.
type Route struct {
	Dst     netip.Prefix
	Gateway netip.Addr
}

// Plugged is what Plug has made.
type Plugged struct{ PortMAC, PodMAC net.HardwareAddr }

// alias is what the port says of whose it is.
func alias(network, id, ifName string) string {
	return "berth-net " + network + " " + id + " " + ifName
}

// Plug makes the pair of devices, one of them a port of the bridge, which must not become another network's meanwhile (Lock). Errors wrap the kernel's: EEXIST where the
// port or the interface exists.
func Plug(a Attachment) (Plugged, error) {
	made := Plugged{portMAC(a.ContainerID, a.IfName), podMAC(a.IPs)}
	ns, err := os.Open(a.NetNS)
	if err != nil {
		return made, fmt.Errorf("network namespace: %w", err)
	}
	return made, errors.Join(a.makePair(ns, made), ns.Close())
}

// SetUp gives the device that Plug has put into the pod its addresses and routes, and waits until the bridge takes what it sends.
func SetUp(a Attachment) error {
	if err := netns.In(a.NetNS, func() error { return a.setUpPod() }); err != nil {
		return err
	}
	return a.awaitForwarding()
}

// linkTime is how long it may take until a port with a carrier forwards: the kernel has a work queue for that, which waits for the lock of
// all network devices.
const linkTime = 5 * time.Second

// awaitForwarding waits until the bridge takes what the pod sends, but for a bridge of others' with STP, which takes half a minute. What comes before is dropped, and a pod's first question for a hardware
// address is asked again after a second. The bridge plugin waits for the same.
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
		if time.Since(begin) > linkTime {
			return fmt.Errorf("port %s does not forward after %v: it is %v", port, linkTime, state)
		}
		time.Sleep(pause)
	}
}

// makePair makes the devices, each in its namespace, and then sets up the port. The pod's is down, so there is no carrier yet, and the kernel
// leaves the port without addresses while it is told to for good.
func (a *Attachment) makePair(ns *os.File, macs Plugged) error {
	port := PortName(a.ContainerID, a.IfName)
	var host batch
	host.add("make veth "+port, unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL, nl.NewIfInfomsg(unix.AF_UNSPEC),
		name(port), nl.NewRtAttr(unix.IFLA_ADDRESS, macs.PortMAC), number(unix.IFLA_MTU, a.MTU), number(unix.IFLA_MASTER, a.Bridge.Index),
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
		return fmt.Errorf("veth %s vanishes", port)
	}
	return a.setUpPort(index, macs)
}

// setUpPort has the port do its work: first it checks what comes in.
func (a *Attachment) setUpPort(index int, macs Plugged) error {
	var host batch
	if err := a.control(&host, index, macs); err != nil {
		return err
	}
	host.add("set up port", unix.RTM_NEWLINK, 0, up(index),
		nl.NewRtAttr(unix.IFLA_IFALIAS, []byte(alias(a.Network, a.ContainerID, a.IfName))), withoutAddresses(),
		portOptions(map[int]bool{nl.IFLA_BRPORT_MODE: a.Hairpin, nl.IFLA_BRPORT_ISOLATED: a.Isolated}))
	failpoint.Reach("net.set-up-port")
	err := host.do()
	failpoint.Reach("net.port-set-up")
	return err
}

// peer describes the pod's device: its name, address and namespace.
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

// setUpPod gives the pod's device addresses and routes, in its namespace.
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

// addAddress gives an interface an address, at once: nobody else has it, so that need not be asked (NODAD).
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
	parts := []nl.NetlinkRequestData{message, nl.NewRtAttr(unix.RTA_GATEWAY, r.Gateway.AsSlice()), number(unix.RTA_OIF, index)}
	if r.Dst.Bits() > 0 {
		parts = append(parts, nl.NewRtAttr(unix.RTA_DST, r.Dst.Addr().AsSlice()))
	}
	b.add("add route to "+r.Dst.String(), unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_EXCL, parts...)
}

// Cut takes the port of an attachment out of service: nothing passes by it any more when Cut returns. With remove the devices are gone, too;
// that takes the kernel some 20 milliseconds, in which it waits for all processors. Without, they go with the pod's namespace, in the
// background. It may be repeated, and is nothing where there is no such port.
func Cut(id, ifName string, remove bool) error {
	port, shaper := PortName(id, ifName), ShaperName(id, ifName)
	var host batch
	for _, device := range []string{port, shaper} {
		index, err := indexOf(device)
		switch {
		case err != nil:
			return err
		case index == 0:
		case remove || device == shaper: // it is in nobody's namespace but the node's
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
	if !remove && err != nil { // it may be a port no more
		return Cut(id, ifName, true)
	}
	return err
}

// disable has the bridge forward nothing to and from a port, and forget who is behind it. It is a request to the bridge: by one about the
// device the state changes, too, and the bridge is then told that the device has changed, and enables the port again. The other end can have it
// enabled, by going down and up; nothing is sent there all the same, for the bridge learns nothing from the port and floods nothing
// into it, and what comes from there is dropped (by a locked port, Linux 5.18).
func (b *batch) disable(index int) {
	message := nl.NewIfInfomsg(unix.AF_BRIDGE)
	message.Index = int32(index)
	state := nl.NewRtAttr(unix.IFLA_PROTINFO|unix.NLA_F_NESTED, nil)
	state.AddRtAttr(nl.IFLA_BRPORT_STATE, []byte{stateDisabled})
	for _, off := range []int{nl.IFLA_BRPORT_LEARNING, nl.IFLA_BRPORT_UNICAST_FLOOD, nl.IFLA_BRPORT_MCAST_FLOOD, nl.IFLA_BRPORT_BCAST_FLOOD} {
		state.AddRtAttr(off, []byte{0})
	}
	state.AddRtAttr(brportLocked, []byte{1})
	state.AddRtAttr(nl.IFLA_BRPORT_FLUSH, nil)
	b.add("disable the pod's port", unix.RTM_SETLINK, 0, message, state)
}

const (
	stateDisabled = 0  // BR_STATE_DISABLED
	brportLocked  = 39 // IFLA_BRPORT_LOCKED, which older kernels pass over
)

// HasPort tells whether the node has the port of an attachment.
func HasPort(id, ifName string) (bool, error) {
	index, err := indexOf(PortName(id, ifName))
	return index != 0, err
}

// Port is a device on the node that Plug made: a port of the bridge, or what limits it.
type Port struct{ Name, ContainerID, IfName string }

// Ports returns the devices on the node that Plug made for the network with a key.
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

// up is the header of a request about an interface, which shall be up.
func up(index int) *nl.IfInfomsg {
	message := nl.NewIfInfomsg(unix.AF_UNSPEC)
	message.Index, message.Flags, message.Change = int32(index), unix.IFF_UP, unix.IFF_UP
	return message
}

// withoutAddresses keeps the kernel from giving an interface a link-local address of IPv6.
func withoutAddresses() *nl.RtAttr {
	families := nl.NewRtAttr(unix.IFLA_AF_SPEC, nil)
	families.AddRtAttr(unix.AF_INET6, nil).AddRtAttr(unix.IFLA_INET6_ADDR_GEN_MODE, []byte{addrGenNone})
	return families
}

const addrGenNone = 1 // IN6_ADDR_GEN_MODE_NONE

// portOptions sets options of a port of a bridge.
func portOptions(options map[int]bool) *nl.RtAttr {
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(unix.IFLA_INFO_SLAVE_KIND, []byte("bridge"))
	data := info.AddRtAttr(unix.IFLA_INFO_SLAVE_DATA, nil)
	for option, on := range options {
		value := []byte{0}
		if on {
			value[0] = 1
		}
		data.AddRtAttr(option, value)
	}
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

// isMissing tells that there is no such interface.
func isMissing(err error) bool {
	_, missing := errors.AsType[netlink.LinkNotFoundError](err)
	return missing
}
