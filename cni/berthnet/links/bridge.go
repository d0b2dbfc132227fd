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
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
)

// Bridge is the present state of a network's bridge.
type Bridge struct {
	Name     string
	Index    int
	MTU      int
	MAC      net.HardwareAddr
	Prefixes []netip.Prefix // without link-local addresses
	up       bool
	alias    string
}

// Description is the wanted state of a bridge.
type Description struct {
	Name     string
	Network  string // key of its network
	MTU      int    // of a new bridge; 0: the MTU of the interface with the node's default route
	Gateways []netip.Prefix
	InUse    []netip.Addr // addresses of pods; their gateways stay
}

// Errors of MakeBridge. CheckBridge returns only the first two.
var (
	ErrTaken   = errors.New("the bridge belongs to another network")
	ErrOverlap = errors.New("the subnet overlaps with another network of the node")
	ErrQuicker = errors.New("another program has just made the bridge")
)

// A bridge's alias contains the key of its network, and one of these prefixes. The prefix shows
// whether the network created the bridge, or took over a bridge that had no owner. A network
// removes no address from a bridge that it found.
const (
	madeBy  = "berth-net bridge of "
	foundBy = "berth-net bridge found by "
)

// owner returns the key of the bridge's network, or "". made reports whether the network created
// the bridge.
func (b *Bridge) owner() (network string, made bool) {
	if network, ok := strings.CutPrefix(b.alias, madeBy); ok {
		return network, true
	}
	network, _ = strings.CutPrefix(b.alias, foundBy)
	if network == b.alias {
		return "", false
	}
	return network, b.isOurs()
}

// isOurs reports whether newBridge of any version created the bridge, by its hardware address. It
// is true even if newBridge was killed before it set the alias.
func (b *Bridge) isOurs() bool { return bytes.Equal(b.MAC, bridgeMAC(b.Name)) }

// FindBridge returns the bridge of that name, or nil if the name is unused. It fails if a device of
// another type has the name.
func FindBridge(name string) (*Bridge, error) {
	link, err := netlink.LinkByName(name)
	if isMissing(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("find bridge %s: %w", name, err)
	}
	if link.Type() != "bridge" {
		return nil, fmt.Errorf("%s is not a bridge, but a device of type %s", name, link.Type())
	}
	at := link.Attrs()
	b := &Bridge{
		Name:  name,
		Index: at.Index,
		MTU:   at.MTU,
		MAC:   at.HardwareAddr,
		up:    at.Flags&net.FlagUp != 0,
		alias: at.Alias,
	}
	addresses, err := addressesOf(b.Index)
	if errors.Is(err, unix.ENODEV) { // deleted meanwhile
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read addresses of bridge %s: %w", name, err)
	}
	b.Prefixes = slices.DeleteFunc(addresses, func(p netip.Prefix) bool { return p.Addr().IsLinkLocalUnicast() })
	slices.SortFunc(b.Prefixes, netip.Prefix.Compare)
	return b, nil
}

// BelongsTo reports whether the bridge's owner is the network.
func (b *Bridge) BelongsTo(network string) bool {
	if b == nil {
		return false
	}
	owner, _ := b.owner()
	return owner == network
}

// Serves reports whether the bridge is up and has these addresses.
func (b *Bridge) Serves(gateways []netip.Prefix) bool {
	return b != nil && b.up && !slices.ContainsFunc(gateways,
		func(g netip.Prefix) bool { return !slices.Contains(b.Prefixes, g) })
}

// Obsolete returns the addresses of the bridge that d does not contain and no pod uses as gateway.
// It returns nil for a bridge that the network did not create.
func (b *Bridge) Obsolete(d *Description) (some []netip.Prefix) {
	if _, made := b.owner(); !made || !b.BelongsTo(d.Network) {
		return nil
	}
	for _, p := range b.Prefixes {
		if !slices.Contains(d.Gateways, p) && !slices.ContainsFunc(d.InUse, p.Contains) {
			some = append(some, p)
		}
	}
	return some
}

// MakeBridge creates the bridge as described and enables forwarding on the node. An existing bridge
// keeps its MTU. It keeps its addresses unless the network created it. The caller holds Lock
// exclusively. It returns the errors of CheckBridge, and ErrQuicker if the caller should try again.
func MakeBridge(d *Description) (*Bridge, error) {
	b, err := d.find()
	if err != nil {
		return nil, err
	}
	if b == nil {
		if b, err = newBridge(d); err != nil {
			return nil, err
		}
	}
	if err := b.claim(d.Network); err != nil {
		return nil, err
	}
	if err := b.Prepare(d.Gateways); err != nil {
		return nil, err
	}
	if err := b.setUp(d.Gateways, b.Obsolete(d)); err != nil {
		return nil, err
	}
	b, err = FindBridge(d.Name)
	if err == nil && b == nil {
		err = fmt.Errorf("bridge %s was deleted meanwhile", d.Name)
	}
	return b, err
}

// CheckBridge returns the error that MakeBridge would return, and changes nothing. It returns
// ErrTaken if another network has pods on the bridge, and ErrOverlap if the node has another use of
// the addresses. It also fails if a device of another type has the name, or if the kernel lacks
// IPv6 for IPv6 addresses.
func CheckBridge(d *Description) error {
	_, err := d.find()
	return err
}

// find returns the bridge, or nil if it does not exist. It fails if MakeBridge would refuse the
// bridge.
func (d *Description) find() (*Bridge, error) {
	b, err := FindBridge(d.Name)
	if err != nil {
		return nil, err
	}
	if b != nil {
		if err := b.mayBecome(d.Network); err != nil {
			return nil, err
		}
	}
	for _, g := range d.Gateways {
		if err := checkFamily(g); err != nil {
			return nil, err
		}
	}
	if !b.Serves(d.Gateways) {
		if err := checkOverlap(d.Gateways, b); err != nil {
			return nil, err
		}
	}
	return b, nil
}

// mayBecome returns ErrTaken if the network cannot take the bridge, because the bridge has pods of
// another network or an alias of another program.
func (b *Bridge) mayBecome(network string) error {
	owner, _ := b.owner()
	switch {
	case owner == network:
		return nil
	case owner != "":
		ports, err := Ports(owner)
		if err != nil {
			return err
		}
		if len(ports) > 0 {
			return fmt.Errorf("%w: %s has %d pods of network %s, with another address directory",
				ErrTaken, b.Name, len(ports), owner)
		}
	case b.alias != "":
		return fmt.Errorf("%w: %s has the alias %q", ErrTaken, b.Name, b.alias)
	}
	return nil
}

// claim makes a network the owner of the bridge. The caller has checked mayBecome.
func (b *Bridge) claim(network string) error {
	owner, made := b.owner()
	if owner == network {
		return nil
	}
	alias := foundBy + network
	if made || b.isOurs() {
		alias = madeBy + network
	}
	message := nl.NewIfInfomsg(unix.AF_UNSPEC)
	message.Index = int32(b.Index) // the inspected device, even if another device has its name now
	parts := []nl.NetlinkRequestData{message, nl.NewRtAttr(unix.IFLA_IFALIAS, []byte(alias))}
	if b.alias == "" && b.isOurs() {
		// The MTU is set in a separate request. If the request that creates the bridge sets the
		// MTU, the kernel later resets it to Ethernet's default. It does so when the last port is
		// removed (br_mtu_auto_adjust, Linux 4.17).
		parts = append(parts, number(unix.IFLA_MTU, b.MTU))
	}
	var host batch
	host.add("name bridge "+b.Name, unix.RTM_NEWLINK, 0, parts...)
	failpoint.Reach("net.claim-bridge")
	err := host.do()
	failpoint.Reach("net.bridge-claimed")
	if err == nil {
		b.alias = alias
	}
	return err
}

// newBridge creates a bridge that is down and has no alias. The kernel ignores an alias in the
// request that creates a device. A second request would name the bridge, and could change a bridge
// that another program has created meanwhile (ErrQuicker). So claim sets the alias later. If the
// process dies before that, the hardware address shows that berth-net created the bridge. With a
// fixed hardware address the kernel also does not change the address with each port.
func newBridge(d *Description) (*Bridge, error) {
	mtu := d.MTU
	if mtu == 0 {
		mtu = outsideMTU()
	}
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(unix.IFLA_INFO_KIND, []byte("bridge"))
	var host batch
	host.add("make bridge "+d.Name, unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL, nl.NewIfInfomsg(unix.AF_UNSPEC),
		name(d.Name), nl.NewRtAttr(unix.IFLA_ADDRESS, bridgeMAC(d.Name)), number(unix.IFLA_MTU, mtu), info)
	failpoint.Reach("net.make-bridge")
	err := host.do()
	failpoint.Reach("net.bridge-made")
	if errors.Is(err, unix.EEXIST) {
		return nil, fmt.Errorf("%w: %w", ErrQuicker, err)
	}
	if err != nil {
		return nil, err
	}
	b, err := FindBridge(d.Name)
	if err == nil && b == nil {
		err = fmt.Errorf("bridge %s was deleted meanwhile", d.Name)
	}
	return b, err
}

// bridgeMAC derives the hardware address from the name and the machine ID. So a recreated bridge
// has the same address for existing pods.
func bridgeMAC(name string) net.HardwareAddr {
	// if there is no machine ID, all nodes have the same address, each on its own bridge
	machine, _ := os.ReadFile("/etc/machine-id")
	sum := sha256.Sum256(append(bytes.TrimSpace(machine), name...))
	return append(net.HardwareAddr{sum[0]&^1 | 2}, sum[1:6]...)
}

// outsideMTU returns the MTU of the interface with the node's default route, or Ethernet's.
func outsideMTU() int {
	const ethernet = 1500
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := dump(func() ([]netlink.Route, error) {
			return netlink.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
		})
		if err != nil {
			continue
		}
		for _, r := range routes {
			if r.Dst != nil && !r.Dst.IP.IsUnspecified() || r.LinkIndex == 0 {
				continue
			}
			if link, err := netlink.LinkByIndex(r.LinkIndex); err == nil && link.Attrs().MTU >= minMTU &&
				link.Attrs().Name != "lo" {
				return link.Attrs().MTU
			}
		}
	}
	return ethernet
}

const minMTU = 1280 // of IPv6

// setUp adds missing addresses, removes obsolete ones, and sets the bridge up.
func (b *Bridge) setUp(gateways, obsolete []netip.Prefix) error {
	var host batch
	for _, g := range gateways {
		if !slices.Contains(b.Prefixes, g) {
			host.addAddress(b.Index, g)
			host.pass(unix.EEXIST)
		}
	}
	for _, g := range obsolete {
		message := nl.NewIfAddrmsg(family(g.Addr()))
		message.Prefixlen, message.Index = uint8(g.Bits()), uint32(b.Index)
		address := g.Addr().AsSlice() // the kernel compares IFA_ADDRESS with the prefix length
		host.add("remove address "+g.String(), unix.RTM_DELADDR, 0, message, nl.NewRtAttr(unix.IFA_LOCAL, address),
			nl.NewRtAttr(unix.IFA_ADDRESS, address))
		host.pass(unix.EADDRNOTAVAIL)
	}
	if !b.up {
		host.add("set bridge "+b.Name+" up", unix.RTM_NEWLINK, 0, up(b.Index))
	}
	if len(host.steps) == 0 {
		return nil
	}
	failpoint.Reach("net.set-up-bridge")
	err := host.do()
	failpoint.Reach("net.bridge-set-up")
	return err
}

// checkOverlap returns ErrOverlap if another interface than the bridge has an address in a subnet.
// A route through another interface to a subnet, or to a part of it, is an overlap, too. If the
// bridge does not exist yet, bridge is nil. A route to a larger network, such as all pods of a
// cluster, is no overlap unless it leads to another network's bridge.
func checkOverlap(subnets []netip.Prefix, bridge *Bridge) error {
	own := -1
	if bridge != nil {
		own = bridge.Index
	}
	addrs, err := dump(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return fmt.Errorf("read the node's addresses: %w", err)
	}
	for _, a := range addrs {
		if a.LinkIndex == own {
			continue
		}
		if ip, ok := netip.AddrFromSlice(a.IP); ok {
			if s := containing(subnets, netip.PrefixFrom(ip.Unmap(), ip.Unmap().BitLen())); s.IsValid() {
				return fmt.Errorf("%w: %s, with address %s of interface %s", ErrOverlap, s.Masked(), a.IPNet, linkName(a.LinkIndex))
			}
		}
		if wider, ok := prefixOf(a.IPNet); ok {
			i := slices.IndexFunc(subnets, func(s netip.Prefix) bool { return wider.Overlaps(s) })
			if i >= 0 && isNetworks(a.LinkIndex) {
				return fmt.Errorf("%w: %s, with the subnet %s of bridge %s",
					ErrOverlap, subnets[i].Masked(), wider.Masked(), linkName(a.LinkIndex))
			}
		}
	}
	routes, err := dump(func() ([]netlink.Route, error) {
		return netlink.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{Table: unix.RT_TABLE_MAIN,
			Type: unix.RTN_UNICAST}, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_TYPE)
	})
	if err != nil {
		return fmt.Errorf("read the node's routes: %w", err)
	}
	for _, r := range routes {
		if r.LinkIndex == own {
			continue
		}
		if dst, ok := prefixOf(r.Dst); ok {
			if s := containing(subnets, dst); s.IsValid() {
				return fmt.Errorf("%w: %s, with the route to %s by interface %s",
					ErrOverlap, s.Masked(), dst, linkName(r.LinkIndex))
			}
		}
		if gateway, ok := netip.AddrFromSlice(r.Gw); ok {
			if s := containing(subnets, netip.PrefixFrom(gateway.Unmap(), gateway.Unmap().BitLen())); s.IsValid() {
				return fmt.Errorf("%w: %s, with the gateway %s on interface %s",
					ErrOverlap, s.Masked(), gateway.Unmap(), linkName(r.LinkIndex))
			}
		}
	}
	return nil
}

// containing returns the first subnet that contains all of p, or an invalid prefix if there is
// none.
func containing(subnets []netip.Prefix, p netip.Prefix) netip.Prefix {
	for _, s := range subnets {
		if s.Bits() <= p.Bits() && s.Contains(p.Addr()) {
			return s
		}
	}
	return netip.Prefix{}
}

func prefixOf(n *net.IPNet) (netip.Prefix, bool) {
	if n == nil {
		return netip.Prefix{}, false
	}
	ip, ok := netip.AddrFromSlice(n.IP)
	ones, _ := n.Mask.Size()
	return netip.PrefixFrom(ip.Unmap(), ones), ok
}

// isNetworks reports whether an interface is the bridge of a berth-net network.
func isNetworks(index int) bool {
	link, err := netlink.LinkByIndex(index)
	if err != nil {
		return false // deleted meanwhile, with its addresses
	}
	alias := link.Attrs().Alias
	return link.Type() == "bridge" && (strings.HasPrefix(alias, madeBy) || strings.HasPrefix(alias, foundBy))
}

func linkName(index int) string {
	link, err := netlink.LinkByIndex(index)
	if err != nil {
		return fmt.Sprintf("number %d", index)
	}
	return link.Attrs().Name
}

const (
	ipv4 = "/proc/sys/net/ipv4"
	ipv6 = "/proc/sys/net/ipv6"
)

// Prepare sets the kernel's options for packets of the bridge. The kernel forwards packets of the
// network's families, and ignores router advertisements from pods (CVE-2020-10749). With
// route_localnet, packets from the node's loopback addresses may leave through the bridge, which
// host ports need. Packages rules and source drop packets from pods to loopback addresses.
func (b *Bridge) Prepare(gateways []netip.Prefix) error {
	for _, g := range gateways {
		if g.Addr().Is4() {
			if err := errors.Join(set(ipv4+"/ip_forward", "1"), set(ipv4+"/conf/"+b.Name+"/route_localnet", "1")); err != nil {
				return err
			}
			continue
		}
		if err := checkFamily(g); err != nil {
			return err
		}
		if err := keepRouters(); err != nil {
			return err
		}
		for _, one := range [][2]string{{"/conf/" + b.Name + "/disable_ipv6", "0"}, {"/conf/" + b.Name + "/accept_ra", "0"},
			{"/conf/all/forwarding", "1"}} {
			if err := set(ipv6+one[0], one[1]); err != nil {
				return err
			}
		}
	}
	return refuseRouters(b.Name)
}

func checkFamily(p netip.Prefix) error {
	if p.Addr().Is6() && IPv6Off() {
		return fmt.Errorf("subnet %s: IPv6 is switched off on this node (net.ipv6.conf.all.disable_ipv6)", p.Masked())
	}
	return nil
}

// IPv6Off reports whether the kernel has no IPv6, or the administrator has disabled it on all
// interfaces.
func IPv6Off() bool {
	off, err := os.ReadFile(ipv6 + "/conf/all/disable_ipv6")
	return err != nil || string(bytes.TrimSpace(off)) != "0"
}

// keepRouters makes the node continue to learn routes from router advertisements. An interface with
// forwarding ignores router advertisements unless accept_ra is 2.
func keepRouters() error {
	if forwards, err := os.ReadFile(ipv6 + "/conf/all/forwarding"); err != nil ||
		!bytes.Equal(bytes.TrimSpace(forwards), []byte("0")) {
		return err
	}
	files, err := filepath.Glob(ipv6 + "/conf/*/accept_ra")
	for _, file := range files {
		accepts, e := os.ReadFile(file)
		if link := filepath.Base(filepath.Dir(file)); e != nil || link == "all" || link == "default" || link == "lo" {
			continue // deleted meanwhile, or an interface without routers
		}
		if bytes.Equal(bytes.TrimSpace(accepts), []byte("1")) {
			err = errors.Join(err, set(file, "2"))
		}
	}
	return err
}

// refuseRouters makes an interface ignore router advertisements. The kernel may have no IPv6.
func refuseRouters(ifName string) error {
	err := set(ipv6+"/conf/"+ifName+"/accept_ra", "0")
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// set writes a value unless the file contains it already. The file belongs to the network namespace
// of the thread that opens it.
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

// BridgesOf returns the names of the bridges that a network made.
func BridgesOf(network string) (names []string, err error) {
	bridges, err := bridgesOf(network)
	for _, b := range bridges {
		names = append(names, b.Attrs().Name)
	}
	return names, err
}

func bridgesOf(network string) ([]netlink.Link, error) {
	all, err := dump(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	return slices.DeleteFunc(all, func(link netlink.Link) bool {
		return link.Type() != "bridge" || link.Attrs().Alias != madeBy+network
	}), nil
}

// DeleteBridgesOf deletes the bridges that a network made. The caller holds Lock exclusively.
func DeleteBridgesOf(network string) error {
	bridges, err := bridgesOf(network)
	for _, b := range bridges {
		if e := netlink.LinkDel(b); e != nil && !errors.Is(e, unix.ENODEV) {
			err = errors.Join(err, fmt.Errorf("delete bridge %s: %w", b.Attrs().Name, e))
		}
	}
	return err
}
