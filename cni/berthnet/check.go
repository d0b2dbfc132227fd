package berthnet

import (
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"

	"berth/cni/berthnet/conf"
	"berth/cni/berthnet/links"
	"berth/cni/berthnet/rules"
)

func ipNet(p netip.Prefix) net.IPNet {
	return net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// check compares the result of ADD with the node. The error names the first difference.
func (p *Plugin) check(args *skel.CmdArgs) error {
	a, err := p.attachment(args, conf.Parse)
	if err != nil {
		return err
	}
	result, err := a.previous(args.StdinData)
	if err != nil {
		return err
	}
	kept, ok, err := a.store.Of(a.id, a.ifName)
	if err != nil {
		return err
	}
	if !ok {
		return fmt.Errorf("no address is reserved for container %s", a.id)
	}
	expected := links.Expected{Attachment: links.Attachment{
		ContainerID: a.id,
		IfName:      a.ifName,
		NetNS:       a.netns,
		Hairpin:     a.Hairpins(),
	}}
	for _, ip := range result.IPs {
		if prefix, own := a.isOwn(result, ip); own {
			expected.IPs = append(expected.IPs, prefix)
		}
	}
	for _, want := range kept.IPs {
		if !slices.ContainsFunc(expected.IPs, func(p netip.Prefix) bool { return p.Addr() == want }) {
			return fmt.Errorf("address %s is reserved for container %s, but not in the result of its ADD", want, a.id)
		}
	}
	for _, r := range result.Routes {
		expected.Routes = append(expected.Routes, routeOf(r))
	}
	for _, i := range result.Interfaces {
		if i.Name == a.ifName && i.Sandbox != "" {
			expected.MAC = i.Mac
		}
	}
	if err := a.checkNetwork(&expected); err != nil {
		return err
	}
	if err := expected.Check(); err != nil {
		return err
	}
	return a.checkPorts(rules.HostPorts(a.Ports, kept.IPs))
}

// previous decodes the result of ADD, which the runtime passes in prevResult.
func (a *attachment) previous(stdin []byte) (*types100.Result, error) {
	if a.RawPrevResult == nil {
		return nil, types.NewError(types.ErrInvalidNetworkConfig, "CHECK needs prevResult", "")
	}
	if err := version.ParsePrevResult(&a.NetConf); err != nil {
		return nil, types.NewError(types.ErrDecodingFailure, "prevResult cannot be decoded", err.Error())
	}
	result, err := types100.NewResultFromResult(a.PrevResult)
	if err != nil {
		return nil, types.NewError(types.ErrDecodingFailure, "prevResult cannot be decoded", err.Error())
	}
	return result, nil
}

// isOwn reports whether an address of a result belongs to the pod's interface.
func (a *attachment) isOwn(result *types100.Result, ip *types100.IPConfig) (netip.Prefix, bool) {
	if ip.Interface != nil && (*ip.Interface < 0 || *ip.Interface >= len(result.Interfaces) ||
		result.Interfaces[*ip.Interface].Name != a.ifName) {
		return netip.Prefix{}, false
	}
	return prefixOf(ip.Address), true
}

func prefixOf(n net.IPNet) netip.Prefix {
	ip, _ := netip.AddrFromSlice(n.IP)
	ones, _ := n.Mask.Size()
	return netip.PrefixFrom(ip.Unmap(), ones)
}

func routeOf(r *types.Route) links.Route {
	gateway, _ := netip.AddrFromSlice(r.GW)
	return links.Route{Dst: prefixOf(r.Dst), Gateway: gateway.Unmap()}
}

// checkNetwork checks the bridge and the rules.
func (a *attachment) checkNetwork(e *links.Expected) error {
	bridge, err := links.FindBridge(a.Bridge)
	if err != nil {
		return err
	}
	if !bridge.BelongsTo(a.Key()) {
		return fmt.Errorf("bridge %s is missing or belongs to another network", a.Bridge)
	}
	if !bridge.Serves(a.gateways()) {
		return fmt.Errorf("bridge %s is not up with the addresses %v", a.Bridge, a.gateways())
	}
	e.Bridge = bridge
	installed, err := a.filter.Installed(a.rules(bridge))
	if err == nil && !installed {
		err = fmt.Errorf("packet filter rules of network %s are missing or of another configuration", a.Key())
	}
	return err
}

func (a *attachment) checkPorts(wanted []rules.HostPort) error {
	if len(wanted) == 0 {
		return nil
	}
	open, err := a.filter.Ports(a.Key())
	if err != nil {
		return err
	}
	for _, p := range wanted {
		if !slices.Contains(open, p) {
			return fmt.Errorf("%s is not open for container %s", p, a.id)
		}
	}
	return nil
}
