// Package conf parses the configuration of berth-net. It combines an administrator's file or the
// daemon's options with the runtime's arguments.
//
// # Contract
//
// Parse is pure. Its result is valid: the kernel accepts each name, each range has an address to
// assign, and each family has at most one range. Errors are *types.Error with the codes of the CNI
// specification, and name the key.
package conf

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/utils"
	"golang.org/x/sys/unix"
)

// Defaults of keys.
const (
	DefaultBridge  = "berth0"
	DefaultDataDir = "/var/lib/cni/berth-net"
)

// Type is the plugin's type in configurations and its file name.
const Type = "berth-net"

const (
	minMTU   = 1280 // the kernel removes IPv6 from an interface with a smaller MTU
	maxMTU   = 65535
	maxPorts = 4096 // host ports per pod
)

// CapabilityRanges is the capability for ranges of addresses.
const CapabilityRanges = "ipRanges"

// removed are keys of earlier versions, which Parse refuses, with the text that says what to do
// instead.
var removed = map[string]string{
	"checkSource": "remove it, and drop NET_RAW from pods, or use a network plugin that checks source addresses",
	"isolation":   "remove it, and block traffic by nftables rules of your own or by a network plugin with NetworkPolicy",
}

// Net is the configuration of a network with the runtime's arguments for one attachment.
type Net struct {
	types.NetConf

	Bridge string `json:"bridge,omitempty"` // name; default berth0
	MTU    int    `json:"mtu,omitempty"`    // 0: the MTU of the node's default route
	// of pods, at most one per family; the bridge has the first address
	Subnets []netip.Prefix `json:"subnets,omitempty"`
	Routes  []Route        `json:"routes,omitempty"` // of pods, through the bridge; nil: default routes
	// replace pods' source addresses by the node's address in packets to other networks; default
	// true
	Masquerade   *bool          `json:"masquerade,omitempty"`
	NoMasquerade []netip.Prefix `json:"noMasquerade,omitempty"` // destinations without masquerading
	// let the bridge send a packet back through its port; default true
	Hairpin *bool  `json:"hairpin,omitempty"`
	DataDir string `json:"dataDir,omitempty"` // of addresses, with a subdirectory per network

	Runtime struct {
		PortMappings []PortMapping `json:"portMappings,omitempty"`
		IPRanges     [][]IPRange   `json:"ipRanges,omitempty"`
		Bandwidth    Bandwidth     `json:"bandwidth,omitzero"`
		PreferredIPs []netip.Addr  `json:"preferredIPs,omitempty"` // assigned if they are free; for restored pods
	} `json:"runtimeConfig,omitempty"`

	Valid []types.GCAttachment `json:"-"` // attachments that GC keeps

	Ranges []Range `json:"-"` // ranges of the attachment: from the runtime, or Subnets
	Ports  []Port  `json:"-"` // from Runtime.PortMappings
}

// Route is a destination that pods reach through the bridge.
type Route struct {
	Dst netip.Prefix `json:"dst"`
}

// PortMapping is an item of the capability portMappings (CNI CONVENTIONS.md).
type PortMapping struct {
	HostPort      int    `json:"hostPort"`
	ContainerPort int    `json:"containerPort"`
	Protocol      string `json:"protocol,omitempty"`
	HostIP        string `json:"hostIP,omitempty"`
}

// Bandwidth is the value of the capability bandwidth. Rates are in bits per second, and bursts in
// bits. 0 means no limit. Ingress is traffic to the pod.
type Bandwidth struct {
	IngressRate  uint64 `json:"ingressRate,omitempty"`
	IngressBurst uint64 `json:"ingressBurst,omitempty"`
	EgressRate   uint64 `json:"egressRate,omitempty"`
	EgressBurst  uint64 `json:"egressBurst,omitempty"`
}

// IPRange is an item of the capability ipRanges.
type IPRange struct {
	Subnet     netip.Prefix `json:"subnet"`
	RangeStart netip.Addr   `json:"rangeStart,omitzero"`
	RangeEnd   netip.Addr   `json:"rangeEnd,omitzero"`
	Gateway    netip.Addr   `json:"gateway,omitzero"`
}

// Range is the source of a pod's address of one family.
type Range struct {
	Subnet      netip.Prefix // masked
	First, Last netip.Addr   // inclusive
	Gateway     netip.Addr   // the bridge's address, which is never assigned
}

// Port is a host port. An invalid HostIP means all of the node's addresses.
type Port struct {
	Protocol uint8 // unix.IPPROTO_TCP, _UDP or _SCTP
	HostIP   netip.Addr
	HostPort uint16
	PodPort  uint16
}

// Parse decodes a plugin's configuration with the runtime's arguments.
func Parse(data []byte) (*Net, error) {
	n := &Net{}
	if err := json.Unmarshal(data, n); err != nil {
		return nil, types.NewError(types.ErrDecodingFailure, "configuration of berth-net cannot be decoded", err.Error())
	}
	refuse := func() error { return refuseRemoved(data) }
	for _, step := range []func() error{refuse, n.names, n.numbers, n.routes, n.ranges, n.ports} {
		if err := step(); err != nil {
			return nil, types.NewError(types.ErrInvalidNetworkConfig, "invalid configuration of berth-net", err.Error())
		}
	}
	return n, nil
}

func refuseRemoved(data []byte) error {
	var keys map[string]json.RawMessage
	if err := json.Unmarshal(data, &keys); err != nil {
		return err
	}
	for _, key := range slices.Sorted(maps.Keys(removed)) {
		for stated := range keys {
			if strings.EqualFold(stated, key) { // as package json compares them
				return fmt.Errorf("%s is no longer a key: %s", stated, removed[key])
			}
		}
	}
	return nil
}

// ParseNames decodes only the names and directories, for DEL. If ADD refuses a configuration, it
// creates nothing. So such a configuration must not block the removal of a pod.
func ParseNames(data []byte) (*Net, error) {
	var names struct {
		types.NetConf
		Bridge  string `json:"bridge"`
		DataDir string `json:"dataDir"`
	}
	if err := json.Unmarshal(data, &names); err != nil {
		return nil, types.NewError(types.ErrDecodingFailure, "configuration of berth-net cannot be decoded", err.Error())
	}
	n := &Net{NetConf: names.NetConf, Bridge: names.Bridge, DataDir: names.DataDir}
	if err := n.names(); err != nil {
		return nil, types.NewError(types.ErrInvalidNetworkConfig, "invalid configuration of berth-net", err.Error())
	}
	return n, nil
}

// ParseGC decodes the names and directories, and the attachments that GC keeps. It refuses a
// configuration without the list of attachments, because GC would release everything.
func ParseGC(data []byte) (*Net, error) {
	n, err := ParseNames(data)
	if err != nil {
		return nil, err
	}
	// The second key is its name in specification 1.1.0 as first published. A runtime without
	// attachments may pass null.
	var raw struct {
		Valid       json.RawMessage `json:"cni.dev/valid-attachments"`
		Attachments json.RawMessage `json:"cni.dev/attachments"`
	}
	if err := json.Unmarshal(data, &raw); err != nil {
		return nil, types.NewError(types.ErrDecodingFailure, "configuration of berth-net cannot be decoded", err.Error())
	}
	if raw.Valid == nil && raw.Attachments == nil {
		return nil, types.NewError(types.ErrInvalidNetworkConfig, "GC needs cni.dev/valid-attachments", "")
	}
	for _, list := range []json.RawMessage{raw.Valid, raw.Attachments} {
		var some []types.GCAttachment
		if list == nil {
			continue
		}
		if err := json.Unmarshal(list, &some); err != nil {
			return nil, types.NewError(types.ErrDecodingFailure, "cni.dev/valid-attachments cannot be decoded", err.Error())
		}
		n.Valid = append(n.Valid, some...)
	}
	return n, nil
}

func (n *Net) names() error {
	if err := utils.ValidateNetworkName(n.Name); err != nil {
		return err
	}
	if len(n.Name) > 128 { // the name is a part of a table's name
		return fmt.Errorf("name: longer than 128 bytes")
	}
	if n.Bridge == "" {
		n.Bridge = DefaultBridge
	}
	// The kernel uses a colon for aliases and replaces a percent sign by a number.
	if len(n.Bridge) >= unix.IFNAMSIZ || n.Bridge == "." || n.Bridge == ".." || n.Bridge == "all" ||
		n.Bridge == "default" ||
		strings.ContainsFunc(n.Bridge, func(r rune) bool { return r <= ' ' || r > '~' || strings.ContainsRune("/:%@", r) }) {
		return fmt.Errorf("bridge: %q is not a valid interface name", n.Bridge)
	}
	if n.DataDir == "" {
		n.DataDir = DefaultDataDir
	}
	if !filepath.IsAbs(n.DataDir) {
		return fmt.Errorf("dataDir: %q is not an absolute path", n.DataDir)
	}
	return nil
}

func (n *Net) numbers() error {
	for _, one := range []struct {
		key         string
		rate, burst uint64
	}{{"ingress", n.Runtime.Bandwidth.IngressRate, n.Runtime.Bandwidth.IngressBurst}, {"egress",
		n.Runtime.Bandwidth.EgressRate, n.Runtime.Bandwidth.EgressBurst}} {
		if (one.rate == 0) != (one.burst == 0) {
			return fmt.Errorf("bandwidth: %sRate and %sBurst must both be set", one.key, one.key)
		}
		if one.rate != 0 && one.rate < 8 || one.burst > math.MaxUint32 || one.burst != 0 && one.burst < 8 {
			return fmt.Errorf("bandwidth: %sRate %d or %sBurst %d is out of range", one.key, one.rate, one.key, one.burst)
		}
	}
	if n.MTU != 0 && (n.MTU < minMTU || n.MTU > maxMTU) {
		return fmt.Errorf("mtu: %d is not between %d and %d", n.MTU, minMTU, maxMTU)
	}
	for i, p := range n.NoMasquerade {
		if !p.IsValid() || p.Addr().Is4In6() {
			return fmt.Errorf("noMasquerade: the entry with index %d is not a network", i)
		}
		n.NoMasquerade[i] = p.Masked()
	}
	return nil
}

func (n *Net) routes() error {
	for i, r := range n.Routes {
		if !r.Dst.IsValid() || r.Dst.Addr().Is4In6() {
			return fmt.Errorf("routes: the entry with index %d has no destination", i)
		}
		n.Routes[i].Dst = r.Dst.Masked()
	}
	return nil
}

// Masquerades returns Masquerade, or the default if it is not set.
func (n *Net) Masquerades() bool { return n.Masquerade == nil || *n.Masquerade }

// Hairpins returns Hairpin, or the default if it is not set.
func (n *Net) Hairpins() bool { return n.Hairpin == nil || *n.Hairpin }

// Dir returns the directory of the network's addresses.
func (n *Net) Dir() string { return filepath.Join(n.DataDir, n.Name) }

// Key identifies the network on the node by its name and the directory of its addresses. Two
// daemons with different directories have different networks, even with the same name.
func (n *Net) Key() string {
	sum := sha256.Sum256([]byte(n.Dir()))
	return n.Name + "-" + hex.EncodeToString(sum[:4])
}

// ranges chooses the ranges of the attachment. A runtime passes the node's pod CIDR in ipRanges,
// which replaces the configured subnets.
func (n *Net) ranges() error {
	asked := make([]IPRange, 0, 2)
	for _, s := range n.Subnets {
		asked = append(asked, IPRange{Subnet: s})
	}
	if len(n.Runtime.IPRanges) > 0 {
		asked = asked[:0]
	}
	for _, set := range n.Runtime.IPRanges {
		if len(set) != 1 {
			return fmt.Errorf("ipRanges: a set has %d ranges, the limit is 1", len(set))
		}
		asked = append(asked, set[0])
	}
	var have4, have6 bool
	for _, a := range asked {
		r, err := a.complete()
		if err != nil {
			return err
		}
		if family := &have4; r.Subnet.Addr().Is6() {
			family = &have6
			if *family {
				return fmt.Errorf("subnet %s is the second IPv6 subnet", r.Subnet)
			}
			*family = true
		} else if *family {
			return fmt.Errorf("subnet %s is the second IPv4 subnet", r.Subnet)
		} else {
			*family = true
		}
		n.Ranges = append(n.Ranges, r)
	}
	return nil
}

// complete checks a range and sets its defaults: the whole subnet, with the first address as
// gateway.
func (a IPRange) complete() (Range, error) {
	if !a.Subnet.IsValid() || a.Subnet.Addr().Is4In6() {
		return Range{}, fmt.Errorf("subnet: %s is not a network", a.Subnet)
	}
	r := Range{Subnet: a.Subnet.Masked()}
	if r.Subnet.Bits() > r.Subnet.Addr().BitLen()-2 {
		return Range{}, fmt.Errorf("subnet %s has no room for a gateway and a pod", r.Subnet)
	}
	if r.Subnet.Addr().IsMulticast() || r.Subnet.Addr().IsLoopback() || r.Subnet.Addr().IsLinkLocalUnicast() ||
		r.Subnet.Addr().IsUnspecified() {
		return Range{}, fmt.Errorf("subnet %s cannot be used for pods", r.Subnet)
	}
	first, last := r.Subnet.Addr().Next(), lastOf(r.Subnet)
	if first.Is4() {
		last = last.Prev() // without the broadcast address
	}
	r.First, r.Last, r.Gateway = first, last, first
	for _, given := range []struct {
		key  string
		addr netip.Addr
		to   *netip.Addr
	}{{"rangeStart", a.RangeStart, &r.First}, {"rangeEnd", a.RangeEnd, &r.Last}, {"gateway", a.Gateway, &r.Gateway}} {
		if !given.addr.IsValid() {
			continue
		}
		addr := given.addr.Unmap()
		if addr.Zone() != "" || addr.Less(first) || last.Less(addr) || addr.BitLen() != first.BitLen() {
			return Range{}, fmt.Errorf("%s: %s is not an address of subnet %s", given.key, given.addr, r.Subnet)
		}
		*given.to = addr
	}
	if r.Last.Less(r.First) || (r.First == r.Last && r.First == r.Gateway) {
		return Range{}, fmt.Errorf("subnet %s: no address between %s and %s is free for pods", r.Subnet, r.First, r.Last)
	}
	return r, nil
}

// lastOf returns the last address of a network.
func lastOf(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for bit := p.Bits(); bit < len(b)*8; bit++ {
		b[bit/8] |= 0x80 >> (bit % 8)
	}
	last, _ := netip.AddrFromSlice(b) // cannot fail: b has the length of an address
	return last
}

var protocols = map[string]uint8{
	"":     unix.IPPROTO_TCP,
	"tcp":  unix.IPPROTO_TCP,
	"udp":  unix.IPPROTO_UDP,
	"sctp": unix.IPPROTO_SCTP,
}

// ProtocolName returns the name of a port's protocol.
func (p Port) ProtocolName() string {
	switch p.Protocol {
	case unix.IPPROTO_TCP:
		return "tcp"
	case unix.IPPROTO_UDP:
		return "udp"
	}
	return "sctp"
}

func (n *Net) ports() error {
	if len(n.Runtime.PortMappings) > maxPorts {
		return fmt.Errorf("portMappings: %d ports, the limit is %d", len(n.Runtime.PortMappings), maxPorts)
	}
	for _, m := range n.Runtime.PortMappings {
		if m.HostPort == 0 {
			continue // no host port
		}
		protocol, known := protocols[strings.ToLower(m.Protocol)]
		if !known {
			return fmt.Errorf("portMappings: protocol %q is neither tcp, udp nor sctp", m.Protocol)
		}
		if m.HostPort < 1 || m.HostPort > 65535 || m.ContainerPort < 1 || m.ContainerPort > 65535 {
			return fmt.Errorf("portMappings: %d:%d: a port is a number from 1 to 65535", m.HostPort, m.ContainerPort)
		}
		port := Port{Protocol: protocol, HostPort: uint16(m.HostPort), PodPort: uint16(m.ContainerPort)}
		if m.HostIP != "" {
			ip, err := netip.ParseAddr(m.HostIP)
			if err != nil || ip.Zone() != "" {
				return fmt.Errorf("portMappings: hostIP %q is not an IP address", m.HostIP)
			}
			if port.HostIP = ip.Unmap(); port.HostIP == netip.IPv6Loopback() {
				continue // the kernel cannot redirect packets from ::1
			}
		}
		n.Ports = append(n.Ports, port)
	}
	return nil
}
