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
	"golang.org/x/sys/unix"

	"berth/cni/berthnet/conf"
	"berth/internal/failpoint"
)

// HostPort is a port of the node that leads to a pod.
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

// HostPorts returns the host ports of a pod with these addresses. A port without host IP applies to
// both families.
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

// portMap is a map of host ports. The key is protocol and port, with the node's address in maps of
// specific addresses. The value is a pod's address and port.
type portMap struct {
	name   string
	v6     bool
	withIP bool
}

// maps are all maps. Maps of specific node addresses come first.
var maps = []portMap{{"ports4of", false, true}, {"ports6of", true, true}, {"ports4", false, false},
	{"ports6", true, false}}

// portMap returns the map that the port belongs to.
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
	return &nftables.Set{
		Table:         t,
		Name:          m.name,
		IsMap:         true,
		Concatenation: true,
		KeyType:       nftables.MustConcatSetType(key...),
		DataType:      nftables.MustConcatSetType(m.addressType(), nftables.TypeInetService),
	}
}

// words returns the number of 32-bit registers of an address.
func (m portMap) words() uint32 {
	if m.v6 {
		return 4
	}
	return 1
}

// lookUp looks up a packet's destination. It loads the pod's address into the first registers and
// its port into the next register. If nothing matches, the packet continues with the next rule.
func (m portMap) lookUp() expressions {
	next := uint32(reg32)
	var parts expressions
	if m.withIP {
		offset := uint32(16)
		if m.v6 {
			offset = 24
		}
		parts = append(parts, &expr.Payload{
			DestRegister: next,
			Base:         expr.PayloadBaseNetworkHeader,
			Offset:       offset,
			Len:          4 * m.words(),
		})
		next += m.words()
	}
	return append(parts,
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: next},
		&expr.Payload{DestRegister: next + 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Lookup{SourceRegister: reg32, SetName: m.name, IsDestRegSet: true, DestRegister: reg32})
}

// toPod redirects a packet to the pod in the registers.
func (m portMap) toPod() expressions {
	family := uint32(unix.NFPROTO_IPV4)
	if m.v6 {
		family = unix.NFPROTO_IPV6
	}
	return expressions{&expr.NAT{
		Type:        expr.NATTypeDestNAT,
		Family:      family,
		RegAddrMin:  reg32,
		RegProtoMin: reg32 + m.words(),
	}}
}

// element returns the port's element in its map.
func (p HostPort) element(comment string) nftables.SetElement {
	var key []byte
	if p.HostIP.IsValid() {
		key = append(key, p.HostIP.AsSlice()...)
	}
	key = append(key, p.Protocol, 0, 0, 0)
	key = append(key, word(p.HostPort)...)
	return nftables.SetElement{Key: key, Val: append(p.Pod.AsSlice(), word(p.PodPort)...), Comment: comment}
}

// redirectionSet is a family's set of connections that host ports redirect. An element has the
// protocol, the original port, and the pod's address and port.
type redirectionSet struct {
	name string
	v6   bool
}

var redirections = []redirectionSet{{"redirected4", false}, {"redirected6", true}}

func (p HostPort) redirectionSet() redirectionSet {
	if p.Pod.Is6() {
		return redirections[1]
	}
	return redirections[0]
}

func (r redirectionSet) addresses() portMap { return portMap{v6: r.v6} }

func (r redirectionSet) set(t *nftables.Table) *nftables.Set {
	return &nftables.Set{Table: t, Name: r.name, Concatenation: true, KeyType: nftables.MustConcatSetType(
		nftables.TypeInetProto, nftables.TypeInetService, r.addresses().addressType(), nftables.TypeInetService)}
}

// match matches packets of connections in the set.
func (r redirectionSet) match() expressions {
	offset, words := uint32(16), r.addresses().words()
	if r.v6 {
		offset = 24
	}
	return expressions{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg32},
		&expr.Ct{Key: expr.CtKeyPROTODST, Register: reg32 + 1}, // of the original direction
		&expr.Payload{DestRegister: reg32 + 2, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: 4 * words},
		&expr.Payload{DestRegister: reg32 + 2 + words, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Lookup{SourceRegister: reg32, SetName: r.name},
	}
}

// redirection returns the port's element in the set of redirections.
func (p HostPort) redirection() nftables.SetElement {
	key := append([]byte{p.Protocol, 0, 0, 0}, word(p.HostPort)...)
	key = append(key, p.Pod.AsSlice()...)
	return nftables.SetElement{Key: append(key, word(p.PodPort)...)}
}

// word encodes a port for a register.
func word(port uint16) []byte { return append(binaryutil.BigEndian.PutUint16(port), 0, 0) }

// parse decodes an element. ok is false for an element that the method element did not encode.
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

// ErrInUse means that a host port belongs to another pod.
var ErrInUse = errors.New("the host port belongs to another pod")

// Pod is a pod with host ports. The elements in the table carry ID as their comment.
type Pod struct {
	ID    string
	Ports []HostPort
}

// OpenPorts opens all host ports of a pod or none. Errors: ErrInUse if another pod has one of the
// ports; ErrGone if the network's table is missing.
func (f *Filter) OpenPorts(network string, pod Pod) error {
	err := f.with(func(conn *nftables.Conn) error {
		if err := openPorts(conn, network, []Pod{pod}); err != nil {
			return err
		}
		failpoint.Reach("net.open-ports")
		err := conn.Flush()
		failpoint.Reach("net.ports-open")
		return err
	})
	if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EEXIST) { // the key exists with another value
		return errors.Join(ErrInUse, f.taken(network, pod.Ports))
	}
	if isMissing(err) {
		err = ErrGone
	}
	if err != nil {
		return fmt.Errorf("open host ports of %s: %w", pod.ID, err)
	}
	return nil
}

// maxElements bounds the elements of a message, whose attribute is limited to 64 KiB.
const maxElements = 200

// change adds or deletes elements of a set.
type change func(*nftables.Set, []nftables.SetElement) error

// each applies the change in messages of at most maxElements.
func (do change) each(set *nftables.Set, elements []nftables.SetElement) error {
	for some := range slices.Chunk(elements, maxElements) {
		if err := do(set, some); err != nil {
			return fmt.Errorf("%s: %w", set.Name, err)
		}
	}
	return nil
}

// openPorts adds host ports to a transaction.
func openPorts(conn *nftables.Conn, network string, pods []Pod) error {
	t := table(network)
	var err error
	for _, m := range maps {
		var elements []nftables.SetElement
		for _, pod := range pods {
			for _, p := range pod.Ports {
				if p.portMap() == m {
					elements = append(elements, p.element(pod.ID))
				}
			}
		}
		err = errors.Join(err, change(conn.SetAddElements).each(m.set(t), elements))
	}
	var all []HostPort
	for _, pod := range pods {
		all = append(all, pod.Ports...)
	}
	return errors.Join(err, changeRedirections(conn.SetAddElements, t, all))
}

// changeRedirections changes the redirections of ports. Several ports may share a redirection.
func changeRedirections(do change, t *nftables.Table, ports []HostPort) error {
	var err error
	for _, r := range redirections {
		seen := map[string]bool{}
		var elements []nftables.SetElement
		for _, p := range ports {
			if e := p.redirection(); p.redirectionSet() == r && !seen[string(e.Key)] {
				seen[string(e.Key)] = true
				elements = append(elements, e)
			}
		}
		err = errors.Join(err, do.each(r.set(t), elements))
	}
	return err
}

// absent returns the host ports that are not open. If two pods have the same port, the first pod
// gets it.
func absent(pods []Pod, open []HostPort) (missing []Pod) {
	taken := map[string]bool{}
	for _, p := range open {
		taken[p.key()] = true
	}
	for _, pod := range pods {
		some := Pod{ID: pod.ID}
		for _, p := range pod.Ports {
			if !taken[p.key()] {
				taken[p.key()] = true
				some.Ports = append(some.Ports, p)
			}
		}
		missing = append(missing, some)
	}
	return missing
}

// key identifies the port's element.
func (p HostPort) key() string { return p.portMap().name + string(p.element("").Key) }

// taken returns an error that lists the ports that belong to other pods.
func (f *Filter) taken(network string, ports []HostPort) error {
	open, err := f.Ports(network)
	if err != nil {
		return err
	}
	var names []string
	for _, p := range ports {
		for _, o := range open {
			if o.Protocol == p.Protocol && o.HostPort == p.HostPort && o.HostIP == p.HostIP &&
				o.Pod.BitLen() == p.Pod.BitLen() && o.Pod != p.Pod {
				names = append(names, fmt.Sprintf("%s belongs to the pod with address %s", p, o.Pod))
			}
		}
	}
	return errors.New(strings.Join(names, ", "))
}

// ClosePorts closes host ports. It may be repeated. It reads the maps first, because meanwhile a
// port may be closed or belong to another pod. The kernel deletes elements by key only, and fails
// the whole transaction if one is missing (NFT_MSG_DESTROYSETELEM needs Linux 6.3).
func (f *Filter) ClosePorts(network string, ports []HostPort) error {
	if len(ports) == 0 {
		return nil
	}
	err := retry(func() error {
		open, err := f.Ports(network)
		if err != nil {
			return err
		}
		var gone, stay []HostPort
		for _, p := range open {
			if slices.Contains(ports, p) {
				gone = append(gone, p)
			} else {
				stay = append(stay, p)
			}
		}
		return f.closePorts(network, gone, stay)
	})
	if err != nil {
		return fmt.Errorf("close host ports: %w", err)
	}
	return nil
}

func (f *Filter) closePorts(network string, ports, stay []HostPort) error {
	if len(ports) == 0 {
		return nil
	}
	t := table(network)
	return f.with(func(conn *nftables.Conn) error {
		redirections, err := redirectionsOf(conn, t)
		if err != nil {
			return err
		}
		for _, m := range maps {
			var elements []nftables.SetElement
			for _, p := range ports {
				if p.portMap() == m {
					elements = append(elements, p.element(""))
				}
			}
			err = errors.Join(err, change(conn.SetDeleteElements).each(m.set(t), elements))
		}
		for _, p := range stay {
			delete(redirections, string(p.redirection().Key))
		}
		gone := slices.DeleteFunc(slices.Clone(ports),
			func(p HostPort) bool { return !redirections[string(p.redirection().Key)] })
		if err := errors.Join(err, changeRedirections(conn.SetDeleteElements, t, gone)); err != nil {
			return err
		}
		failpoint.Reach("net.close-ports")
		err = conn.Flush()
		failpoint.Reach("net.ports-closed")
		return err
	})
}

// redirectionsOf returns the keys of the table's redirections.
func redirectionsOf(conn *nftables.Conn, t *nftables.Table) (map[string]bool, error) {
	keys := map[string]bool{}
	for _, r := range redirections {
		elements, err := conn.GetSetElements(r.set(t))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", r.name, err)
		}
		for _, e := range elements {
			keys[string(e.Key)] = true
		}
	}
	return keys, nil
}

// Ports returns the open host ports. It returns nil if the network has no table.
func (f *Filter) Ports(network string) (all []HostPort, err error) {
	err = retry(func() error {
		all = nil
		return f.with(func(conn *nftables.Conn) (err error) {
			all, err = portsIn(conn, table(network))
			return err
		})
	})
	if err != nil {
		return nil, fmt.Errorf("read host ports of network %s: %w", network, err)
	}
	return all, nil
}

func portsIn(conn *nftables.Conn, t *nftables.Table) (all []HostPort, err error) {
	tables, err := conn.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil || !slices.ContainsFunc(tables, func(other *nftables.Table) bool { return other.Name == t.Name }) {
		return nil, err
	}
	for _, m := range maps {
		elements, err := conn.GetSetElements(m.set(t))
		if err != nil {
			return nil, err
		}
		for _, e := range elements {
			if p, ok := m.parse(e); ok {
				all = append(all, p)
			}
		}
	}
	return all, nil
}
