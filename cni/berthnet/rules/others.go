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

// Blocker is a chain of another program that drops forwarded packets. Tool is the iptables command
// that changes the chain.
type Blocker struct{ Chain, Tool string }

// Blocking returns chains of other programs that drop forwarded packets by default, and whose
// tables have no rule for the bridge or its subnets. Such a chain drops a packet even if the
// network's table accepts it. The result includes chains of iptables-legacy.
func (f *Filter) Blocking(bridge string, subnets []netip.Prefix) (all []Blocker, err error) {
	look := func(conn *nftables.Conn) (err error) {
		all, err = blocking(conn, bridge, subnets)
		return err
	}
	if err := retry(func() error { return f.with(look) }); err != nil { // a chain may be deleted between two requests
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
		if !drops(c) || c.Table.Family != nftables.TableFamilyINet &&
			!hasFamily(subnets, c.Table.Family == nftables.TableFamilyIPv4) {
			continue
		}
		known, err := hasRuleFor(conn, all, c.Table, bridge, subnets)
		if err != nil {
			return nil, err
		}
		if !known {
			some = append(some, Blocker{
				Chain: fmt.Sprintf("%s %s %s", families[c.Table.Family], c.Table.Name, c.Name),
				Tool:  tools[c.Table.Family],
			})
		}
	}
	return some, nil
}

// hasFamily reports whether a subnet has the family. Chains of another family do not affect pods.
func hasFamily(subnets []netip.Prefix, ip4 bool) bool {
	return slices.ContainsFunc(subnets, func(s netip.Prefix) bool { return s.Addr().Unmap().Is4() == ip4 })
}

var families = map[nftables.TableFamily]string{
	nftables.TableFamilyINet: "inet",
	nftables.TableFamilyIPv4: "ip",
	nftables.TableFamilyIPv6: "ip6",
}

// tools are the iptables commands by family. No command covers family inet.
var tools = map[nftables.TableFamily]string{nftables.TableFamilyIPv4: "iptables", nftables.TableFamilyIPv6: "ip6tables"}

// drops reports whether a chain drops forwarded packets by its policy, or is firewalld's chain,
// which drops them in its last rule.
func drops(c *nftables.Chain) bool {
	if c.Hooknum == nil || *c.Hooknum != *nftables.ChainHookForward || families[c.Table.Family] == "" ||
		c.Type != nftables.ChainTypeFilter {
		return false
	}
	return c.Policy != nil && *c.Policy == nftables.ChainPolicyDrop || c.Table.Name == "firewalld" &&
		c.Name == "filter_FORWARD"
}

// hasRuleFor reports whether a rule of a table matches the interface or a subnet.
func hasRuleFor(conn *nftables.Conn, all []*nftables.Chain, t *nftables.Table, ifName string,
	subnets []netip.Prefix) (bool, error) {
	for _, c := range all {
		if c.Table.Name != t.Name || c.Table.Family != t.Family {
			continue
		}
		found, err := conn.GetRules(t, c)
		if err != nil {
			return false, err
		}
		for _, r := range found {
			if matches(r.Exprs, ifName, subnets) {
				return true, nil
			}
		}
	}
	return false, nil
}

// matches reports whether expressions compare the interface's name, a prefix of the name, or an
// address of a subnet. The preceding expression loads or masks the compared value.
func matches(all []expr.Any, ifName string, subnets []netip.Prefix) bool {
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
				if from.Base == expr.PayloadBaseNetworkHeader &&
					slices.ContainsFunc(subnets, func(s netip.Prefix) bool { return isAddress(e.Data, s) }) {
					return true
				}
			}
		}
	}
	return false
}

// isName reports whether data is the interface's name with a final zero, or a prefix of the name.
func isName(data []byte, ifName string) bool {
	name, _, ended := strings.Cut(string(data), "\x00")
	return name == ifName || !ended && name != "" && strings.HasPrefix(ifName, name)
}

// isAddress reports whether data is a subnet's address, or its leading bytes. nft compares only the
// bytes of the prefix.
func isAddress(data []byte, s netip.Prefix) bool {
	address := s.Masked().Addr().AsSlice()
	return len(data)*8 >= s.Bits() && len(data) <= len(address) && bytes.Equal(data, address[:len(data)])
}
