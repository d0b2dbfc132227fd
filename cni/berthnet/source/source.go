// Package source says what a pod may send: a program of classic BPF that the kernel runs on each frame from the pod, before anything
// else looks at it (tc's classifier bpf, at the ingress of the pod's port).
//
// # Contract
//
// Program is pure. Frames of IPv4, ARP and IPv6 pass that have the pod's hardware address and one of its addresses as their source, and no
// others: of a frame with two VLAN tags for no VLAN (VID 0) the kernel takes one off before the program sees it, and the other one after (Linux 5.0). So a
// pod can't speak as another pod or as the node, nor draw their packets to itself: neighbours can be told of its own addresses only, and router
// advertisements and redirects it cannot send at all. Nothing passes to 127.0.0.0/8 either, which the bridge would take for the sake of host ports
// (CVE-2020-8558), whether the packet filter's rules are there or not.
package source

import (
	"encoding/binary"
	"net"
	"net/netip"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// Verdicts of the program, as of a classifier that acts itself. A program that reads beyond the end of a frame ends with 0, TC_ACT_OK: the frame
// passes, and by the classifiers after it, of which one limits the rate. So lengths are looked at first.
const (
	Pass = 0xffffffff // TC_ACT_UNSPEC: on to the next classifier
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
	maxHeaders  = 4 // extension headers of IPv6 that are looked into
	icmpRouter  = 134
	icmpNA      = 136 // neighbour advertisement
	icmpGoThere = 137 // redirect
)

// Program is that of a pod with a hardware address and IP addresses, one of a family at most.
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

// ip4 ends the program.
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

// arp ends the program. A sender without address asks whether one is in use, and tells nobody anything.
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

// ip6 ends the program.
func (a *assembler) ip6(mac net.HardwareAddr, ip netip.Addr) {
	if !ip.IsValid() {
		a.to(drop)
		return
	}
	local := linkLocal(mac)
	a.atLeast(ip6Size)
	for i, from := range []netip.Addr{ip, local, netip.IPv6Unspecified()} { // the last one asks whether an address is in use
		next := []string{"not-own", "not-local", drop}[i]
		a.compare6(func(word int) { a.load(uint32(ip6Source+4*word), 4) }, from, next)
		a.to("headers")
		if i < 2 {
			a.label(next)
		}
	}

	// Headers before ICMPv6 would hide it; X is where the next one is. Neighbours' messages in fragments are refused by who gets them
	// (RFC 6980).
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
		a.add(bpf.LoadIndirect{Off: 0, Size: 1}, bpf.StoreScratch{Src: bpf.RegA, N: 0}, // the one after it
			bpf.LoadIndirect{Off: 1, Size: 1}, bpf.ALUOpConstant{Op: bpf.ALUOpAdd, Val: 1}, bpf.ALUOpConstant{Op: bpf.ALUOpMul, Val: 8},
			bpf.ALUOpX{Op: bpf.ALUOpAdd}, bpf.TAX{}, bpf.LoadScratch{Dst: bpf.RegA, N: 0})
		a.label(look)
	}
	a.to(drop) // nobody needs so many

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

// compare6 jumps to another label unless an address is as given. load loads a word of it.
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

// linkLocal is the address that the kernel gives an interface with a hardware address (RFC 4291, appendix A).
func linkLocal(mac net.HardwareAddr) netip.Addr {
	b := [16]byte{0: 0xfe, 1: 0x80, 8: mac[0] ^ 2, 9: mac[1], 10: mac[2], 11: 0xff, 12: 0xfe, 13: mac[3], 14: mac[4], 15: mac[5]}
	return netip.AddrFrom16(b)
}
