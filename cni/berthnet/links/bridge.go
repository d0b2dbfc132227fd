package links

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
)

// Bridge is the node's end of a network, as it is.
type Bridge struct {
	Name     string
	Index    int
	MTU      int
	MAC      net.HardwareAddr
	Prefixes []netip.Prefix // its addresses, without the link-local ones
	up       bool
}

// FindBridge returns the bridge of a name; nil if there is none. It is an error if there is something else.
func FindBridge(name string) (*Bridge, error) {
	link, err := netlink.LinkByName(name)
	if isMissing(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("find bridge %s: %w", name, err)
	}
	if link.Type() != "bridge" {
		return nil, fmt.Errorf("%s is no bridge, but a device of type %s", name, link.Type())
	}
	at := link.Attrs()
	b := &Bridge{Name: name, Index: at.Index, MTU: at.MTU, MAC: at.HardwareAddr, up: at.Flags&net.FlagUp != 0}
	addrs, err := netlink.AddrList(link, netlink.FAMILY_ALL) // ports have none, so there are not many
	if err != nil {
		return nil, fmt.Errorf("read addresses of bridge %s: %w", name, err)
	}
	for _, a := range addrs {
		ip, ok := netip.AddrFromSlice(a.IP)
		ones, _ := a.Mask.Size()
		if ip = ip.Unmap(); ok && !ip.IsLinkLocalUnicast() {
			b.Prefixes = append(b.Prefixes, netip.PrefixFrom(ip, ones))
		}
	}
	slices.SortFunc(b.Prefixes, netip.Prefix.Compare)
	return b, nil
}

// Serves tells whether the bridge is up and has these addresses.
func (b *Bridge) Serves(gateways []netip.Prefix) bool {
	return b != nil && b.up && !slices.ContainsFunc(gateways, func(g netip.Prefix) bool { return !slices.Contains(b.Prefixes, g) })
}

// MakeBridge makes the bridge, as far as it is not there, with these addresses, and has the node forward packets. A bridge that is there keeps
// its MTU and what addresses it has.
func MakeBridge(name string, mtu int, gateways []netip.Prefix) (*Bridge, error) {
	b, err := FindBridge(name)
	if err != nil {
		return nil, err
	}
	if b == nil {
		if err := newBridge(name, mtu); err != nil {
			return nil, err
		}
		if b, err = FindBridge(name); err != nil {
			return nil, err
		}
	}
	if b == nil {
		return nil, fmt.Errorf("bridge %s vanishes", name)
	}
	if err := b.prepare(gateways); err != nil {
		return nil, err
	}
	if err := b.setUp(gateways); err != nil {
		return nil, err
	}
	return FindBridge(name)
}

// newBridge makes a bridge that is down. Its hardware address is given: the kernel would change its own with each port.
func newBridge(name string, mtu int) error {
	if mtu == 0 {
		mtu = outsideMTU()
	}
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(unix.IFLA_INFO_KIND, []byte("bridge"))
	var host batch
	host.add("make bridge "+name, unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL, nl.NewIfInfomsg(unix.AF_UNSPEC),
		nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(name)), nl.NewRtAttr(unix.IFLA_ADDRESS, bridgeMAC(name)), number(unix.IFLA_MTU, mtu), info)
	host.pass(unix.EEXIST) // another process was quicker
	// Given when it is made, it lasts until the last port goes, and is Ethernet's then (br_mtu_auto_adjust, Linux 4.17).
	host.add("set the MTU of bridge "+name, unix.RTM_NEWLINK, 0, nl.NewIfInfomsg(unix.AF_UNSPEC), nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(name)), number(unix.IFLA_MTU, mtu))
	failpoint.Reach("net.make-bridge")
	err := host.do()
	failpoint.Reach("net.bridge-made")
	return err
}

// bridgeMAC follows from the name and the machine, so that a bridge that is made again is the same to pods that have met it.
func bridgeMAC(name string) net.HardwareAddr {
	machine, _ := os.ReadFile("/etc/machine-id") // a node without one has the MAC of other nodes without, on a bridge of its own
	sum := sha256.Sum256(append(bytes.TrimSpace(machine), name...))
	return append(net.HardwareAddr{sum[0]&^1 | 2}, sum[1:6]...)
}

// outsideMTU is the MTU of the interface with the node's default route, or Ethernet's.
func outsideMTU() int {
	const ethernet = 1500
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := netlink.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
		if err != nil {
			continue
		}
		for _, r := range routes {
			if r.Dst != nil && !r.Dst.IP.IsUnspecified() || r.LinkIndex == 0 {
				continue
			}
			if link, err := netlink.LinkByIndex(r.LinkIndex); err == nil && link.Attrs().MTU >= minMTU && link.Attrs().Name != "lo" {
				return link.Attrs().MTU
			}
		}
	}
	return ethernet
}

const minMTU = 1280 // of IPv6

// setUp gives the bridge the addresses that it lacks and sets it up.
func (b *Bridge) setUp(gateways []netip.Prefix) error {
	var host batch
	for _, g := range gateways {
		if !slices.Contains(b.Prefixes, g) {
			host.addAddress(b.Index, g)
			host.pass(unix.EEXIST)
		}
	}
	host.add("set bridge "+b.Name+" up", unix.RTM_NEWLINK, 0, up(b.Index))
	failpoint.Reach("net.set-up-bridge")
	err := host.do()
	failpoint.Reach("net.bridge-set-up")
	return err
}

const (
	ipv4 = "/proc/sys/net/ipv4"
	ipv6 = "/proc/sys/net/ipv6"
)

// prepare sets what the kernel does with packets of the bridge: it forwards them, of either family that the network has; it
// takes no router advertisements from pods (CVE-2020-10749); and what the node sends to its own loopback addresses may leave by the bridge,
// which host ports need (package rules drops what pods send there).
func (b *Bridge) prepare(gateways []netip.Prefix) error {
	for _, g := range gateways {
		if g.Addr().Is4() {
			if err := errors.Join(set(ipv4+"/ip_forward", "1"), set(ipv4+"/conf/"+b.Name+"/route_localnet", "1")); err != nil {
				return err
			}
			continue
		}
		if err := keepRouters(); err != nil {
			return err
		}
		for _, one := range [][2]string{{"/conf/" + b.Name + "/disable_ipv6", "0"}, {"/conf/" + b.Name + "/accept_ra", "0"}, {"/conf/all/forwarding", "1"}} {
			if err := set(ipv6+one[0], one[1]); err != nil {
				return err
			}
		}
	}
	return refuseRouters(b.Name)
}

// keepRouters has the node go on to learn its own routes from routers: interfaces that do, do no more once it forwards, unless
// they are told to explicitly.
func keepRouters() error {
	if forwards, err := os.ReadFile(ipv6 + "/conf/all/forwarding"); err != nil || !bytes.Equal(bytes.TrimSpace(forwards), []byte("0")) {
		return err
	}
	files, err := filepath.Glob(ipv6 + "/conf/*/accept_ra")
	for _, file := range files {
		accepts, e := os.ReadFile(file)
		if link := filepath.Base(filepath.Dir(file)); e != nil || link == "all" || link == "default" || link == "lo" {
			continue // gone meanwhile, or no interface that has routers
		}
		if bytes.Equal(bytes.TrimSpace(accepts), []byte("1")) {
			err = errors.Join(err, set(file, "2"))
		}
	}
	return err
}

// refuseRouters has an interface take no router advertisements. There may be no IPv6.
func refuseRouters(ifName string) error {
	err := set(ipv6+"/conf/"+ifName+"/accept_ra", "0")
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// set writes a value that is not set yet. The files show the namespace of the thread that opens them.
func set(file, value string) error {
	now, err := os.ReadFile(file)
	if err == nil && string(bytes.TrimSpace(now)) == value {
		return nil
	}
	failpoint.Reach("net.set")
	if err == nil {
		err = os.WriteFile(file, []byte(value), 0)
	}
	failpoint.Reach("net.is-set")
	if err != nil {
		return fmt.Errorf("set %s: %w", file, err)
	}
	return nil
}
