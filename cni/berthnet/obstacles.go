package berthnet

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"berth/cni/berthnet/conf"
	"berth/cni/berthnet/links"
	"berth/cni/berthnet/rules"
)

// Obstacle is a setting of the node that restricts pods of a network.
type Obstacle struct{ Problem, Fix string }

// Obstacles finds firewalls without rules for the bridge or the pods' addresses, and other networks
// with the same addresses. It changes nothing.
func Obstacles(n *conf.Net) (all []Obstacle, err error) {
	bridge, err := links.FindBridge(n.Bridge)
	if err != nil {
		return nil, err
	}
	subnets, own := subnetsOf(n, bridge), ""
	if bridge != nil {
		own = bridge.Name
	}
	filter := &rules.Filter{}
	chains, err := filter.Blocking(n.Bridge, subnets)
	if err := errors.Join(err, filter.Close()); err != nil {
		return nil, err
	}
	for _, c := range chains {
		all = append(all, Obstacle{
			Problem: fmt.Sprintf("packet filter chain %q drops forwarded packets by default and its table has no rule for %s "+
				"or its subnets: pods may lack connections to other hosts, and their host ports may be "+
				"unreachable", c.Chain, n.Bridge),
			Fix: howToPass(c.Tool, n.Bridge),
		})
	}
	err = links.CheckOverlap(subnets, own)
	if errors.Is(err, links.ErrOverlap) {
		all = append(all, Obstacle{Problem: err.Error(),
			Fix: "set other subnets with network.subnets, or give the node another pod CIDR"})
		err = nil
	}
	return all, err
}

// howToPass returns the commands that make a firewall accept a bridge's packets.
func howToPass(tool, bridge string) string {
	if tool == "" {
		tool = "iptables"
	}
	return fmt.Sprintf("with docker or ufw: %[2]s -I FORWARD -i %[1]s -j ACCEPT; %[2]s -I FORWARD -o %[1]s -j ACCEPT "+
		"(docker's users' chain is DOCKER-USER); with firewalld: firewall-cmd --permanent --zone=trusted "+
		"--add-interface=%[1]s", bridge, tool)
}

// subnetsOf returns the subnets of existing and new pods: the subnets of the network's bridge, and
// the runtime's ranges, which the bridge may not have yet. Without either it returns the configured
// subnets.
func subnetsOf(n *conf.Net, bridge *links.Bridge) (subnets []netip.Prefix) {
	if bridge.BelongsTo(n.Key()) {
		for _, p := range bridge.Prefixes {
			subnets = append(subnets, p.Masked())
		}
	}
	if len(subnets) > 0 && len(n.Runtime.IPRanges) == 0 {
		return subnets
	}
	for _, r := range n.Ranges {
		if !slices.Contains(subnets, r.Subnet) {
			subnets = append(subnets, r.Subnet)
		}
	}
	return subnets
}
