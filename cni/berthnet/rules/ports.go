package rules

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"berth/cni/berthnet/conf"
	"berth/internal/failpoint"
)

// HostPort is a port of the node's that is a pod's.
type HostPort struct {
	conf.Port
	Pod netip.Addr
}

func (p HostPort) String() string {
	host := "*"
	if p.HostIP.IsValid() {
		host = p.HostIP.String()
	}
	return fmt.Sprintf("%s port %d on %s", p.ProtocolName(), p.HostPort, host)
}

// HostPorts are those that ports ask for, of a pod with these addresses: each for the addresses of its family, and those
// for any address of the node for both.
func HostPorts(ports []conf.Port, ips []netip.Addr) (all []HostPort) {
	for _, p := range ports {
		for _, ip := range ips {
			one := HostPort{p, ip}
			switch {
			case !p.HostIP.IsValid():
			case p.HostIP.BitLen() != ip.BitLen():
				continue
			case p.HostIP.IsUnspecified():
				one.HostIP = netip.Addr{}
			}
			all = append(all, one)
		}
	}
	return all
}

// portMap is one of the maps in which host ports are: by protocol and port, and the node's address where that matters. What is
// found is a pod's address and port.
type portMap struct {
	name   string
	v6     bool
	withIP bool
}

// maps are all of them, the more special ones first.
var maps = []portMap{{"ports4of", false, true}, {"ports6of", true, true}, {"ports4", false, false}, {"ports6", true, false}}

// of returns the map that a port belongs in.
func (p HostPort) portMap() portMap {
	for _, m := range maps {
		if m.v6 == p.Pod.Is6() && m.withIP == p.HostIP.IsValid() {
			return m
		}
	}
	panic("unreachable: there is a map for each kind of host port")
}

func (m portMap) addressType() nftables.SetDatatype {
	if m.v6 {
		return nftables.TypeIP6Addr
	}
	return nftables.TypeIPAddr
}

func (m portMap) set(t *nftables.Table) *nftables.Set {
	key := []nftables.SetDatatype{nftables.TypeInetProto, nftables.TypeInetService}
	if m.withIP {
		key = append([]nftables.SetDatatype{m.addressType()}, key...)
	}
	return &nftables.Set{Table: t, Name: m.name, IsMap: true, Concatenation: true,
		KeyType: nftables.MustConcatSetType(key...), DataType: nftables.MustConcatSetType(m.addressType(), nftables.TypeInetService)}
}

// words is how many registers of 32 bits an address takes.
func (m portMap) words() uint32 {
	if m.v6 {
		return 4
	}
	return 1
}

// lookUp finds the pod that a packet is for: its address in the first registers, its port in the one after that. A packet that is for
// none goes on to the next rule.
func (m portMap) lookUp() expressions {
	next := uint32(reg32)
	var parts expressions
	if m.withIP {
		offset := uint32(16)
		if m.v6 {
			offset = 24
		}
		parts = append(parts, &expr.Payload{DestRegister: next, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: 4 * m.words()})
		next += m.words()
	}
	return append(parts,
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: next},
		&expr.Payload{DestRegister: next + 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Lookup{SourceRegister: reg32, SetName: m.name, IsDestRegSet: true, DestRegister: reg32})
}

// toPod redirects to the pod in the registers.
func (m portMap) toPod() expressions {
	family := uint32(unix.NFPROTO_IPV4)
	if m.v6 {
		family = unix.NFPROTO_IPV6
	}
	return expressions{&expr.NAT{Type: expr.NATTypeDestNAT, Family: family, RegAddrMin: reg32, RegProtoMin: reg32 + m.words()}}
}

// element is the port in its map.
func (p HostPort) element(comment string) nftables.SetElement {
	var key []byte
	if p.HostIP.IsValid() {
		key = append(key, p.HostIP.AsSlice()...)
	}
	key = append(key, p.Protocol, 0, 0, 0)
	key = append(key, word(p.HostPort)...)
	return nftables.SetElement{Key: key, Val: append(p.Pod.AsSlice(), word(p.PodPort)...), Comment: comment}
}

// word is a port as in a register.
func word(port uint16) []byte { return append(binaryutil.BigEndian.PutUint16(port), 0, 0) }

// parse reads an element; ok is false for one that element has not made.
func (m portMap) parse(e nftables.SetElement) (p HostPort, ok bool) {
	size := int(4 * m.words())
	key := e.Key
	if m.withIP {
		if len(key) < size {
			return p, false
		}
		p.HostIP, _ = netip.AddrFromSlice(key[:size])
		key = key[size:]
	}
	if len(key) != 8 || len(e.Val) != size+4 {
		return p, false
	}
	p.Protocol, p.HostPort = key[0], binaryutil.BigEndian.Uint16(key[4:])
	p.Pod, _ = netip.AddrFromSlice(e.Val[:size])
	p.PodPort = binaryutil.BigEndian.Uint16(e.Val[size:])
	return p, true
}

// ErrInUse says that a host port is another pod's.
var ErrInUse = errors.New("the host port is another pod's")

// OpenPorts opens host ports, all or none. id is whose they are, for people who look at the table.
func (f *Filter) OpenPorts(network, id string, ports []HostPort) error {
	t := table(network)
	err := f.with(func(conn *nftables.Conn) error {
		for _, p := range ports {
			if err := conn.SetAddElements(p.portMap().set(t), []nftables.SetElement{p.element(id)}); err != nil {
				return fmt.Errorf("%s: %w", p, err)
			}
		}
		failpoint.Reach("net.open-ports")
		err := conn.Flush()
		failpoint.Reach("net.ports-open")
		return err
	})
	if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EEXIST) { // the key is there with another value
		return errors.Join(ErrInUse, f.taken(network, ports))
	}
	if err != nil {
		return fmt.Errorf("open host ports of %s: %w", id, err)
	}
	return nil
}

// taken names the ports that are others'.
func (f *Filter) taken(network string, ports []HostPort) error {
	open, err := f.Ports(network)
	if err != nil {
		return err
	}
	var names []string
	for _, p := range ports {
		for _, o := range open {
			if o.Protocol == p.Protocol && o.HostPort == p.HostPort && o.HostIP == p.HostIP && o.Pod.BitLen() == p.Pod.BitLen() && o.Pod != p.Pod {
				names = append(names, fmt.Sprintf("%s is of the pod with address %s", p, o.Pod))
			}
		}
	}
	return errors.New(strings.Join(names, ", "))
}

// ClosePorts closes host ports. It may be repeated, and some may be closed already, or be another pod's by now: so it looks
// first, for the kernel deletes elements by their keys alone, and none if one is not there (NFT_MSG_DESTROYSETELEM is of Linux 6.3).
func (f *Filter) ClosePorts(network string, ports []HostPort) error {
	if len(ports) == 0 {
		return nil
	}
	open, err := f.Ports(network)
	if err != nil {
		return err
	}
	return f.closePorts(network, slices.DeleteFunc(slices.Clone(ports), func(p HostPort) bool { return !slices.Contains(open, p) }))
}

func (f *Filter) closePorts(network string, ports []HostPort) error {
	if len(ports) == 0 {
		return nil
	}
	t := table(network)
	err := f.with(func(conn *nftables.Conn) error {
		for _, p := range ports {
			if err := conn.SetDeleteElements(p.portMap().set(t), []nftables.SetElement{p.element("")}); err != nil {
				return fmt.Errorf("%s: %w", p, err)
			}
		}
		failpoint.Reach("net.close-ports")
		err := conn.Flush()
		failpoint.Reach("net.ports-closed")
		return err
	})
	if err != nil {
		return fmt.Errorf("close host ports: %w", err)
	}
	return nil
}

// Ports returns the host ports that are open; none where the network has no table.
func (f *Filter) Ports(network string) (all []HostPort, err error) {
	t := table(network)
	err = f.with(func(conn *nftables.Conn) error {
		tables, err := conn.ListTablesOfFamily(nftables.TableFamilyINet)
		if err != nil || !slices.ContainsFunc(tables, func(other *nftables.Table) bool { return other.Name == t.Name }) {
			return err
		}
		for _, m := range maps {
			elements, err := conn.GetSetElements(m.set(t))
			if err != nil {
				return err
			}
			for _, e := range elements {
				if p, ok := m.parse(e); ok {
					all = append(all, p)
				}
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read host ports of network %s: %w", network, err)
	}
	return all, nil
}

// ForgetFlows has the kernel forget what it knows of UDP conversations with host ports: those that
// began before a port was a pod's would go on without it, and those with a pod that is gone would go to nobody, or to who has its address next.
func (f *Filter) ForgetFlows(ports []HostPort) error {
	filters := map[netlink.InetFamily][]netlink.CustomConntrackFilter{}
	for _, p := range ports {
		if p.Protocol != unix.IPPROTO_UDP {
			continue
		}
		filter := &netlink.ConntrackFilter{}
		err := errors.Join(filter.AddProtocol(p.Protocol), filter.AddPort(netlink.ConntrackOrigDstPort, p.HostPort))
		if p.HostIP.IsValid() {
			err = errors.Join(err, filter.AddIP(netlink.ConntrackOrigDstIP, p.HostIP.AsSlice()))
		}
		if err != nil {
			return fmt.Errorf("forget conversations with %s: %w", p, err)
		}
		family := netlink.InetFamily(unix.AF_INET)
		if p.Pod.Is6() {
			family = unix.AF_INET6
		}
		filters[family] = append(filters[family], filter)
	}
	for family, some := range filters {
		err := f.withFlows(func(handle *netlink.Handle) error {
			failpoint.Reach("net.forget-flows")
			_, err := handle.ConntrackDeleteFilters(netlink.ConntrackTable, family, some...)
			failpoint.Reach("net.flows-forgotten")
			return err
		})
		if err != nil && !errors.Is(err, unix.ENOENT) { // ended meanwhile
			return fmt.Errorf("forget conversations with host ports: %w", err)
		}
	}
	return nil
}
