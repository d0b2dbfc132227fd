package berthnet

import (
	"context"
	"encoding/json"
	"errors"
	"net/netip"

	"github.com/containernetworking/cni/pkg/types"

	"berth/cni/berthnet/links"
	"berth/cni/berthnet/rules"
	"berth/internal/lockfile"
)

// description returns the wanted bridge, without the addresses in use.
func (a *attachment) description() *links.Description {
	return &links.Description{Name: a.Bridge, Network: a.Key(), MTU: a.MTU, Gateways: a.gateways()}
}

// ready returns the network's bridge. It returns nil if the bridge differs from its description or
// the rules for all pods are not installed.
func (a *attachment) ready() (*links.Bridge, error) {
	bridge, err := links.FindBridge(a.Bridge)
	if err != nil {
		return nil, err
	}
	d := a.description()
	if !bridge.BelongsTo(d.Network) || !bridge.Serves(d.Gateways) {
		return nil, nil
	}
	if len(bridge.Prefixes) > len(d.Gateways) { // addresses of an earlier configuration
		if d.InUse, err = a.addressesInUse(); err != nil {
			return nil, err
		}
	}
	if len(bridge.Obsolete(d)) > 0 {
		return nil, nil
	}
	if installed, err := a.filter.Installed(a.rules(bridge)); !installed || err != nil {
		return nil, err
	}
	return bridge, nil
}

// makeNetwork creates the missing parts of the bridge and of the rules for all pods. The caller
// holds both locks.
func (a *attachment) makeNetwork() (*links.Bridge, error) {
	d := a.description()
	var err error
	if d.InUse, err = a.addressesInUse(); err != nil {
		return nil, err
	}
	bridge, err := links.MakeBridge(d)
	if err != nil {
		return nil, withCode(err)
	}
	_, err = a.installFor(bridge)
	return bridge, err
}

// withCode maps errors of MakeBridge to CNI error codes.
func withCode(err error) error {
	if errors.Is(err, links.ErrTaken) || errors.Is(err, links.ErrOverlap) {
		return types.NewError(types.ErrInvalidNetworkConfig, err.Error(), "")
	}
	if errors.Is(err, links.ErrQuicker) {
		return types.NewError(types.ErrTryAgainLater, err.Error(), "")
	}
	return err
}

func (a *attachment) addressesInUse() (all []netip.Addr, err error) {
	kept, err := a.store.All()
	for _, r := range kept {
		all = append(all, r.IPs...)
	}
	return all, err
}

// install writes the rules unless they are installed, and opens the host ports of all pods. The
// caller holds the store's lock, so the bridge's addresses in the rules do not change. The shared
// lock prevents another network from taking the bridge. It would delete these rules as outdated.
func (a *attachment) install(ctx context.Context) (written bool, err error) {
	unlock, err := links.Lock(ctx, lockfile.Shared)
	if err != nil {
		return false, err
	}
	defer unlock()
	bridge, err := links.FindBridge(a.Bridge)
	if err != nil || !bridge.BelongsTo(a.Key()) {
		return false, err // there is no bridge, or makeNetwork must create it again
	}
	return a.installFor(bridge)
}

func (a *attachment) installFor(bridge *links.Bridge) (written bool, err error) {
	if ok, err := a.filter.Installed(a.rules(bridge)); ok || err != nil {
		return false, err
	}
	notes, err := a.store.Notes()
	if err != nil {
		return false, err
	}
	var pods []rules.Pod
	for _, n := range notes {
		there, err := links.HasPort(n.ContainerID, n.IfName)
		if err != nil {
			return false, err
		}
		if !there {
			continue // the pod does not exist any more, for example after a boot, and its DEL will follow
		}
		pod := rules.Pod{ID: n.ContainerID}
		if json.Unmarshal(n.Note, &pod.Ports) != nil {
			continue // a power failure has damaged the note; no port was opened since
		}
		pods = append(pods, pod)
	}
	return true, a.filter.Install(a.rules(bridge), pods)
}

// restore repairs the node for existing pods: it writes missing rules and sets the kernel's
// settings.
func (a *attachment) restore(ctx context.Context) (written bool, err error) {
	bridge, err := links.FindBridge(a.Bridge)
	if err != nil || !bridge.BelongsTo(a.Key()) {
		return false, err
	}
	if err := bridge.Prepare(bridge.Prefixes); err != nil {
		return false, err
	}
	if ok, err := a.filter.Installed(a.rules(bridge)); err != nil {
		return false, err
	} else if ok {
		return false, a.setServices()
	}
	if err := a.openStore(); err != nil { // the directory with the lock may have been deleted
		return false, err
	}
	unlock, err := a.store.Lock(ctx)
	if err != nil {
		return false, err
	}
	defer unlock()
	if written, err = a.install(ctx); err != nil {
		return written, err
	}
	return written, a.setServices()
}

// setServices tells the rules which addresses belong to Services. If the rules are missing, the
// next call of restore or tryPorts writes them.
func (a *attachment) setServices() error {
	addresses, err := links.ServiceAddresses()
	if err != nil {
		return err
	}
	if err := a.filter.SetServices(a.Key(), addresses); !errors.Is(err, rules.ErrGone) {
		return err
	}
	return nil
}

// rules returns the wanted rules. They contain all subnets of the bridge, because older pods may
// have addresses of an earlier configuration.
func (a *attachment) rules(b *links.Bridge) rules.Network {
	n := rules.Network{Key: a.Key(), Bridge: b.Name, Masquerade: a.Masquerades(), NoMasquerade: a.NoMasquerade}
	for _, p := range b.Prefixes {
		n.Subnets = append(n.Subnets, p.Masked())
	}
	return n
}
