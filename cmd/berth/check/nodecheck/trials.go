package nodecheck

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"berth/internal/netns"
)

// trial tries a feature that pod networks use. Only an attempt shows whether the kernel has it or
// can load its module.
type trial struct {
	subject string
	purpose string
	modules string // for modprobe
	config  string // kernel configuration
	do      func(context.Context) error
}

var trials = []trial{
	{"veth", "the pods' network interfaces", "veth", "CONFIG_VETH", tryVeth},
	{"bridge", "networks of the CNI plugin bridge", "bridge", "CONFIG_BRIDGE", tryBridge},
	{
		"nftables",
		"masquerading and services with nftables or iptables-nft",
		"nf_tables nft_chain_nat nft_masq",
		"CONFIG_NF_TABLES, CONFIG_NFT_NAT and CONFIG_NFT_MASQ",
		tryNftables,
	},
	{
		"iptables",
		"host ports and masquerading by the CNI plugins portmap and bridge",
		"nft_compat nft_chain_nat iptable_nat xt_MASQUERADE xt_comment",
		"CONFIG_NFT_COMPAT or CONFIG_IP_NF_NAT",
		tryIptables,
	},
}

// programTimeout bounds a program that a trial runs.
const programTimeout = 20 * time.Second

// checkNetworkParts tries the features in a temporary network namespace.
func checkNetworkParts(ctx context.Context, _ *Node) []Finding {
	var findings []Finding
	for _, t := range trials {
		err := netns.InNew(func() error { return t.do(ctx) })
		findings = append(findings, t.finding(err))
	}
	return findings
}

// finding returns the result of a trial. It is never a failure, because a node's network may
// not need the feature.
func (t trial) finding(err error) Finding {
	switch {
	case err == nil:
		return ok(t.subject, "works")
	case errors.Is(err, exec.ErrNotFound):
		return lacking(Warning, t.subject, err.Error(), fmt.Sprintf("install %s, needed for %s", t.subject, t.purpose))
	case errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES):
		return lacking(Warning, t.subject, err.Error(), "run berth as root, with CAP_NET_ADMIN and CAP_SYS_ADMIN")
	}
	return lacking(
		Warning,
		t.subject,
		err.Error(),
		fmt.Sprintf(
			"modprobe -a %s, and list them in /etc/modules-load.d/berth.conf; without such modules install a kernel with %s. Needed for %s",
			t.modules,
			t.config,
			t.purpose,
		),
	)
}

func tryVeth(context.Context) error {
	return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "berth0"}, PeerName: "berth1"})
}

func tryBridge(context.Context) error {
	return netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "berth0"}})
}

// tryNftables adds a masquerading rule.
func tryNftables(context.Context) error {
	conn, err := nftables.New()
	if err != nil {
		return err
	}
	table := conn.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: "berth"})
	chain := conn.AddChain(
		&nftables.Chain{
			Table:    table,
			Name:     "berth",
			Type:     nftables.ChainTypeNAT,
			Hooknum:  nftables.ChainHookPostrouting,
			Priority: nftables.ChainPriorityNATSource,
		},
	)
	conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{&expr.Masq{}}})
	return conn.Flush()
}

// tryIptables adds a rule as CNI plugins do, through the installed variant of iptables.
func tryIptables(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, programTimeout)
	defer cancel()
	out, err := exec.CommandContext(ctx, "iptables", "-w", "5", "-t", "nat", "-A", "POSTROUTING", "-m", "comment",
		"--comment", "berth", "-j", "MASQUERADE").
		CombinedOutput()
	if text := strings.TrimSpace(string(out)); err != nil && text != "" {
		return fmt.Errorf("%w: %s", err, text)
	}
	return err
}
