package rules

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
)

// Messages and attributes of ctnetlink (linux/netfilter/nfnetlink_conntrack.h).
const (
	getFlows   = netlink.HeaderType(unix.NFNL_SUBSYS_CTNETLINK<<8 | 1) // IPCTNL_MSG_CT_GET
	deleteFlow = netlink.HeaderType(unix.NFNL_SUBSYS_CTNETLINK<<8 | 2) // IPCTNL_MSG_CT_DELETE

	ctaTupleOrig  = 1
	ctaTupleReply = 2
	ctaID         = 12
	ctaZone       = 18
	ctaFilter     = 25 // since Linux 5.8; older kernels ignore the filter, so this package filters too

	ctaFilterOrig = 1

	ctaTupleIP    = 1
	ctaTupleProto = 2

	ctaProtoNum     = 1
	ctaProtoSrcPort = 2
	ctaProtoDstPort = 3

	filterProtoNum     = 1 << 3 // CTA_FILTER_F_CTA_PROTO_NUM
	filterProtoDstPort = 1 << 5 // CTA_FILTER_F_CTA_PROTO_DST_PORT
)

// flow is an entry of conntrack: the client's destination, and the address that answers.
type flow struct {
	protocol     uint8
	asked        netip.AddrPort
	answers      netip.AddrPort
	orig, id     []byte // raw attributes for the request that deletes the flow
	zone         []byte
	isRedirected bool
}

// ForgetOthers deletes conntrack entries of UDP flows to the node if their ports have become host
// ports. Otherwise their packets would not reach the pod. It keeps flows to other machines and
// flows through the node.
func (f *Filter) ForgetOthers(ports []HostPort) error {
	own, err := ownAddresses()
	if err != nil {
		return err
	}
	return f.forget(ports, func(c *flow, p HostPort) bool {
		return !c.isRedirected && own[c.asked.Addr()] && (!p.HostIP.IsValid() || p.HostIP == c.asked.Addr())
	})
}

// ForgetFlows deletes conntrack entries of UDP flows to pods through closed host ports. Otherwise
// their packets would be lost, or reach the next pod with the address.
func (f *Filter) ForgetFlows(ports []HostPort) error {
	return f.forget(ports, func(c *flow, p HostPort) bool {
		return c.isRedirected && c.answers == netip.AddrPortFrom(p.Pod, p.PodPort)
	})
}

// ownAddresses returns the node's addresses.
func ownAddresses() (map[netip.Addr]bool, error) {
	all, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("read the node's addresses: %w", err)
	}
	own := map[netip.Addr]bool{}
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok {
			if ip, ok := netip.AddrFromSlice(n.IP); ok {
				own[ip.Unmap()] = true
			}
		}
	}
	return own, nil
}

// forget deletes flows to UDP ports if is returns true. For each request the kernel walks
// its whole table (hundreds of thousands of buckets), which takes milliseconds. So forget sends one
// request per family. It filters by UDP, and also by port if all ports are the same.
func (f *Filter) forget(ports []HostPort, is func(*flow, HostPort) bool) error {
	for _, v6 := range []bool{false, true} {
		var some []HostPort
		for _, p := range ports {
			if p.Protocol == unix.IPPROTO_UDP && p.Pod.Is6() == v6 {
				some = append(some, p)
			}
		}
		if len(some) == 0 {
			continue
		}
		err := f.withFlows(func(conn *netlink.Conn) error {
			found, err := conn.Execute(request(getFlows, netlink.Dump, v6, flowsTo(some)))
			if err != nil {
				return err
			}
			for _, m := range found {
				c, ok := parseFlow(m.Data)
				if !ok || c.protocol != unix.IPPROTO_UDP ||
					!slices.ContainsFunc(some, func(p HostPort) bool { return c.asked.Port() == p.HostPort && is(c, p) }) {
					continue
				}
				if err := c.forget(conn, v6); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("delete conntrack entries of host ports: %w", err)
		}
	}
	return nil
}

func request(kind netlink.HeaderType, flags netlink.HeaderFlags, v6 bool, attributes []byte) netlink.Message {
	family := byte(unix.AF_INET)
	if v6 {
		family = unix.AF_INET6
	}
	return netlink.Message{Header: netlink.Header{Type: kind, Flags: netlink.Request | flags},
		Data: append([]byte{family, unix.NFNETLINK_V0, 0, 0}, attributes...)}
}

// forget deletes the flow. It ignores a missing flow.
func (c *flow) forget(flows *netlink.Conn, v6 bool) error {
	failpoint.Reach("net.forget-flow")
	_, err := flows.Execute(request(deleteFlow, netlink.Acknowledge, v6, c.attributes()))
	failpoint.Reach("net.flow-forgotten")
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// flowsTo encodes a filter for UDP flows, and for the port if all ports are the same.
func flowsTo(ports []HostPort) []byte {
	port, what := ports[0].HostPort, uint32(filterProtoNum|filterProtoDstPort)
	if slices.ContainsFunc(ports, func(p HostPort) bool { return p.HostPort != port }) {
		what = filterProtoNum
	}
	e := netlink.NewAttributeEncoder()
	e.Nested(ctaTupleOrig, func(e *netlink.AttributeEncoder) error {
		e.Nested(ctaTupleProto, func(e *netlink.AttributeEncoder) error {
			e.Uint8(ctaProtoNum, unix.IPPROTO_UDP)
			e.Bytes(ctaProtoDstPort, binary.BigEndian.AppendUint16(nil, port))
			return nil
		})
		return nil
	})
	e.Nested(ctaFilter, func(e *netlink.AttributeEncoder) error {
		e.Uint32(ctaFilterOrig, what)
		return nil
	})
	data, _ := e.Encode() // it fails only if one of the calls above has failed
	return data
}

// attributes identify the flow to the kernel.
func (c *flow) attributes() []byte {
	e := netlink.NewAttributeEncoder()
	e.Bytes(ctaTupleOrig|netlink.Nested, c.orig)
	e.Bytes(ctaID, c.id)
	if c.zone != nil {
		e.Bytes(ctaZone, c.zone)
	}
	data, _ := e.Encode()
	return data
}

// parseFlow decodes the kernel's message about a flow. ok is false if an attribute is missing.
func parseFlow(data []byte) (c *flow, ok bool) {
	const header = 4 // nfgenmsg
	if len(data) < header {
		return nil, false
	}
	d, err := netlink.NewAttributeDecoder(data[header:])
	if err != nil {
		return nil, false
	}
	c = &flow{}
	var asked, answers endpoints
	for d.Next() {
		switch d.Type() {
		case ctaTupleOrig:
			c.orig = d.Bytes()
			asked = parseTuple(c.orig)
		case ctaTupleReply:
			answers = parseTuple(d.Bytes())
		case ctaID:
			c.id = d.Bytes()
		case ctaZone:
			c.zone = d.Bytes()
		}
	}
	c.protocol = asked.protocol
	c.asked = netip.AddrPortFrom(asked.dst, asked.dstPort)
	c.answers = netip.AddrPortFrom(answers.src, answers.srcPort)
	c.isRedirected = c.asked != c.answers
	return c, d.Err() == nil && c.orig != nil && c.id != nil && asked.dst.IsValid() && answers.src.IsValid()
}

// endpoints are the addresses and ports of one direction of a flow.
type endpoints struct {
	protocol         uint8
	src, dst         netip.Addr
	srcPort, dstPort uint16
}

func parseTuple(data []byte) (t endpoints) {
	d, err := netlink.NewAttributeDecoder(data)
	if err != nil {
		return t
	}
	for d.Next() {
		switch d.Type() {
		case ctaTupleIP:
			d.Nested(func(d *netlink.AttributeDecoder) error {
				for d.Next() {
					ip, _ := netip.AddrFromSlice(d.Bytes())
					if d.Type()%2 == 1 { // CTA_IP_V4_SRC, CTA_IP_V6_SRC
						t.src = ip
					} else {
						t.dst = ip
					}
				}
				return nil
			})
		case ctaTupleProto:
			d.Nested(func(d *netlink.AttributeDecoder) error {
				d.ByteOrder = binary.BigEndian
				for d.Next() {
					switch d.Type() {
					case ctaProtoNum:
						t.protocol = d.Uint8()
					case ctaProtoSrcPort:
						t.srcPort = d.Uint16()
					case ctaProtoDstPort:
						t.dstPort = d.Uint16()
					}
				}
				return nil
			})
		}
	}
	return t
}
