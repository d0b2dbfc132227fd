package rules

import (
	"bytes"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
)

// Blocker is a chain of others that drops forwarded packets, and the program of the iptables family that changes it.
type Blocker struct{ Chain, Tool string }

// Blocking returns the chains of others that drop forwarded packets which none of their rules accepts, and whose tables have no rule that
// is about the bridge or its subnets: what is accepted in a network's own table is dropped there all the same. Those of iptables-legacy are among them.
func (f *Filter) Blocking(bridge string, subnets []netip.Prefix) (all []Blocker, err error) {
	look := func(conn *nftables.Conn) (err error) {
		all, err = blocking(conn, bridge, subnets)
		return err
	}
	if err := again(func() error { return f.with(look) }); err != nil { // others may delete a chain between two questions
		return nil, fmt.Errorf("read chains of nftables: %w", err)
	}
	legacy, err := blockingLegacy(bridge, subnets)
	return append(all, legacy...), err
}

func blocking(conn *nftables.Conn, bridge string, subnets []netip.Prefix) (some []Blocker, err error) {
	all, err := conn.ListChains()
	if err != nil {
		return nil, err
	}
	for _, c := range all {
		if !drops(c) || c.Table.Family != nftables.TableFamilyINet && !hasFamily(subnets, c.Table.Family == nftables.TableFamilyIPv4) {
			continue
		}
		known, err := knows(conn, all, c.Table, bridge, subnets)
		if err != nil {
			return nil, err
		}
		if !known {
			some = append(some, Blocker{Chain: fmt.Sprintf("%s %s %s", families[c.Table.Family], c.Table.Name, c.Name), Tool: tools[c.Table.Family]})
		}
	}
	return some, nil
}

// hasFamily tells whether one of them is of IPv4, or of IPv6: what is dropped of the other one is not the pods'.
func hasFamily(subnets []netip.Prefix, ip4 bool) bool {
	return slices.ContainsFunc(subnets, func(s netip.Prefix) bool { return s.Addr().Unmap().Is4() == ip4 })
}

var families = map[nftables.TableFamily]string{nftables.TableFamilyINet: "inet", nftables.TableFamilyIPv4: "ip", nftables.TableFamilyIPv6: "ip6"}

// tools change chains of others that do not do so themselves; those of inet are nobody's.
var tools = map[nftables.TableFamily]string{nftables.TableFamilyIPv4: "iptables", nftables.TableFamilyIPv6: "ip6tables"}

// drops tells whether a chain looks at forwarded packets and drops those that it has no rule for. firewalld's does, by its last rule.
func drops(c *nftables.Chain) bool {
	if c.Hooknum == nil || *c.Hooknum != *nftables.ChainHookForward || families[c.Table.Family] == "" || c.Type != nftables.ChainTypeFilter {
		return false
	}
	return c.Policy != nil && *c.Policy == nftables.ChainPolicyDrop || c.Table.Name == "firewalld" && c.Name == "filter_FORWARD"
}

// knows tells whether a rule of a table compares with the name of an interface, or with the address of a subnet.
func knows(conn *nftables.Conn, all []*nftables.Chain, t *nftables.Table, ifName string, subnets []netip.Prefix) (bool, error) {
	for _, c := range all {
		if c.Table.Name != t.Name || c.Table.Family != t.Family {
			continue
		}
		found, err := conn.GetRules(t, c)
		if err != nil {
			return false, err
		}
		for _, r := range found {
			if about(r.Exprs, ifName, subnets) {
				return true, nil
			}
		}
	}
	return false, nil
}

// about tells whether expressions compare with an interface's name, its beginning included, or with a subnet's address: what is compared is what
// the expression before has loaded, or what that has masked.
func about(all []expr.Any, ifName string, subnets []netip.Prefix) bool {
	var loaded expr.Any
	for _, e := range all {
		switch e := e.(type) {
		case *expr.Meta, *expr.Payload:
			loaded = e
		case *expr.Cmp:
			switch from := loaded.(type) {
			case *expr.Meta:
				if (from.Key == expr.MetaKeyIIFNAME || from.Key == expr.MetaKeyOIFNAME) && isName(e.Data, ifName) {
					return true
				}
			case *expr.Payload:
				if from.Base == expr.PayloadBaseNetworkHeader && slices.ContainsFunc(subnets, func(s netip.Prefix) bool { return isAddress(e.Data, s) }) {
					return true
				}
			}
		}
	}
	return false
}

// isName tells whether data is an interface's name, or begins it: a name as such ends with a zero.
func isName(data []byte, ifName string) bool {
	name, _, ended := strings.Cut(string(data), "\x00")
	return name == ifName || !ended && name != "" && strings.HasPrefix(ifName, name)
}

// isAddress tells whether data is a subnet's address, or its first bytes, of which nft compares no more than the subnet has.
func isAddress(data []byte, s netip.Prefix) bool {
	address := s.Masked().Addr().AsSlice()
	return len(data)*8 >= s.Bits() && len(data) <= len(address) && bytes.Equal(data, address[:len(data)])
}
