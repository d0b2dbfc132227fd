// Package berthnet is berth's own network, as a CNI plugin: a bridge, addresses, masquerading, host ports and isolation, of
// IPv4, IPv6 or both.
//
// # Contract
//
// One plugin does what bridge, host-local, portmap and firewall do together, by asking the kernel: netlink and nftables,
// no program. It implements CNI 1.1.0 (ADD, DEL, CHECK, STATUS, GC, VERSION) for configurations from 0.3.0 on. The daemon calls it
// as a function, Exec; anybody else runs it as a program, Main. Both may work at the same time.
//
// What is on the node bears the network's key, of its name and the place of its addresses (conf.Net.Key). A bridge is one network's, and changes
// hands under a lock of the node's (links.Lock). So two daemons, or a daemon and another runtime, do not touch each other's pods; a bridge on which another
// network has pods is refused. STATUS refuses what ADD would.
//
// It may be killed at any instruction, in the daemon together with it. So an ADD writes down first whose the addresses are
// (package addresses), and a DEL removes that last. All that is made for an attachment is found from its container ID, its
// interface's name and that reservation: the port by its name (package links), host ports by their note or, should it be missing,
// by the pod's addresses (package rules). The bridge and the rules for all pods belong to the node: they are made when an ADD misses
// them, and stay. Who deletes all rules of the packet filter, as each reload of nftables.service does, deletes these, too: ADD and STATUS write them
// again, with the host ports of all pods, from the notes of the reservations; the daemon is told by the kernel (Watch).
//
// GC gives back all that is in the reservations, on the bridge and in the rules for attachments that are not valid.
//
// Configuration: package conf.
package berthnet

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"
	"golang.org/x/sys/unix"

	"berth/cni/berthnet/addresses"
	"berth/cni/berthnet/conf"
	"berth/cni/berthnet/links"
	"berth/cni/berthnet/rules"
	"berth/internal/cleanup"
	"berth/internal/lockfile"
)

// Versions are those of the specification that the plugin knows.
var Versions = version.VersionsStartingFrom("0.3.0")

// Plugin is the plugin, for the network namespace in which it is first used. Its methods may be called concurrently.
type Plugin struct {
	Passive bool         // STATUS only looks, and mends nothing
	Log     *slog.Logger // of what fails while nobody waits for it; nil: that is not logged

	filter rules.Filter
	seen   sync.Map // configurations that ADD and STATUS came with, *conf.Net by their keys: for Watch

	leaving     leaving
	leavingTime time.Duration // 0: leavingTime

	overlaps links.Overlaps // as STATUS has found them

	lockPatience time.Duration // of addresses' locks; 0: theirs

	checksSource   atomic.Bool  // the kernel can, as was tried
	tryCheckSource func() error // nil: links.CanCheckSource

	filters   atomic.Bool               // the kernel can have the rules, as was tried or seen
	tryFilter func(rules.Network) error // nil: rules.Try
}

// Open opens what the plugin keeps open, which the first pod would do. An error says that no pod can be attached for now.
func (p *Plugin) Open() error { return p.filter.Open() }

func (p *Plugin) log() *slog.Logger { return cmp.Or(p.Log, slog.New(slog.DiscardHandler)) }

// Close closes what the plugin has open. Nothing else is changed.
func (p *Plugin) Close() error {
	p.leaving.close()
	return p.filter.Close()
}

// attachment is what one call is about.
type attachment struct {
	*conf.Net
	plugin *Plugin
	filter *rules.Filter
	store  *addresses.Store
	id     string
	ifName string
	netns  string // path; empty: it is gone
	goes   bool   // the namespace is about to go, and the pod's device with it
}

func (p *Plugin) attachment(args *skel.CmdArgs, parse func(data []byte) (*conf.Net, error)) (*attachment, error) {
	n, err := parse(args.StdinData)
	if err != nil {
		return nil, err
	}
	a := p.of(n)
	a.id, a.ifName, a.netns = args.ContainerID, args.IfName, args.Netns
	return a, nil
}

// of is no attachment yet, but what all of a network have in common.
func (p *Plugin) of(n *conf.Net) *attachment {
	a := &attachment{Net: n, plugin: p, filter: &p.filter, store: addresses.Inspect(n.Dir())}
	a.store.Patience = p.lockPatience
	return a
}

// openStore makes the directory of addresses, where there is none.
func (a *attachment) openStore() error {
	store, err := addresses.Open(a.Dir())
	if err != nil {
		return err
	}
	store.Patience = a.store.Patience
	a.store = store
	return nil
}

// add connects a pod. What it has done is undone if it fails.
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
	kept, err := a.reserve(ctx) // before the bridge is looked at: from now on nobody takes the gateway away
	if err != nil {
		return nil, err
	}
	undo.Add("detach", func() error { return a.release(context.WithoutCancel(ctx), kept) })
	bridge, plugged, err := a.plug(ctx, kept)
	if err != nil {
		return nil, err
	}
	p.seen.Store(a.Key(), a.Net)
	if err := links.SetUp(a.describe(bridge, kept)); err != nil {
		return nil, err
	}
	if err := a.openPorts(ctx, kept); err != nil {
		return nil, err
	}
	undo.Release()
	return a.result(bridge, kept, plugged), nil
}

var errNoSubnet = errors.New("no subnet is given, by subnets or by ipRanges")

// gateways are the bridge's addresses.
func (a *attachment) gateways() (all []netip.Prefix) {
	for _, r := range a.Ranges {
		all = append(all, netip.PrefixFrom(r.Gateway, r.Subnet.Bits()))
	}
	return all
}

// plug connects the pod's port with the bridge. What is missing of the bridge and of the rules for all pods is made: after a boot all of it, by the
// first of the pods that come together; the others then share the lock.
func (a *attachment) plug(ctx context.Context, kept addresses.Reservation) (bridge *links.Bridge, made links.Plugged, err error) {
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

// plugIfReady returns no bridge if something is missing. The bridge does not become another network's before that would be told that there is a port.
func (a *attachment) plugIfReady(ctx context.Context, kept addresses.Reservation) (*links.Bridge, links.Plugged, error) {
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

// makeAndPlug keeps other networks from the bridge until there is a port: else two that begin at the same time would take it from each other. With
// unlessReady it returns no bridge if all was made while it waited.
func (a *attachment) makeAndPlug(ctx context.Context, kept addresses.Reservation, unlessReady bool) (*links.Bridge, links.Plugged, error) {
	unlockStore, err := a.store.Lock(ctx) // others may be about to do the same
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

// description is what the bridge shall be like, but for what pods have need of.
func (a *attachment) description() *links.Description {
	return &links.Description{Name: a.Bridge, Network: a.Key(), MTU: a.MTU, Gateways: a.gateways()}
}

// ready returns the network's bridge, nil unless it is as described and the rules for all pods are in force.
func (a *attachment) ready() (*links.Bridge, error) {
	bridge, err := links.FindBridge(a.Bridge)
	if err != nil {
		return nil, err
	}
	d := a.description()
	if !bridge.BelongsTo(d.Network) || !bridge.Serves(d.Gateways) {
		return nil, nil
	}
	if len(bridge.Prefixes) > len(d.Gateways) { // from before a change
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

// makeNetwork makes the bridge and the rules for all pods, as far as they are missing. Both locks are held.
func (a *attachment) makeNetwork() (*links.Bridge, error) {
	d := a.description()
	var err error
	if d.InUse, err = a.addressesInUse(); err != nil {
		return nil, err
	}
	bridge, err := links.MakeBridge(d)
	if err != nil {
		a.plugin.overlaps.Forget() // STATUS shall not say for a minute that it could be made
		return nil, refused(err)
	}
	_, err = a.installFor(bridge)
	return bridge, err
}

// refused gives what an administrator has to mend its code, and what passes.
func refused(err error) error {
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

// install writes the rules, unless they are there, and opens the host ports of all pods. The store is locked, so nobody else of the network
// changes the bridge, whose addresses are in the rules; nor does it become another's, whose rules would be taken for old ones.
func (a *attachment) install(ctx context.Context) (written bool, err error) {
	unlock, err := links.Lock(ctx, lockfile.Shared)
	if err != nil {
		return false, err
	}
	defer unlock()
	bridge, err := links.FindBridge(a.Bridge)
	if err != nil || !bridge.BelongsTo(a.Key()) {
		return false, err // there is none yet, or it is to be made anew
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
			continue // the pod is gone, as all are after a boot; its DEL is to come
		}
		pod := rules.Pod{ID: n.ContainerID}
		if json.Unmarshal(n.Note, &pod.Ports) != nil {
			continue // a power cut tore it; since then there was none
		}
		pods = append(pods, pod)
	}
	return true, a.filter.Install(a.rules(bridge), pods)
}

// restore has the node be as pods need it that are there: the rules of the packet filter, which are written if they are gone, and the
// kernel's settings.
func (a *attachment) restore(ctx context.Context) (written bool, err error) {
	bridge, err := links.FindBridge(a.Bridge)
	if err != nil || !bridge.BelongsTo(a.Key()) {
		return false, err
	}
	if err := bridge.Prepare(bridge.Prefixes); err != nil {
		return false, err
	}
	if ok, err := a.filter.Installed(a.rules(bridge)); ok || err != nil {
		return false, err
	}
	if err := a.openStore(); err != nil { // somebody may have deleted the directory, with the lock in it
		return false, err
	}
	unlock, err := a.store.Lock(ctx)
	if err != nil {
		return false, err
	}
	defer unlock()
	return a.install(ctx)
}

// rules is what the packet filter is told. Subnets are all that the bridge serves: pods from before a change have theirs.
func (a *attachment) rules(b *links.Bridge) rules.Network {
	n := rules.Network{Key: a.Key(), Name: a.Name, Bridge: b.Name, Masquerade: a.Masquerades(), NoMasquerade: a.NoMasquerade,
		IsolatePods: a.Isolates(conf.IsolatePods), IsolateIngress: a.Isolates(conf.IsolateIngress), IsolateNode: a.Isolates(conf.IsolateNode)}
	for _, p := range b.Prefixes {
		n.Subnets = append(n.Subnets, p.Masked())
	}
	return n
}

func (a *attachment) reserve(ctx context.Context) (addresses.Reservation, error) {
	kept, err := a.store.Reserve(ctx, a.id, a.ifName, a.Ranges)
	switch {
	case errors.Is(err, addresses.ErrFull):
		return kept, types.NewError(types.ErrTryAgainLater, "no address for the pod", err.Error())
	case errors.Is(err, addresses.ErrExists):
		return kept, types.NewError(types.ErrInternal, fmt.Sprintf("container %s is attached to network %s as %s already", a.id, a.Name, a.ifName), "")
	}
	return kept, err
}

// describe is the attachment as links are made from it.
func (a *attachment) describe(b *links.Bridge, kept addresses.Reservation) links.Attachment {
	mtu := a.MTU
	if mtu == 0 {
		mtu = b.MTU
	}
	return links.Attachment{ContainerID: a.id, IfName: a.ifName, NetNS: a.netns, Network: a.Key(), Bridge: b, MTU: mtu,
		Hairpin: a.Hairpins(), Isolated: a.Isolates(conf.IsolatePods), CheckSource: a.ChecksSource(),
		Ingress: limit(a.Runtime.Bandwidth.IngressRate, a.Runtime.Bandwidth.IngressBurst), Egress: limit(a.Runtime.Bandwidth.EgressRate, a.Runtime.Bandwidth.EgressBurst), IPs: a.prefixes(kept), Routes: a.podRoutes()}
}

// limit is one of bits.
func limit(rate, burst uint64) links.Limit { return links.Limit{Rate: rate / 8, Burst: burst / 8} }

// prefixes are the pod's addresses, with the lengths of their subnets.
func (a *attachment) prefixes(kept addresses.Reservation) (all []netip.Prefix) {
	for i, ip := range kept.IPs {
		all = append(all, netip.PrefixFrom(ip, a.Ranges[i].Subnet.Bits()))
	}
	return all
}

// podRoutes are the configured routes of the families that the pod has, or the default ones.
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

// openPorts opens host ports, which the reservation says before. Nobody of the network writes the rules anew meanwhile.
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

// tryPorts fails with ErrGone if somebody deletes the rules in the middle of it. A note of ports that are not open is taken back: whoever writes the rules
// would open them, though they are another's.
func (a *attachment) tryPorts(ctx context.Context, kept addresses.Reservation, ports []rules.HostPort, note []byte) error {
	if _, err := a.install(ctx); err != nil { // somebody may have deleted the rules since
		return err
	}
	if err := a.store.SetNote(kept, note); err != nil {
		return err
	}
	err := a.filter.OpenPorts(a.Key(), rules.Pod{ID: a.id, Ports: ports})
	if !errors.Is(err, rules.ErrInUse) && !errors.Is(err, rules.ErrGone) {
		return err
	}
	if errors.Is(err, rules.ErrInUse) { // until its DEL, which may be under way
		err = types.NewError(types.ErrTryAgainLater, "host ports of container "+a.id, err.Error())
	}
	if e := a.store.SetNote(kept, nil); e != nil {
		return errors.Join(err, e)
	}
	return err
}

func (a *attachment) result(b *links.Bridge, kept addresses.Reservation, made links.Plugged) *types100.Result {
	const pod = 2 // index
	r := &types100.Result{CNIVersion: types100.ImplementedSpecVersion, DNS: a.DNS, Interfaces: []*types100.Interface{
		{Name: b.Name, Mac: b.MAC.String()},
		{Name: links.PortName(a.id, a.ifName), Mac: made.PortMAC.String()},
		pod: {Name: a.ifName, Mac: made.PodMAC.String(), Sandbox: a.netns},
	}}
	for i, ip := range a.prefixes(kept) {
		r.IPs = append(r.IPs, &types100.IPConfig{Interface: types100.Int(pod), Address: ipNet(ip), Gateway: a.Ranges[i].Gateway.AsSlice()})
	}
	for _, route := range a.podRoutes() {
		r.Routes = append(r.Routes, &types.Route{Dst: ipNet(route.Dst), GW: route.Gateway.AsSlice()})
	}
	return r
}

// del disconnects a pod, as far as it is connected. Nothing it needs is in the configuration but where addresses are kept.
func (p *Plugin) del(ctx context.Context, args *skel.CmdArgs, goes bool) error {
	a, err := p.attachment(args, conf.ParseNames)
	if err != nil {
		return err
	}
	a.goes = goes && a.netns != ""
	kept, ok, err := a.store.Of(a.id, a.ifName)
	switch {
	case err != nil:
		return err
	case ok:
		err = a.release(ctx, kept)
	default: // nothing was made before there was a reservation; but it may have been lost
		err = links.Cut(a.id, a.ifName, !a.goes)
	}
	if a.goes && err == nil {
		p.leaving.add(p.log(), a.id, a.ifName, cmp.Or(p.leavingTime, leavingTime))
	}
	return err
}

// release takes back what is reserved and what was made with it. The reservation goes last: what is left where the store's lock can't be had in time, host ports and
// the reservation, the next DEL or GC finds.
func (a *attachment) release(ctx context.Context, kept addresses.Reservation) error {
	if err := links.Cut(kept.ContainerID, kept.IfName, !a.goes); err != nil {
		return err
	}
	note, err := a.store.Noted(kept)
	if errors.Is(err, fs.ErrNotExist) { // somebody else was quicker
		return nil
	}
	if err != nil {
		return err
	}
	if len(note) > 0 { // it was written before any host port was opened
		unlock, err := a.store.Lock(ctx) // or who writes the rules anew would open them once more
		if err != nil {
			return err
		}
		defer unlock()
		if err := a.closePorts(kept, note); err != nil {
			return err
		}
	}
	return a.store.Release(kept)
}

// closePorts closes the host ports of a reservation, which its note tells.
func (a *attachment) closePorts(kept addresses.Reservation, note []byte) (err error) {
	var ports []rules.HostPort
	if json.Unmarshal(note, &ports) != nil { // a power cut tore it; since then there was none
		if ports, err = a.portsOf(kept.IPs); err != nil {
			return err
		}
	}
	if err := a.filter.ClosePorts(a.Key(), ports); err != nil {
		return err
	}
	return a.filter.ForgetFlows(ports)
}

// portsOf returns the open host ports of pods with addresses.
func (a *attachment) portsOf(ips []netip.Addr) (some []rules.HostPort, err error) {
	all, err := a.filter.Ports(a.Key())
	for _, p := range all {
		for _, ip := range ips {
			if p.Pod == ip {
				some = append(some, p)
			}
		}
	}
	return some, err
}

// gc gives back what is kept for attachments that are not valid. It waits for locks no longer than one attachment's DEL does.
func (p *Plugin) gc(ctx context.Context, args *skel.CmdArgs) error {
	a, err := p.attachment(args, conf.ParseGC)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(a.store.Patience, addresses.LockPatience)) // a lock that is free needs no time
	defer cancel()
	valid := map[types.GCAttachment]bool{}
	for _, v := range a.Valid {
		valid[v] = true
	}
	all, err := a.store.All()
	if err != nil {
		return err
	}
	var errs []error
	used := map[netip.Addr]bool{}
	for _, kept := range all {
		if !valid[types.GCAttachment{ContainerID: kept.ContainerID, IfName: kept.IfName}] {
			errs = append(errs, a.release(ctx, kept))
			continue
		}
		for _, ip := range kept.IPs {
			used[ip] = true
		}
	}
	return errors.Join(append(errs, a.cutStrays(valid), a.closeStrays(used))...)
}

// cutStrays deletes ports of attachments that are not valid, of which no reservation tells.
func (a *attachment) cutStrays(valid map[types.GCAttachment]bool) error {
	ports, err := links.Ports(a.Key())
	for _, p := range ports {
		if !valid[types.GCAttachment{ContainerID: p.ContainerID, IfName: p.IfName}] {
			err = errors.Join(err, links.Cut(p.ContainerID, p.IfName, true))
		}
	}
	return err
}

// closeStrays closes host ports of addresses that are nobody's.
func (a *attachment) closeStrays(used map[netip.Addr]bool) error {
	all, err := a.filter.Ports(a.Key())
	if err != nil {
		return err
	}
	var strays []rules.HostPort
	for _, p := range all {
		if !used[p.Pod] {
			strays = append(strays, p)
		}
	}
	return a.filter.ClosePorts(a.Key(), strays)
}

// status tells whether an ADD with the same configuration could succeed: not whether an address is free, since a node that has no more of them goes on with
// the pods that it has. What pods that are there miss on the node is made again. Codes: 50 if no pod can be attached; 51 if pods that are there may have
// lost their connections as well (specification, section 2, STATUS).
func (p *Plugin) status(ctx context.Context, args *skel.CmdArgs) error {
	a, err := p.attachment(args, conf.Parse)
	if err != nil {
		return err
	}
	p.seen.Store(a.Key(), a.Net)
	if err := p.able(a); err != nil {
		return types.NewError(types.ErrPluginNotAvailable, "berth-net can attach no pod", err.Error())
	}
	if !p.Passive {
		if _, err := a.restore(ctx); err != nil {
			return types.NewError(types.ErrLimitedConnectivity, "berth-net can attach no pod, and those that are there may not be reached", err.Error())
		}
	}
	if err := errors.Join(links.CheckLock(ctx), a.store.CheckLock()); err != nil { // after what may need them: that is worse
		return types.NewError(types.ErrPluginNotAvailable, "berth-net can attach no pod", err.Error())
	}
	return nil
}

// able tells why an ADD would be refused, or nil. It changes nothing, but that modules of the kernel may be loaded.
func (p *Plugin) able(a *attachment) error {
	if len(a.Ranges) == 0 && !a.Capabilities[conf.CapabilityRanges] { // else the runtime may tell the pods', though it tells none here
		return errNoSubnet
	}
	if err := errors.Join(a.filter.Available(), addresses.Check(a.Dir())); err != nil {
		return err
	}
	if err := p.canFilter(a); err != nil {
		return err
	}
	if a.ChecksSource() && !p.checksSource.Load() {
		try := p.tryCheckSource
		if try == nil {
			try = links.CanCheckSource
		}
		if err := try(); err != nil {
			return err
		}
		p.checksSource.Store(true)
	}
	return links.CheckBridge(a.description(), p.overlaps.Check)
}

// canFilter tells why the kernel can't have the network's rules, or nil. That is tried until it can, but not where they are there, nor where there are pods: what
// these lack is written by restore, or is its error.
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

// Watch writes the rules of networks again that others have deleted, until ctx ends. Networks are those that ADD and STATUS were called
// for. An error says why that cannot be noticed.
func (p *Plugin) Watch(ctx context.Context) error {
	said := map[string]string{} // of each network, so that what lasts is not logged with each try
	return rules.Watch(ctx, func() error {
		var errs []error
		for key, n := range p.seen.Range {
			written, err := p.of(n.(*conf.Net)).restore(ctx)
			switch {
			case err != nil && err.Error() != said[key.(string)]:
				p.log().Error("write the packet filter's rules again, which were deleted", "network", key, "error", err)
				said[key.(string)] = err.Error()
			case err == nil && written:
				p.log().Warn("the packet filter's rules were deleted, and are written again", "network", key)
			}
			if err == nil {
				delete(said, key.(string))
			}
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	})
}

// asCNI makes an error one of the specification.
func asCNI(err error) *types.Error {
	if e, ok := errors.AsType[*types.Error](err); ok && error(e) == err {
		return e
	}
	code := types.ErrInternal
	if e, ok := errors.AsType[*types.Error](err); ok { // with what else went wrong
		code = e.Code
	}
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, unix.EINTR) {
		code = types.ErrTryAgainLater
	}
	return types.NewError(code, err.Error(), "")
}
