package rules

import (
	"bytes"
	"fmt"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
)

// Blocking returns the chains of others that drop forwarded packets which none of their rules accepts, and whose tables have no rule that
// names the bridge: what is accepted in a network's own table is dropped there all the same.
func (f *Filter) Blocking(bridge string) (chains []string, err error) {
	err = f.with(func(conn *nftables.Conn) error {
		all, err := conn.ListChains()
		if err != nil {
			return err
		}
		for _, c := range all {
			if !drops(c) {
				continue
			}
			named, err := names(conn, all, c.Table, bridge)
			if err != nil {
				return err
			}
			if !named {
				chains = append(chains, fmt.Sprintf("%s %s %s", families[c.Table.Family], c.Table.Name, c.Name))
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read chains of nftables: %w", err)
	}
	return chains, nil
}

var families = map[nftables.TableFamily]string{nftables.TableFamilyINet: "inet", nftables.TableFamilyIPv4: "ip", nftables.TableFamilyIPv6: "ip6"}

// drops tells whether a chain looks at forwarded packets and drops those that it has no rule for. firewalld's does, by its last rule.
func drops(c *nftables.Chain) bool {
	if c.Hooknum == nil || *c.Hooknum != *nftables.ChainHookForward || families[c.Table.Family] == "" || c.Type != nftables.ChainTypeFilter {
		return false
	}
	return c.Policy != nil && *c.Policy == nftables.ChainPolicyDrop || c.Table.Name == "firewalld" && c.Name == "filter_FORWARD"
}

// names tells whether a rule of a table compares with the name of an interface.
func names(conn *nftables.Conn, all []*nftables.Chain, t *nftables.Table, ifName string) (bool, error) {
	for _, c := range all {
		if c.Table.Name != t.Name || c.Table.Family != t.Family {
			continue
		}
		found, err := conn.GetRules(t, c)
		if err != nil {
			return false, err
		}
		for _, r := range found {
			for _, e := range r.Exprs {
				if cmp, ok := e.(*expr.Cmp); ok && string(bytes.TrimRight(cmp.Data, "\x00")) == ifName {
					return true, nil
				}
			}
		}
	}
	return false, nil
}
