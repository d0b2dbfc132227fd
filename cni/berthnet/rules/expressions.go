package rules

import (
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// expressions are a part of a rule. Each part loads the values that it compares.
type expressions []expr.Any

// add appends a rule that consists of parts.
func add(conn *nftables.Conn, c *nftables.Chain, parts ...expressions) {
	conn.AddRule(&nftables.Rule{Table: c.Table, Chain: c, Exprs: slices.Concat(parts...)})
}

// Registers. The 128-bit register 1 overlaps the first four 32-bit registers.
const (
	reg   = unix.NFT_REG_1
	reg32 = unix.NFT_REG32_00
)

func verdict(kind expr.VerdictKind) expressions { return expressions{&expr.Verdict{Kind: kind}} }

func jump(chain string) expressions {
	return expressions{&expr.Verdict{Kind: expr.VerdictJump, Chain: chain}}
}

func compare(op expr.CmpOp, data []byte) expr.Any {
	return &expr.Cmp{Op: op, Register: reg, Data: data}
}

// isFamily matches packets of IPv4 or IPv6.
func isFamily(v6 bool) expressions {
	family := byte(unix.NFPROTO_IPV4)
	if v6 {
		family = unix.NFPROTO_IPV6
	}
	return expressions{&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: reg}, compare(expr.CmpOpEq, []byte{family})}
}

// device matches packets by the name of a device, or by any other name.
func device(key expr.MetaKey, name string, is bool) expressions {
	op := expr.CmpOpEq
	if !is {
		op = expr.CmpOpNeq
	}
	padded := make([]byte, unix.IFNAMSIZ)
	copy(padded, name)
	return expressions{&expr.Meta{Key: key, Register: reg}, compare(op, padded)}
}

// from and to_ match packets by source or destination network.
func from(p netip.Prefix) expressions { return address(p, 12, 8) }
func to_(p netip.Prefix) expressions  { return address(p, 16, 24) }

// address matches an address in the header, whose offset depends on the family.
func address(p netip.Prefix, offset4, offset6 uint32) expressions {
	data, offset := p.Masked().Addr().AsSlice(), offset4
	if p.Addr().Is6() {
		offset = offset6
	}
	length := uint32(len(data))
	parts := expressions{&expr.Payload{
		DestRegister: reg,
		Base:         expr.PayloadBaseNetworkHeader,
		Offset:       offset,
		Len:          length,
	}}
	if p.Bits() < p.Addr().BitLen() {
		mask := make([]byte, length)
		for bit := range p.Bits() {
			mask[bit/8] |= 0x80 >> (bit % 8)
		}
		parts = append(parts, &expr.Bitwise{
			SourceRegister: reg,
			DestRegister:   reg,
			Len:            length,
			Mask:           mask,
			Xor:            make([]byte, length),
		})
	}
	return append(parts, compare(expr.CmpOpEq, data))
}

// toLocalAddress matches packets to the node's own addresses.
func toLocalAddress() expressions {
	return expressions{&expr.Fib{Register: reg, ResultADDRTYPE: true, FlagDADDR: true},
		compare(expr.CmpOpEq, binaryutil.NativeEndian.PutUint32(unix.RTN_LOCAL))}
}

// masked keeps some bits of the mark or state in the register.
func masked(bits uint32) expr.Any {
	return &expr.Bitwise{
		SourceRegister: reg,
		DestRegister:   reg,
		Len:            4,
		Mask:           binaryutil.NativeEndian.PutUint32(bits),
		Xor:            make([]byte, 4),
	}
}

var notZero = compare(expr.CmpOpNeq, make([]byte, 4))

// redirected matches packets of connections with destination NAT.
func redirected() expressions {
	const statusDNAT = 1 << 5 // IPS_DST_NAT
	return expressions{&expr.Ct{Key: expr.CtKeySTATUS, Register: reg}, masked(statusDNAT), notZero}
}

// masquerade replaces the source by the node's address and a random port. Sequential ports would
// collide on several processors.
func masquerade() expressions { return expressions{&expr.Masq{FullyRandom: true}} }
