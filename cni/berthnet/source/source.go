// Package source compiles a program in classic BPF that checks the source addresses of frames from
// a pod. The kernel runs it at the ingress of the pod's port (tc's classifier bpf), before the
// bridge and the packet filter.
//
// # Contract
//
// Program is pure. The compiled program passes only frames of IPv4, ARP and IPv6 whose source is
// the pod's hardware address and one of its IP addresses. It drops tagged frames. The kernel
// removes a VLAN tag without VLAN (VID 0) before the program, and since Linux 5.0 a second one
// after it. The program drops frames with two tags.
//
// So a pod cannot impersonate another pod or the node, or attract their packets. It can announce
// only its addresses to neighbours, and cannot send router advertisements or redirects. It cannot
// reach 127.0.0.0/8 of the node either, which the bridge would accept because of host ports
// (CVE-2020-8558). This protection does not depend on the packet filter's rules.
package source

import (
	"encoding/binary"
	"net"
	"net/netip"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// Results of the program for a classifier with direct action. A program that reads beyond the end
// of a frame returns 0, TC_ACT_OK. Then the frame would pass and skip the next classifier, which
// limits the rate. So the program checks lengths first.
const (
	Pass = 0xffffffff // TC_ACT_UNSPEC: continue with the next classifier
	Drop = 2          // TC_ACT_SHOT
)

// Offsets in a frame.
const (
	ethernet   = 14
	ethSource  = 6
	ethType    = 12
	ip4Source  = ethernet + 12
	ip4Dest    = ethernet + 16
	ip4Size    = ethernet + 20
	arpSender  = ethernet + 8  // hardware address
	arpSender4 = ethernet + 14 // IPv4 address
	arpSize    = ethernet + 28
	ip6Next    = ethernet + 6
	ip6Source  = ethernet + 8
	ip6Size    = ethernet + 40
)

const (
	arpHeader   = 0x00010800 // Ethernet and IPv4
	arpLengths  = 0x0604
	maxHeaders  = 4 // parsed extension headers of IPv6
	icmpRouter  = 134
	icmpNA      = 136 // neighbour advertisement
	icmpGoThere = 137 // redirect
)

// Program returns the program for a pod with a hardware address and at most one IP address per
// family.
func Program(mac net.HardwareAddr, ips []netip.Addr) []bpf.Instruction {
	var ip4, ip6 netip.Addr
	for _, ip := range ips {
		if ip.Is4() {
			ip4 = ip
		} else {
			ip6 = ip
		}
	}
	var a assembler
	a.atLeast(ethernet)
	a.load(ethSource, 4)
	a.unless(binary.BigEndian.Uint32(mac), drop)
	a.load(ethSource+4, 2)
	a.unless(uint32(binary.BigEndian.Uint16(mac[4:])), drop)
	a.load(ethType, 2)
	a.when(unix.ETH_P_IP, "ip4")
	a.when(unix.ETH_P_ARP, "arp")
	a.when(unix.ETH_P_IPV6, "ip6")
	a.to(drop)

	a.label("ip4")
	a.ip4(ip4)
	a.label("arp")
	a.arp(mac, ip4)
	a.label("ip6")
	a.ip6(mac, ip6)

	a.label(pass)
	a.add(bpf.RetConstant{Val: Pass})
	a.label(drop)
	a.add(bpf.RetConstant{Val: Drop})
	return a.program()
}

// ip4 emits the checks of IPv4, the last instructions of the program.
func (a *assembler) ip4(ip netip.Addr) {
	if !ip.IsValid() {
		a.to(drop)
		return
	}
	a.atLeast(ip4Size)
	a.load(ip4Source, 4)
	a.unless(word(ip), drop)
	a.load(ip4Dest, 1)
	a.when(127, drop)
	a.to(pass)
}

// arp emits the checks of ARP. A request without sender address (a probe) announces no address and
// passes.
func (a *assembler) arp(mac net.HardwareAddr, ip netip.Addr) {
	if !ip.IsValid() {
		a.to(drop)
		return
	}
	a.atLeast(arpSize)
	a.load(ethernet, 4)
	a.unless(arpHeader, drop)
	a.load(ethernet+4, 2)
	a.unless(arpLengths, drop)
	a.load(arpSender, 4)
	a.unless(binary.BigEndian.Uint32(mac), drop)
	a.load(arpSender+4, 2)
	a.unless(uint32(binary.BigEndian.Uint16(mac[4:])), drop)
	a.load(arpSender4, 4)
	a.when(word(ip), pass)
	a.when(0, pass)
	a.to(drop)
}

// ip6 emits the checks of IPv6.
func (a *assembler) ip6(mac net.HardwareAddr, ip netip.Addr) {
	if !ip.IsValid() {
		a.to(drop)
		return
	}
	local := linkLocal(mac)
	a.atLeast(ip6Size)
	for i, from := range []netip.Addr{ip, local, netip.IPv6Unspecified()} { // "::" is the source of duplicate address detection
		next := []string{"not-own", "not-local", drop}[i]
		a.compare6(func(word int) { a.load(uint32(ip6Source+4*word), 4) }, from, next)
		a.to("headers")
		if i < 2 {
			a.label(next)
		}
	}

	// Skip extension headers, which could hide ICMPv6. X is the offset of the next header.
	// Receivers drop fragmented neighbour messages (RFC 6980).
	a.label("headers")
	a.load(ip6Next, 1)
	a.add(bpf.LoadConstant{Dst: bpf.RegX, Val: ip6Size})
	for i := range maxHeaders {
		look, skip := "header"+string(rune('0'+i)), "skip"+string(rune('0'+i))
		a.when(unix.IPPROTO_ICMPV6, "icmp")
		for _, extension := range []uint32{unix.IPPROTO_HOPOPTS, unix.IPPROTO_ROUTING, unix.IPPROTO_DSTOPTS} {
			a.when(extension, skip)
		}
		a.to(pass)
		a.label(skip)
		a.atLeastX(2)
		a.add(
			// The type of the next header.
			bpf.LoadIndirect{Off: 0, Size: 1},
			bpf.StoreScratch{Src: bpf.RegA, N: 0},
			// Skip this header: its length field counts units of 8 bytes after the first 8.
			bpf.LoadIndirect{Off: 1, Size: 1},
			bpf.ALUOpConstant{Op: bpf.ALUOpAdd, Val: 1},
			bpf.ALUOpConstant{Op: bpf.ALUOpMul, Val: 8},
			bpf.ALUOpX{Op: bpf.ALUOpAdd}, bpf.TAX{},
			bpf.LoadScratch{Dst: bpf.RegA, N: 0},
		)
		a.label(look)
	}
	a.to(drop) // too many headers

	a.label("icmp")
	a.atLeastX(1)
	a.add(bpf.LoadIndirect{Off: 0, Size: 1})
	a.when(icmpRouter, drop)
	a.when(icmpGoThere, drop)
	a.unless(icmpNA, pass)
	const target = 8
	a.atLeastX(target + 16)
	load := func(word int) { a.add(bpf.LoadIndirect{Off: uint32(target + 4*word), Size: 4}) }
	a.compare6(load, ip, "target-not-own")
	a.to(pass)
	a.label("target-not-own")
	a.compare6(load, local, drop)
	a.to(pass)
}

// compare6 jumps to the label other unless the address equals ip. load loads a word of the address.
func (a *assembler) compare6(load func(word int), ip netip.Addr, other string) {
	b := ip.As16()
	for i := range 4 {
		load(i)
		a.unless(binary.BigEndian.Uint32(b[4*i:]), other)
	}
}

func word(ip netip.Addr) uint32 {
	b := ip.As4()
	return binary.BigEndian.Uint32(b[:])
}

// linkLocal returns the address that the kernel derives from a hardware address (RFC 4291, appendix
// A).
func linkLocal(mac net.HardwareAddr) netip.Addr {
	b := [16]byte{
		0: 0xfe, 1: 0x80,
		8: mac[0] ^ 2, 9: mac[1], 10: mac[2], 11: 0xff,
		12: 0xfe, 13: mac[3], 14: mac[4], 15: mac[5],
	}
	return netip.AddrFrom16(b)
}
