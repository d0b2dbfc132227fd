// Package rules writes the nftables rules of a network: host ports and masquerading.
//
// # Contract
//
// Each network has its own nftables table. The rules concern the network as a whole. Install writes
// them in one transaction if they are missing or outdated. A marker chain carries a hash of the
// description in its name and has one rule, which no packet reaches. Installed checks only this
// rule, because it disappears together with all other rules. Host ports of pods are elements of
// maps. So attaching a pod with host ports takes one transaction, which adds elements. Attaching
// another pod takes no transaction. SetServices lists the node's addresses to which host ports do
// not apply. Rules distinguish packets by interfaces and conntrack state, and use no marks.
//
// Other programs may delete the table with all others (nft flush ruleset). They may also delete
// only the table's rules (nft flush table), which keeps the host ports in the maps. The next call
// of Installed detects both, and the caller passes the open host ports to Install.
//
// A Filter works in one network namespace and may be used concurrently.
package rules

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
	"berth/internal/netns"
)

// Network describes the wanted table.
type Network struct {
	Key          string // of the network
	Bridge       string
	Subnets      []netip.Prefix // of pods
	Masquerade   bool
	NoMasquerade []netip.Prefix
}

// TablePrefix is the prefix of the names of networks' tables.
const TablePrefix = "berth-net-"

// table returns the table of a network.
func table(network string) *nftables.Table {
	return &nftables.Table{Family: nftables.TableFamilyINet, Name: TablePrefix + network}
}

// markerPrefix starts the name of the marker chain. The name continues with a hash of the
// description and the bridge.
const markerPrefix = "made-from-"

// format is the version of the rules. It must be increased with each change of the rules.
const format = "5"

func (n *Network) marker() string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %+v", format, *n))
	return markerPrefix + hex.EncodeToString(sum[:12]) + markerOf(n.Bridge)
}

func markerOf(bridge string) string { return "-for-" + bridge }

// markerRule returns the only rule of the marker chain. A flush of the table keeps chains but
// deletes rules. Earlier versions did not add this rule.
func markerRule(marker *nftables.Chain) *nftables.Rule {
	return &nftables.Rule{Table: marker.Table, Chain: marker, Exprs: verdict(expr.VerdictReturn),
		UserData: userdata.AppendString(nil, userdata.TypeComment, "the rules of this table are there")}
}

// Installed reports whether the network's table exists with the rules of this description.
func (f *Filter) Installed(n Network) (installed bool, err error) {
	n.normalize()
	err = f.with(func(conn *nftables.Conn) error {
		found, err := conn.GetRules(table(n.Key), &nftables.Chain{Name: n.marker()}) // empty if the table or chain is missing
		installed = len(found) > 0
		if isMissing(err) {
			return nil
		}
		return err
	})
	if err != nil {
		return false, fmt.Errorf("read the table of network %s: %w", n.Key, err)
	}
	return installed, nil
}

func (n *Network) normalize() {
	n.Subnets = slices.SortedFunc(slices.Values(n.Subnets), netip.Prefix.Compare)
	n.NoMasquerade = slices.SortedFunc(slices.Values(n.NoMasquerade), netip.Prefix.Compare)
}

// setNumbers guards the library's counter of sets, a global variable.
var setNumbers sync.Mutex

// Install writes the network's table and opens host ports of pods. Open ports stay open. It deletes
// tables of other networks for the same bridge, and the table of an earlier version. Callers
// serialize calls for one network.
func (f *Filter) Install(n Network, pods []Pod) error {
	n.normalize()
	if err := retry(func() error { return f.install(&n, pods) }); err != nil {
		return fmt.Errorf("write the table of network %s: %w", n.Key, err)
	}
	return nil
}

// install returns ENOENT if another program deletes the table after install has found its marker,
// because the transaction deletes the marker. It reads the open host ports after the marker.
// Otherwise it could mistake deleted ports for open ports.
func (f *Filter) install(n *Network, pods []Pod) error {
	return f.with(func(conn *nftables.Conn) error {
		old, others, err := n.obsolete(conn)
		if err != nil {
			return err
		}
		open, err := portsIn(conn, table(n.Key))
		if err != nil {
			return err
		}
		if err := n.write(conn, old); err != nil {
			return err
		}
		if err := openPorts(conn, n.Key, absent(pods, open)); err != nil {
			return err
		}
		for _, other := range others {
			conn.DelTable(other)
		}
		failpoint.Reach("net.install")
		err = conn.Flush()
		failpoint.Reach("net.installed")
		return err
	})
}

// obsolete returns the objects to delete. In the network's table these are the markers, and chains
// of earlier versions. The tables of other networks for the bridge are obsolete, too.
func (n *Network) obsolete(conn *nftables.Conn) (old []string, others []*nftables.Table, err error) {
	chains, err := conn.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		return nil, nil, fmt.Errorf("list chains of nftables: %w", err)
	}
	for _, c := range chains {
		isMarker := strings.HasPrefix(c.Name, markerPrefix)
		switch {
		case c.Table.Name == TablePrefix+n.Key:
			if isMarker || c.Name == "forward" || c.Name == "input" { // the last two had rules for isolation
				old = append(old, c.Name)
			}
		case isMarker && strings.HasPrefix(c.Table.Name, TablePrefix) && strings.HasSuffix(c.Name, markerOf(n.Bridge)):
			others = append(others, &nftables.Table{Family: nftables.TableFamilyINet, Name: c.Table.Name})
		}
	}
	return old, others, nil
}

// Chains of a table. The base chains run right before other chains of their kind. So host ports
// take precedence over other programs' redirections.
const (
	chainHostPorts = "hostports"
	early          = -5
)

// write adds the table to a transaction.
func (n *Network) write(conn *nftables.Conn, old []string) error {
	t := conn.AddTable(table(n.Key))
	setNumbers.Lock()
	defer setNumbers.Unlock()
	for _, m := range maps {
		if err := conn.AddSet(m.set(t), nil); err != nil {
			return err
		}
	}
	for _, r := range redirections {
		if err := conn.AddSet(r.set(t), nil); err != nil {
			return err
		}
	}
	for _, s := range services {
		if err := conn.AddSet(s.set(t), nil); err != nil {
			return err
		}
	}
	ports := plain(conn, t, chainHostPorts)
	n.forwardPorts(conn, ports)
	n.redirect(conn, base(conn, t, "prerouting",
		nftables.ChainTypeNAT, nftables.ChainHookPrerouting, *nftables.ChainPriorityNATDest+early))
	n.redirect(conn, base(conn, t, "output",
		nftables.ChainTypeNAT, nftables.ChainHookOutput, *nftables.ChainPriorityNATDest+early))
	n.masquerade(conn, base(conn, t, "postrouting", nftables.ChainTypeNAT, nftables.ChainHookPostrouting,
		*nftables.ChainPriorityNATSource+early))
	n.guardLoopback(conn, base(conn, t, "raw",
		nftables.ChainTypeFilter, nftables.ChainHookPrerouting, *nftables.ChainPriorityRaw))
	for _, name := range old {
		conn.DelChain(&nftables.Chain{Table: t, Name: name})
	}
	conn.AddRule(markerRule(conn.AddChain(&nftables.Chain{Table: t, Name: n.marker()})))
	return nil
}

// plain adds an empty chain that other chains jump to.
func plain(conn *nftables.Conn, t *nftables.Table, name string) *nftables.Chain {
	c := conn.AddChain(&nftables.Chain{Table: t, Name: name})
	conn.FlushChain(c)
	return c
}

// base adds an empty chain that the kernel calls.
func base(conn *nftables.Conn, t *nftables.Table, name string, kind nftables.ChainType, hook *nftables.ChainHook,
	priority nftables.ChainPriority) *nftables.Chain {
	c := conn.AddChain(&nftables.Chain{Table: t, Name: name, Type: kind, Hooknum: hook, Priority: &priority})
	conn.FlushChain(c)
	return c
}

// redirect looks up packets to the node's addresses among the host ports, except packets from ::1.
// IPv6 has no route_localnet, so the kernel would drop a redirected packet from ::1. A client whose
// connection to ::1 is refused tries 127.0.0.1 next.
func (n *Network) redirect(conn *nftables.Conn, c *nftables.Chain) {
	add(conn, c, isFamily(true), to_(loopback6), verdict(expr.VerdictReturn))
	add(conn, c, toLocalAddress(), jump(chainHostPorts))
}

// forwardPorts redirects host ports to pods. Ports of one address take precedence over ports of all
// addresses, which do not apply to addresses of Services.
func (n *Network) forwardPorts(conn *nftables.Conn, c *nftables.Chain) {
	for _, m := range maps {
		if !m.withIP {
			add(conn, c, isFamily(m.v6), serviceSetOf(m.v6).match(), verdict(expr.VerdictReturn))
		}
		add(conn, c, isFamily(m.v6), m.lookUp(), m.toPod())
	}
}

var (
	loopback4  = netip.MustParsePrefix("127.0.0.0/8")
	loopback6  = netip.PrefixFrom(netip.IPv6Loopback(), 128)
	multicast4 = netip.MustParsePrefix("224.0.0.0/4")
	multicast6 = netip.MustParsePrefix("ff00::/8")
	broadcast4 = netip.MustParsePrefix("255.255.255.255/32")
)

func of(prefixes []netip.Prefix, v6 bool) (some []netip.Prefix) {
	for _, p := range prefixes {
		if p.Addr().Is6() == v6 {
			some = append(some, p)
		}
	}
	return some
}

// masquerade replaces the source address of packets that leave the network. It also masquerades
// packets to host ports from the node's loopback or from a pod. A pod has no route back to the
// node's loopback, and would answer another pod directly.
func (n *Network) masquerade(conn *nftables.Conn, c *nftables.Chain) {
	for _, r := range redirections {
		for _, source := range of(append([]netip.Prefix{loopback4}, n.Subnets...), r.v6) {
			add(conn, c, device(expr.MetaKeyOIFNAME, n.Bridge, true), isFamily(r.v6),
				redirected(), from(source), r.match(), masquerade())
		}
	}
	if !n.Masquerade {
		return
	}
	for _, v6 := range []bool{false, true} {
		subnets := of(n.Subnets, v6)
		exempt := append(of([]netip.Prefix{multicast4, broadcast4, multicast6}, v6), of(n.NoMasquerade, v6)...)
		for _, source := range subnets {
			for _, to := range append(exempt, subnets...) {
				add(conn, c, isFamily(v6), from(source), to_(to), verdict(expr.VerdictReturn))
			}
			add(conn, c, isFamily(v6), from(source), device(expr.MetaKeyOIFNAME, n.Bridge, false), masquerade())
		}
	}
}

// guardLoopback drops packets from pods from or to the node's loopback addresses. The kernel
// accepts them from the bridge because of host ports (CVE-2020-8558). Answers to redirected packets
// from loopback still have the bridge's address here.
func (n *Network) guardLoopback(conn *nftables.Conn, c *nftables.Chain) {
	for _, side := range []expressions{to_(loopback4), from(loopback4)} {
		add(conn, c, device(expr.MetaKeyIIFNAME, n.Bridge, true), isFamily(false), side, verdict(expr.VerdictDrop))
	}
}

// Try returns why the kernel does not support the network's table, or nil. It writes the table in a
// temporary network namespace, so that the kernel loads the modules that it needs.
func Try(n Network) error {
	n.normalize()
	filter := &Filter{}
	err := netns.InNew(func() error {
		err := filter.with(func(conn *nftables.Conn) error {
			if err := n.write(conn, nil); err != nil {
				return err
			}
			return conn.Flush()
		})
		return errors.Join(err, filter.Close())
	})
	switch {
	case err == nil:
		return nil
	case isMissing(err), errors.Is(err, errors.ErrUnsupported), errors.Is(err, unix.EAFNOSUPPORT),
		errors.Is(err, unix.EINVAL):
		return fmt.Errorf("the kernel does not support the rules of network %s (Linux 5.2; CONFIG_NFT_NAT, NFT_MASQ, "+
			"NFT_CT, NFT_FIB_INET): %w", n.Key, err)
	}
	return fmt.Errorf("try the rules of network %s: %w", n.Key, err)
}

// Networks returns the keys of networks with a table.
func (f *Filter) Networks() (keys []string, err error) {
	err = f.with(func(conn *nftables.Conn) error {
		tables, err := conn.ListTablesOfFamily(nftables.TableFamilyINet)
		for _, t := range tables {
			if key, ok := strings.CutPrefix(t.Name, TablePrefix); ok {
				keys = append(keys, key)
			}
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list tables of nftables: %w", err)
	}
	return keys, nil
}

// Available returns why nftables cannot be used, or nil.
func (f *Filter) Available() error {
	err := f.with(func(conn *nftables.Conn) error {
		_, err := conn.ListTablesOfFamily(nftables.TableFamilyINet)
		return err
	})
	if err != nil {
		return fmt.Errorf("nftables: %w", err)
	}
	return nil
}

// HasTable reports whether the network has a table.
func (f *Filter) HasTable(network string) (bool, error) {
	keys, err := f.Networks()
	return slices.Contains(keys, network), err
}

// DeleteTable deletes the network's table with all rules and host ports. A missing table is no
// error.
func (f *Filter) DeleteTable(network string) error {
	err := f.with(func(conn *nftables.Conn) error {
		conn.DelTable(table(network))
		return conn.Flush()
	})
	if err != nil && !isMissing(err) {
		return fmt.Errorf("delete table of network %s: %w", network, err)
	}
	return nil
}
