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

// Obstacle is something on the node that pods of a network would meet, though it can be made.
type Obstacle struct{ Problem, Fix string }

// Obstacles looks for what is in the way of a network's pods: firewalls that know neither the bridge nor the pods' addresses, and other networks with the same
// addresses. Nothing is changed.
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
			Problem: fmt.Sprintf("the packet filter's chain %q drops forwarded packets that it has no rule for, and no rule of its table is about %s or its subnets: pods may reach nobody outside, and their host ports not be reached", c.Chain, n.Bridge),
			Fix:     howToPass(c.Tool, n.Bridge),
		})
	}
	err = links.CheckOverlap(subnets, own)
	if errors.Is(err, links.ErrOverlap) {
		all = append(all, Obstacle{Problem: err.Error(), Fix: "choose others with network_subnets, unless the control plane gives the node a pod CIDR"})
		err = nil
	}
	return all, err
}

// howToPass says how a firewall is told to let a bridge's packets pass.
func howToPass(tool, bridge string) string {
	if tool == "" {
		tool = "iptables"
	}
	return fmt.Sprintf("with docker or ufw: %[2]s -I FORWARD -i %[1]s -j ACCEPT; %[2]s -I FORWARD -o %[1]s -j ACCEPT (docker's users' chain is DOCKER-USER); with firewalld: firewall-cmd --permanent --zone=trusted --add-interface=%[1]s", bridge, tool)
}

// subnetsOf are those that pods have: of the bridge, once it is the network's, and those that the runtime has new ones get, which the bridge may not have yet. The
// configured ones count only before there are others.
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
