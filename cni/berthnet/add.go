package berthnet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"berth/cni/berthnet/addresses"
	"berth/cni/berthnet/conf"
	"berth/cni/berthnet/links"
	"berth/cni/berthnet/rules"
	"berth/internal/cleanup"
	"berth/internal/lockfile"
)

// add connects a pod. On an error it undoes its steps.
func (p *Plugin) add(ctx context.Context, args *skel.CmdArgs) (result *types100.Result, err error) {
	a, err := p.attachment(args, conf.Parse)
	if err != nil {
		return nil, err
	}
	if len(a.Ranges) == 0 {
		return nil, types.NewError(types.ErrInvalidNetworkConfig, "invalid configuration of berth-net", errNoSubnet.Error())
	}
	if err := a.openStore(); err != nil {
		return nil, err
	}
	undo := cleanup.New()
	defer undo.Run(&err)
	kept, err := a.reserve(ctx) // before the bridge is inspected, because the reservation keeps the gateway's address on the bridge
	if err != nil {
		return nil, err
	}
	undo.Add("detach", func() error { return a.release(context.WithoutCancel(ctx), kept) })
	bridge, plugged, err := a.plug(ctx, kept)
	if err != nil {
		return nil, err
	}
	if err := links.SetUp(a.describe(bridge, kept)); err != nil {
		return nil, err
	}
	if err := a.openPorts(ctx, kept); err != nil {
		return nil, err
	}
	undo.Release()
	return a.result(bridge, kept, plugged), nil
}

var errNoSubnet = errors.New("neither subnets nor ipRanges has a subnet")

// gateways returns the bridge's addresses.
func (a *attachment) gateways() (all []netip.Prefix) {
	for _, r := range a.Ranges {
		all = append(all, netip.PrefixFrom(r.Gateway, r.Subnet.Bits()))
	}
	return all
}

// plug connects the pod's port to the bridge. It creates the missing parts of the bridge and of the
// rules for all pods. After a boot, the first pod creates them under the exclusive lock. Pods that
// start at the same time then share the lock.
func (a *attachment) plug(ctx context.Context,
	kept addresses.Reservation) (bridge *links.Bridge, made links.Plugged, err error) {
	for _, unlessReady := range []bool{true, false} {
		bridge, made, err = a.plugIfReady(ctx, kept)
		if bridge == nil && err == nil {
			bridge, made, err = a.makeAndPlug(ctx, kept, unlessReady)
		}
		if bridge != nil || err != nil {
			break
		}
	}
	return bridge, made, err
}

// plugIfReady returns a nil bridge if the bridge or a rule is missing. It holds the shared lock
// until the port exists, so that no other network can take the bridge.
func (a *attachment) plugIfReady(ctx context.Context,
	kept addresses.Reservation) (*links.Bridge, links.Plugged, error) {
	unlock, err := links.Lock(ctx, lockfile.Shared)
	if err != nil {
		return nil, links.Plugged{}, err
	}
	defer unlock()
	bridge, err := a.ready()
	if bridge == nil || err != nil {
		return nil, links.Plugged{}, err
	}
	made, err := links.Plug(a.describe(bridge, kept))
	return bridge, made, err
}

// makeAndPlug holds the exclusive lock until the port exists. Otherwise two networks that start at
// the same time would take the bridge from each other. If unlessReady is set, and another pod has
// created everything meanwhile, it returns a nil bridge.
func (a *attachment) makeAndPlug(ctx context.Context, kept addresses.Reservation,
	unlessReady bool) (*links.Bridge, links.Plugged, error) {
	unlockStore, err := a.store.Lock(ctx) // other pods may be creating the network
	if err != nil {
		return nil, links.Plugged{}, err
	}
	defer unlockStore()
	if unlessReady {
		if bridge, err := a.ready(); bridge != nil || err != nil {
			return nil, links.Plugged{}, err
		}
	}
	unlock, err := links.Lock(ctx, lockfile.Exclusive)
	if err != nil {
		return nil, links.Plugged{}, err
	}
	defer unlock()
	bridge, err := a.makeNetwork()
	if err != nil {
		return nil, links.Plugged{}, err
	}
	made, err := links.Plug(a.describe(bridge, kept))
	return bridge, made, err
}

func (a *attachment) reserve(ctx context.Context) (addresses.Reservation, error) {
	kept, err := a.store.Reserve(ctx, a.id, a.ifName, a.Ranges, a.Runtime.PreferredIPs)
	switch {
	case errors.Is(err, addresses.ErrFull):
		return kept, types.NewError(types.ErrTryAgainLater, "no address for the pod", err.Error())
	case errors.Is(err, addresses.ErrExists):
		return kept, types.NewError(types.ErrInternal, fmt.Sprintf("container %s is already attached to network %s as %s",
			a.id, a.Name, a.ifName), "")
	}
	return kept, err
}

// describe returns the attachment for package links.
func (a *attachment) describe(b *links.Bridge, kept addresses.Reservation) links.Attachment {
	mtu := a.MTU
	if mtu == 0 {
		mtu = b.MTU
	}
	return links.Attachment{ContainerID: a.id, IfName: a.ifName, NetNS: a.netns, Network: a.Key(), Bridge: b, MTU: mtu,
		Hairpin: a.Hairpins(),
		Ingress: limit(a.Runtime.Bandwidth.IngressRate, a.Runtime.Bandwidth.IngressBurst),
		Egress:  limit(a.Runtime.Bandwidth.EgressRate, a.Runtime.Bandwidth.EgressBurst),
		IPs:     a.prefixes(kept), Routes: a.podRoutes()}
}

// limit converts bits to bytes.
func limit(rate, burst uint64) links.Limit { return links.Limit{Rate: rate / 8, Burst: burst / 8} }

// prefixes returns the pod's addresses with the lengths of their subnets.
func (a *attachment) prefixes(kept addresses.Reservation) (all []netip.Prefix) {
	for i, ip := range kept.IPs {
		all = append(all, netip.PrefixFrom(ip, a.Ranges[i].Subnet.Bits()))
	}
	return all
}

// podRoutes returns the configured routes of the pod's families, or the default routes.
func (a *attachment) podRoutes() (all []links.Route) {
	for _, r := range a.Ranges {
		if a.Routes == nil {
			all = append(all, links.Route{Dst: netip.PrefixFrom(unspecified(r.Gateway), 0), Gateway: r.Gateway})
		}
		for _, route := range a.Routes {
			if route.Dst.Addr().BitLen() == r.Gateway.BitLen() {
				all = append(all, links.Route{Dst: route.Dst, Gateway: r.Gateway})
			}
		}
	}
	return all
}

func unspecified(like netip.Addr) netip.Addr {
	if like.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// openPorts writes the host ports into the reservation's note and opens them. It holds the store's
// lock, so that no other process rewrites the rules meanwhile.
func (a *attachment) openPorts(ctx context.Context, kept addresses.Reservation) error {
	ports := rules.HostPorts(a.Ports, kept.IPs)
	if len(ports) == 0 {
		return nil
	}
	note, err := json.Marshal(ports)
	if err != nil {
		return err
	}
	unlock, err := a.store.Lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	for range rules.Attempts {
		if err = a.tryPorts(ctx, kept, ports, note); !errors.Is(err, rules.ErrGone) {
			break
		}
	}
	if err != nil {
		return err
	}
	return a.filter.ForgetOthers(ports)
}

// tryPorts returns ErrGone if another program deletes the rules meanwhile. If the ports belong to
// another pod, it removes the note. Otherwise the next rewrite of the rules would open the ports.
func (a *attachment) tryPorts(ctx context.Context, kept addresses.Reservation, ports []rules.HostPort,
	note []byte) error {
	if _, err := a.install(ctx); err != nil { // the rules may have been deleted meanwhile
		return err
	}
	if err := a.setServices(); err != nil {
		return err
	}
	if err := a.store.SetNote(kept, note); err != nil {
		return err
	}
	err := a.filter.OpenPorts(a.Key(), rules.Pod{ID: a.id, Ports: ports})
	if !errors.Is(err, rules.ErrInUse) && !errors.Is(err, rules.ErrGone) {
		return err
	}
	if errors.Is(err, rules.ErrInUse) { // the other pod's DEL may be running
		err = types.NewError(types.ErrTryAgainLater, "host ports of container "+a.id, err.Error())
	}
	if e := a.store.SetNote(kept, nil); e != nil {
		return errors.Join(err, e)
	}
	return err
}

func (a *attachment) result(b *links.Bridge, kept addresses.Reservation, made links.Plugged) *types100.Result {
	const pod = 2 // index of the pod's interface in the result
	r := &types100.Result{CNIVersion: types100.ImplementedSpecVersion, DNS: a.DNS, Interfaces: []*types100.Interface{
		{Name: b.Name, Mac: b.MAC.String()},
		{Name: links.PortName(a.id, a.ifName), Mac: made.PortMAC.String()},
		pod: {Name: a.ifName, Mac: made.PodMAC.String(), Sandbox: a.netns},
	}}
	for i, ip := range a.prefixes(kept) {
		r.IPs = append(r.IPs, &types100.IPConfig{
			Interface: types100.Int(pod),
			Address:   ipNet(ip),
			Gateway:   a.Ranges[i].Gateway.AsSlice(),
		})
	}
	for _, route := range a.podRoutes() {
		r.Routes = append(r.Routes, &types.Route{Dst: ipNet(route.Dst), GW: route.Gateway.AsSlice()})
	}
	return r
}
