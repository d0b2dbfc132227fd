package source

import (
	"encoding/binary"
	"net"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/net/bpf"

	"berth/internal/testutil"
)

var (
	ownMAC   = net.HardwareAddr{0x0a, 0x58, 10, 99, 0, 2}
	otherMAC = net.HardwareAddr{0x0a, 0x58, 10, 99, 0, 3}
	own4     = netip.MustParseAddr("10.99.0.2")
	other4   = netip.MustParseAddr("10.99.0.3")
	own6     = netip.MustParseAddr("fd99::2")
	other6   = netip.MustParseAddr("fd99::3")
	ownLocal = netip.MustParseAddr("fe80::858:aff:fe63:2")
	none4    = netip.IPv4Unspecified()
	none6    = netip.IPv6Unspecified()
)

func frame(mac net.HardwareAddr, kind uint16, body ...[]byte) []byte {
	f := append([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, mac...)
	f = binary.BigEndian.AppendUint16(f, kind)
	return append(f, slices.Concat(body...)...)
}

func ip4(src, dst netip.Addr) []byte {
	return slices.Concat([]byte{0x45, 0, 0, 20, 0, 0, 0, 0, 64, 17, 0, 0}, src.AsSlice(), dst.AsSlice())
}

func arp(mac net.HardwareAddr, ip netip.Addr) []byte {
	return slices.Concat([]byte{0, 1, 8, 0, 6, 4, 0, 2}, mac, ip.AsSlice(), make([]byte, 6), other4.AsSlice())
}

func ip6(src netip.Addr, next byte) []byte {
	return slices.Concat([]byte{0x60, 0, 0, 0, 0, 0, next, 255}, src.AsSlice(), other6.AsSlice())
}

// extension returns an extension header of 8 bytes and more times 8 bytes.
func extension(next, more byte) []byte {
	return append([]byte{next, more}, make([]byte, 6+8*int(more))...)
}

// tag returns the rest of a VLAN tag after the frame's type: VID 0 and the type of the payload.
func tag(kind uint16) []byte { return binary.BigEndian.AppendUint16([]byte{0, 0}, kind) }

func icmp(kind byte, target netip.Addr) []byte {
	return append([]byte{kind, 0, 0, 0, 0, 0, 0, 0}, target.AsSlice()...)
}

func verdict(t testing.TB, frame []byte, ips ...netip.Addr) int {
	t.Helper()
	vm, err := bpf.NewVM(Program(ownMAC, ips))
	testutil.Must(t, err)
	n, err := vm.Run(frame)
	testutil.Must(t, err)
	return n
}

func TestProgram(t *testing.T) {
	t.Parallel()
	const arpType, v4, v6, lldp, vlan, provider = 0x0806, 0x0800, 0x86dd, 0x88cc, 0x8100, 0x88a8
	chain := func(n int) []byte {
		all := ip6(own6, 60)
		for i := range n {
			next := byte(60)
			if i == n-1 {
				next = 58
			}
			all = append(all, extension(next, byte(i%2))...)
		}
		return append(all, icmp(136, other6)...)
	}
	for _, c := range []struct {
		what  string
		frame []byte
		pass  bool
	}{
		{"own IPv4", frame(ownMAC, v4, ip4(own4, other4)), true},
		{"another's MAC", frame(otherMAC, v4, ip4(own4, other4)), false},
		{"another's MAC, no IP", frame(otherMAC, lldp), false},
		{"no IP", frame(ownMAC, lldp), false},
		{"IPv4 with a VLAN tag", frame(ownMAC, vlan, tag(v4), ip4(own4, other4)), false}, // the kernel has removed another tag
		{"another's IPv4 with a VLAN tag", frame(ownMAC, vlan, tag(v4), ip4(other4, own4)), false},
		{"another's ARP with a provider's VLAN tag", frame(ownMAC, provider, tag(arpType), arp(ownMAC, other4)), false},
		{"no frame", frame(ownMAC, v4)[:13], false},
		{"another's IPv4", frame(ownMAC, v4, ip4(other4, own4)), false},
		{"no IPv4", frame(ownMAC, v4, ip4(none4, other4)), false},
		{"to loopback", frame(ownMAC, v4, ip4(own4, netip.MustParseAddr("127.8.0.1"))), false},
		{"short IPv4", frame(ownMAC, v4, ip4(own4, other4)[:19]), false},
		{"own ARP", frame(ownMAC, arpType, arp(ownMAC, own4)), true},
		{"ARP that asks", frame(ownMAC, arpType, arp(ownMAC, none4)), true},
		{"ARP with another's IP", frame(ownMAC, arpType, arp(ownMAC, other4)), false},
		{"ARP with another's MAC", frame(ownMAC, arpType, arp(otherMAC, own4)), false},
		{"ARP of another kind", frame(ownMAC, arpType, append([]byte{0, 6}, arp(ownMAC, own4)[2:]...)), false},
		{"ARP with other lengths", frame(ownMAC, arpType, []byte{0, 1, 8, 0, 4, 4}, arp(ownMAC, own4)[6:]), false},
		{"short ARP", frame(ownMAC, arpType, arp(ownMAC, own4)[:27]), false},
		{"own IPv6", frame(ownMAC, v6, ip6(own6, 17)), true},
		{"own link-local IPv6", frame(ownMAC, v6, ip6(ownLocal, 17)), true},
		{"IPv6 that asks", frame(ownMAC, v6, ip6(none6, 58), icmp(135, own6)), true},
		{"multicast listener", frame(ownMAC, v6, ip6(none6, 0), extension(58, 0), icmp(143, none6)), true},
		{"another's IPv6", frame(ownMAC, v6, ip6(other6, 17)), false},
		{"another's link-local IPv6", frame(ownMAC, v6, ip6(netip.MustParseAddr("fe80::1"), 17)), false},
		{"short IPv6", frame(ownMAC, v6, ip6(own6, 17)[:39]), false},
		{"ping", frame(ownMAC, v6, ip6(own6, 58), icmp(128, none6)), true},
		{"own neighbour advertisement", frame(ownMAC, v6, ip6(own6, 58), icmp(136, own6)), true},
		{"own link-local neighbour advertisement", frame(ownMAC, v6, ip6(ownLocal, 58), icmp(136, ownLocal)), true},
		{"another's neighbour advertisement", frame(ownMAC, v6, ip6(own6, 58), icmp(136, other6)), false},
		{"neighbour advertisement without sender", frame(ownMAC, v6, ip6(none6, 58), icmp(136, other6)), false},
		{"router advertisement", frame(ownMAC, v6, ip6(ownLocal, 58), icmp(134, none6)), false},
		{"redirect", frame(ownMAC, v6, ip6(ownLocal, 58), icmp(137, other6)), false},
		{"hidden advertisement", frame(ownMAC, v6, chain(1)), false},
		{"well hidden advertisement", frame(ownMAC, v6, chain(3)), false},
		{"very well hidden advertisement", frame(ownMAC, v6, chain(6)), false},
		{"header cut off", frame(ownMAC, v6, ip6(own6, 60)), false},
		{"header cut off after its type", frame(ownMAC, v6, ip6(own6, 60), []byte{17}), false},
		{"header that ends beyond the frame, after it another one", frame(ownMAC, v6, ip6(own6, 60), []byte{60, 255, 0, 0, 0, 0, 0, 0}), false},
		{"header that ends beyond the frame, after it ICMP", frame(ownMAC, v6, ip6(own6, 60), []byte{58, 255, 0, 0, 0, 0, 0, 0}), false},
		{"ICMP cut off", frame(ownMAC, v6, ip6(own6, 58)), false},
		{"neighbour advertisement cut off", frame(ownMAC, v6, ip6(own6, 58), icmp(136, own6)[:23]), false},
		{"hidden data", frame(ownMAC, v6, ip6(own6, 43), extension(17, 2), make([]byte, 8)), true},
	} {
		t.Run(c.what, func(t *testing.T) {
			if got := verdict(t, c.frame, own4, own6); (got == Pass) != c.pass || got != Pass && got != Drop {
				t.Errorf("%s: verdict %#x, want to pass: %v", c.what, got, c.pass)
			}
		})
	}
	if verdict(t, frame(ownMAC, v4, ip4(own4, other4)), own6) != Drop || verdict(t, frame(ownMAC, arpType, arp(ownMAC, none4)), own6) != Drop {
		t.Error("a pod without IPv4 sends it")
	}
	if verdict(t, frame(ownMAC, v6, ip6(none6, 58), icmp(135, own6)), own4) != Drop {
		t.Error("a pod without IPv6 sends it")
	}
}

// The program returns Pass or Drop for every frame, and never the result of a read beyond the end.
// A frame that passes has the pod's addresses, and no later step can change its meaning.
func FuzzProgram(f *testing.F) {
	f.Add(frame(ownMAC, 0x0800, ip4(own4, other4)))
	f.Add(frame(ownMAC, 0x0806, arp(ownMAC, own4)))
	f.Add(frame(ownMAC, 0x86dd, ip6(own6, 0), extension(58, 0), icmp(136, own6)))
	f.Add(frame(ownMAC, 0x86dd, ip6(own6, 60), []byte{60, 255, 0, 0, 0, 0, 0, 0}))
	f.Add(frame(ownMAC, 0x8100, tag(0x0800), ip4(other4, own4)))
	f.Fuzz(func(t *testing.T, data []byte) {
		switch verdict(t, data, own4, own6) {
		case Drop:
			return
		case Pass:
		default:
			t.Fatal("reads beyond the end")
		}
		if !slices.Equal(data[ethSource:ethType], ownMAC) {
			t.Errorf("passes with another's hardware address")
		}
		switch kind := binary.BigEndian.Uint16(data[ethType:]); kind {
		case 0x0806:
			if ip, _ := netip.AddrFromSlice(data[arpSender4 : arpSender4+4]); ip != own4 && ip != none4 {
				t.Errorf("passes with ARP for %s", ip)
			}
		case 0x0800:
			if ip, _ := netip.AddrFromSlice(data[ip4Source:ip4Dest]); ip != own4 {
				t.Errorf("passes with the address %s", ip)
			}
		case 0x86dd:
			if ip, _ := netip.AddrFromSlice(data[ip6Source : ip6Source+16]); ip != own6 && ip != ownLocal && ip != none6 {
				t.Errorf("passes with the address %s", ip)
			}
		default:
			t.Errorf("passes with type %#x", kind)
		}
	})
}
