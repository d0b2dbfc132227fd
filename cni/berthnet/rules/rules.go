// Package rules makes the packet filter's part of a network: host ports, masquerading, isolation.
//
// # Contract
//
// A network has one table of nftables, with nothing of others' in it. Its rules are about the network as a whole, written in one
// transaction by Install when they are not there or not as they shall be, which the name of a chain that no packet meets tells, and the rule in it, which
// goes with all others (Installed asks for that alone). What a pod needs of its own, its host ports, are elements of maps, so that to attach a pod is to add elements: one transaction
// too, and none for a pod without host ports. Packets are told apart by their interfaces and by what conntrack knows of them; there are no marks.
//
// Others may delete the table, with all there is (nft flush ruleset): Watch tells of it, and Install is given the host ports that were open. Or they
// delete the table's rules alone (nft flush table), which leaves the host ports in the maps: who asks Installed next learns of that.
//
// A Filter works in one network namespace, and may be used concurrently.
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

// Network is what a table is made from.
type Network struct {
	Key            string // of the network
	Name           string // of which, alone, earlier versions named the table
	Bridge         string
	Subnets        []netip.Prefix // of pods
	Masquerade     bool
	NoMasquerade   []netip.Prefix
	IsolatePods    bool
	IsolateIngress bool
	IsolateNode    bool
}

// TablePrefix is what the names of networks' tables begin with.
const TablePrefix = "berth-net-"

// table is that of the network with a key.
func table(network string) *nftables.Table {
	return &nftables.Table{Family: nftables.TableFamilyINet, Name: TablePrefix + network}
}

// markerPrefix begins the name of the chain that tells what the table was made from, and which bridge it is for.
const markerPrefix = "made-from-"

// format is part of that, to be counted up with each change of the rules.
const format = "3"

func (n *Network) marker() string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %+v", format, *n))
	return markerPrefix + hex.EncodeToString(sum[:12]) + markerOf(n.Bridge)
}

func markerOf(bridge string) string { return "-for-" + bridge }

// markerRule is all that is in that chain: a flush of the table leaves chains, without rules. Versions that knew no flushes had none.
func markerRule(marker *nftables.Chain) *nftables.Rule {
	return &nftables.Rule{Table: marker.Table, Chain: marker, Exprs: verdict(expr.VerdictReturn),
		UserData: userdata.AppendString(nil, userdata.TypeComment, "the rules of this table are there")}
}

// Installed tells whether the network's table is there, made from the same, with its rules.
func (f *Filter) Installed(n Network) (installed bool, err error) {
	n.normalize()
	err = f.with(func(conn *nftables.Conn) error {
		found, err := conn.GetRules(table(n.Key), &nftables.Chain{Name: n.marker()}) // none where there is no such table or chain
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

// setNumbers guards the number that the library counts sets with.
var setNumbers sync.Mutex

// Install writes the network's table, and opens host ports of pods. Those that are open stay. Tables of other networks for the same bridge go, and
// that of an earlier version. It is called by one at a time for a network.
func (f *Filter) Install(n Network, pods []Pod) error {
	n.normalize()
	if err := again(func() error { return f.install(&n, pods) }); err != nil {
		return fmt.Errorf("write the table of network %s: %w", n.Key, err)
	}
	return nil
}

// install fails with ENOENT if somebody deletes the table after its mark was looked for: the mark goes in the same transaction. So which host ports are open
// is asked after that, or ports that are deleted between the two questions would be taken for open ones.
func (f *Filter) install(n *Network, pods []Pod) error {
	return f.with(func(conn *nftables.Conn) error {
		old, others, err := n.markers(conn)
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

// markers are the marks that the network's table has, and tables of other networks for its bridge. Networks of the same name had one table in common before it
// was named by the key: whoever of them comes first removes it.
func (n *Network) markers(conn *nftables.Conn) (names []string, others []*nftables.Table, err error) {
	chains, err := conn.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		return nil, nil, fmt.Errorf("list chains of nftables: %w", err)
	}
	for _, c := range chains {
		switch {
		case !strings.HasPrefix(c.Name, markerPrefix) || !strings.HasPrefix(c.Table.Name, TablePrefix):
		case c.Table.Name == TablePrefix+n.Key:
			names = append(names, c.Name)
		case strings.HasSuffix(c.Name, markerOf(n.Bridge)), c.Table.Name == TablePrefix+n.Name && !strings.Contains(c.Name, markerOf("")):
			others = append(others, &nftables.Table{Family: nftables.TableFamilyINet, Name: c.Table.Name})
		}
	}
	return names, others, nil
}

// Chains of a table. The base chains come right before others of the same kind, so that a host port wins over what
// somebody else does with all of the node's ports, and isolation is not undone.
const (
	chainHostPorts = "hostports"
	early          = -5
)

// write fills a transaction.
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
	ports := plain(conn, t, chainHostPorts)
	n.forwardPorts(conn, ports)
	n.redirect(conn, base(conn, t, "prerouting", nftables.ChainTypeNAT, nftables.ChainHookPrerouting, *nftables.ChainPriorityNATDest+early))
	n.redirect(conn, base(conn, t, "output", nftables.ChainTypeNAT, nftables.ChainHookOutput, *nftables.ChainPriorityNATDest+early))
	n.masquerade(conn, base(conn, t, "postrouting", nftables.ChainTypeNAT, nftables.ChainHookPostrouting, *nftables.ChainPriorityNATSource+early))
	n.guardLoopback(conn, base(conn, t, "raw", nftables.ChainTypeFilter, nftables.ChainHookPrerouting, *nftables.ChainPriorityRaw))
	n.isolateForwarded(conn, base(conn, t, "forward", nftables.ChainTypeFilter, nftables.ChainHookForward, *nftables.ChainPriorityFilter+early))
	n.isolateNode(conn, base(conn, t, "input", nftables.ChainTypeFilter, nftables.ChainHookInput, *nftables.ChainPriorityFilter+early))
	for _, name := range old {
		conn.DelChain(&nftables.Chain{Table: t, Name: name})
	}
	conn.AddRule(markerRule(conn.AddChain(&nftables.Chain{Table: t, Name: n.marker()})))
	return nil
}

// plain adds a chain that others jump to, without rules.
func plain(conn *nftables.Conn, t *nftables.Table, name string) *nftables.Chain {
	c := conn.AddChain(&nftables.Chain{Table: t, Name: name})
	conn.FlushChain(c)
	return c
}

// base adds a chain that the kernel calls, without rules.
func base(conn *nftables.Conn, t *nftables.Table, name string, kind nftables.ChainType, hook *nftables.ChainHook, priority nftables.ChainPriority) *nftables.Chain {
	c := conn.AddChain(&nftables.Chain{Table: t, Name: name, Type: kind, Hooknum: hook, Priority: &priority})
	conn.FlushChain(c)
	return c
}

// redirect has what is for an address of the node's own looked up among the host ports; but not ::1: the kernel does not let what
// comes from there out by another interface, as it does with route_localnet for IPv4, and a client that is refused goes on to 127.0.0.1.
func (n *Network) redirect(conn *nftables.Conn, c *nftables.Chain) {
	add(conn, c, isFamily(true), to_(loopback6), verdict(expr.VerdictReturn))
	add(conn, c, toLocalAddress(), jump(chainHostPorts))
}

// forwardPorts passes host ports on to pods. Ports of one address come before those of all addresses.
func (n *Network) forwardPorts(conn *nftables.Conn, c *nftables.Chain) {
	for _, m := range maps {
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

// masquerade gives packets the node's address: those of pods that leave the network, and those from the node's loopback or from a pod to a host
// port, for the pod would not know the way back to the one, and would answer the other one directly.
func (n *Network) masquerade(conn *nftables.Conn, c *nftables.Chain) {
	for _, r := range redirections {
		for _, source := range of(append([]netip.Prefix{loopback4}, n.Subnets...), r.v6) {
			add(conn, c, device(expr.MetaKeyOIFNAME, n.Bridge, true), isFamily(r.v6), redirected(), from(source), r.isOne(), masquerade())
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

// guardLoopback drops what pods send to or from the node's loopback addresses, which the kernel lets in by the bridge for the sake of host ports (CVE-2020-8558).
// Answers to what came from there are still for the node's address on the bridge here.
func (n *Network) guardLoopback(conn *nftables.Conn, c *nftables.Chain) {
	for _, side := range []expressions{to_(loopback4), from(loopback4)} {
		add(conn, c, device(expr.MetaKeyIIFNAME, n.Bridge, true), isFamily(false), side, verdict(expr.VerdictDrop))
	}
}

// isolateForwarded drops connections that begin where none shall. Host ports are meant to be reached (others' redirections, such as
// kube-proxy's node ports, are not), but not from pods where those are kept apart: ports of
// the bridge that are isolated would let it pass only where the packet filter does not see bridged packets (br_netfilter).
func (n *Network) isolateForwarded(conn *nftables.Conn, c *nftables.Chain) {
	if !n.IsolatePods && !n.IsolateIngress {
		return
	}
	add(conn, c, device(expr.MetaKeyOIFNAME, n.Bridge, false), verdict(expr.VerdictReturn))
	add(conn, c, known(), verdict(expr.VerdictReturn))
	if n.IsolatePods {
		add(conn, c, device(expr.MetaKeyIIFNAME, n.Bridge, true), verdict(expr.VerdictDrop))
	}
	for _, r := range redirections {
		add(conn, c, isFamily(r.v6), redirected(), r.isOne(), verdict(expr.VerdictReturn))
	}
	if n.IsolateIngress {
		add(conn, c, device(expr.MetaKeyIIFNAME, n.Bridge, false), verdict(expr.VerdictDrop))
	}
}

// isolateNode drops what pods send to the node itself, but ICMP, which routes, the neighbours of IPv6 and path MTUs need.
func (n *Network) isolateNode(conn *nftables.Conn, c *nftables.Chain) {
	if !n.IsolateNode {
		return
	}
	add(conn, c, device(expr.MetaKeyIIFNAME, n.Bridge, false), verdict(expr.VerdictReturn))
	add(conn, c, known(), verdict(expr.VerdictReturn))
	for _, protocol := range []byte{unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6} {
		add(conn, c, isProtocol(protocol), verdict(expr.VerdictReturn))
	}
	add(conn, c, verdict(expr.VerdictDrop))
}

// Try tells why the kernel can't have the network's table, or nil. It is written in a network namespace that goes with the try; modules of the
// kernel that it needs are loaded.
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
	case isMissing(err), errors.Is(err, errors.ErrUnsupported), errors.Is(err, unix.EAFNOSUPPORT), errors.Is(err, unix.EINVAL):
		return fmt.Errorf("the kernel can't have the rules of network %s (Linux 5.2; CONFIG_NFT_NAT, NFT_MASQ, NFT_CT, NFT_FIB_INET): %w", n.Key, err)
	}
	return fmt.Errorf("try whether the kernel can have the rules of network %s: %w", n.Key, err)
}

// Networks returns the keys of networks that have a table.
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

// Available tells why nftables can't be used, or nil.
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
