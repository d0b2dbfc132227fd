package rules

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"

	"berth/internal/failpoint"
)

// serviceSet is a family's set of addresses that belong to Services, although they are addresses of
// the node. The rules of host ports must compare with a list, because nftables does not tell the
// device of a local address: "fib daddr oifname" is empty for it.
type serviceSet struct {
	name string
	v6   bool
}

var services = []serviceSet{{"services4", false}, {"services6", true}}

func serviceSetOf(v6 bool) serviceSet {
	if v6 {
		return services[1]
	}
	return services[0]
}

func (s serviceSet) set(t *nftables.Table) *nftables.Set {
	return &nftables.Set{Table: t, Name: s.name, KeyType: portMap{v6: s.v6}.addressType()}
}

// match matches packets to the addresses of the set.
func (s serviceSet) match() expressions {
	offset := uint32(16)
	if s.v6 {
		offset = 24
	}
	return expressions{
		&expr.Payload{
			DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: 4 * portMap{v6: s.v6}.words(),
		},
		&expr.Lookup{SourceRegister: reg, SetName: s.name},
	}
}

// SetServices replaces the node's addresses that belong to Services. Host ports of all addresses do
// not apply to them. It returns ErrGone if another program deletes the network's table meanwhile.
func (f *Filter) SetServices(network string, addresses []netip.Addr) error {
	err := f.with(func(conn *nftables.Conn) error {
		changed := false
		for _, s := range services {
			set := s.set(table(network))
			present, err := conn.GetSetElements(set)
			if err != nil {
				return err
			}
			added, gone := s.compare(present, addresses)
			err = errors.Join(change(conn.SetAddElements).each(set, added), change(conn.SetDeleteElements).each(set, gone))
			if err != nil {
				return err
			}
			changed = changed || len(added)+len(gone) > 0
		}
		if !changed {
			return nil
		}
		failpoint.Reach("net.set-services")
		err := conn.Flush()
		failpoint.Reach("net.services-set")
		return err
	})
	if isMissing(err) {
		err = ErrGone
	}
	if err != nil {
		return fmt.Errorf("set the addresses of Services in network %s: %w", network, err)
	}
	return nil
}

// compare returns the elements that are missing in the set, and those that are not wanted.
func (s serviceSet) compare(present []nftables.SetElement, wanted []netip.Addr) (added, gone []nftables.SetElement) {
	want := map[string]bool{}
	for _, a := range wanted {
		if a.Is6() == s.v6 {
			want[string(a.AsSlice())] = true
		}
	}
	for _, e := range present {
		if !want[string(e.Key)] {
			gone = append(gone, nftables.SetElement{Key: e.Key})
		}
		delete(want, string(e.Key))
	}
	for key := range want {
		added = append(added, nftables.SetElement{Key: []byte(key)})
	}
	return added, gone
}
