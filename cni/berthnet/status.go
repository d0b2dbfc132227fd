package berthnet

import (
	"context"
	"errors"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

	"berth/cni/berthnet/addresses"
	"berth/cni/berthnet/conf"
	"berth/cni/berthnet/links"
	"berth/cni/berthnet/rules"
)

// status reports whether an ADD with the same configuration could succeed. It does not require a
// free address, because a full node continues to run its pods. Unless the plugin is passive, it
// repairs the node for existing pods. Error codes (specification, section 2, STATUS): 50 if no pod
// can be attached, and 51 if existing pods may also have lost connections.
func (p *Plugin) status(ctx context.Context, args *skel.CmdArgs) error {
	a, err := p.attachment(args, conf.Parse)
	if err != nil {
		return err
	}
	if err := p.checkAdd(a); err != nil {
		return types.NewError(types.ErrPluginNotAvailable, "berth-net can attach no pod", err.Error())
	}
	if !p.Passive {
		written, err := a.restore(ctx)
		if written {
			p.log().Warn("wrote the packet filter rules again, which were missing or of an earlier version", "network", a.Key())
		}
		if err != nil {
			return types.NewError(types.ErrLimitedConnectivity,
				"berth-net can attach no pod, and existing pods may be unreachable", err.Error())
		}
	}
	// last, because errors of existing pods are worse
	if err := errors.Join(links.CheckLock(ctx), a.store.CheckLock()); err != nil {
		return types.NewError(types.ErrPluginNotAvailable, "berth-net can attach no pod", err.Error())
	}
	return nil
}

// checkAdd returns the error that an ADD would return, or nil. It changes nothing, but the kernel
// may load modules.
func (p *Plugin) checkAdd(a *attachment) error {
	// If the network has the capability ipRanges, a runtime may pass ranges to ADD, but not to
	// STATUS.
	if len(a.Ranges) == 0 && !a.Capabilities[conf.CapabilityRanges] {
		return errNoSubnet
	}
	if err := errors.Join(a.filter.Available(), addresses.Check(a.Dir())); err != nil {
		return err
	}
	if err := p.canFilter(a); err != nil {
		return err
	}
	return links.CheckBridge(a.description())
}

// canFilter returns why the kernel does not support the network's rules, or nil. It tries them in a
// namespace until a trial succeeds. If the rules are installed or pods exist, it skips the trial,
// because restore then reports errors.
func (p *Plugin) canFilter(a *attachment) error {
	if p.filters.Load() {
		return nil
	}
	bridge, err := links.FindBridge(a.Bridge)
	if err != nil {
		return err
	}
	if bridge.BelongsTo(a.Key()) {
		installed, err := a.filter.Installed(a.rules(bridge))
		if installed {
			p.filters.Store(true)
		}
		if installed || err != nil {
			return err
		}
		if ports, err := links.Ports(a.Key()); len(ports) > 0 || err != nil {
			return err
		}
	}
	try := p.tryFilter
	if try == nil {
		try = rules.Try
	}
	if err := try(a.rules(&links.Bridge{Name: a.Bridge, Prefixes: a.gateways()})); err != nil {
		return err
	}
	p.filters.Store(true)
	return nil
}
