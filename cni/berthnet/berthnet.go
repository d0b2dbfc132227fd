// Package berthnet is berth's own network as a CNI plugin. It sets up a bridge, addresses,
// masquerading, host ports and isolation, for IPv4, IPv6 or both.
//
// # Contract
//
// The plugin replaces bridge, host-local, portmap and firewall. It uses netlink and nftables and
// executes no program. It implements CNI 1.1.0 (ADD, DEL, CHECK, STATUS, GC, VERSION) for
// configurations from 0.3.0 on. The daemon calls Exec; other runtimes execute a program that calls
// Main. Both may run at the same time.
//
// Everything on the node carries the network's key, which combines its name and the directory of
// its addresses (conf.Net.Key). A bridge belongs to one network and changes its owner under a lock
// of the node (links.Lock). So two daemons, or a daemon and another runtime, do not touch each
// other's pods. A bridge on which another network has pods is refused. STATUS refuses whatever ADD
// would refuse.
//
// The plugin may be killed at any instruction, together with the daemon. So ADD first writes the
// reservation of the addresses (package addresses), and DEL removes it last. The container ID, the
// interface's name and the reservation lead to everything that an attachment has. The port's name
// derives from the container ID (package links). Host ports are in the reservation's note. If the
// note is lost, they are found by the pod's addresses (package rules).
//
// The bridge and the rules for all pods belong to the node. ADD makes them when they are missing,
// and nothing removes them. Flushing the whole packet filter, as each reload of nftables.service
// does, deletes the rules. ADD and STATUS write them again, including the host ports of all pods,
// from the notes of the reservations. The kernel notifies the daemon (Watch), which writes them at
// once.
//
// GC releases the reservations, bridge ports and rules of attachments that are not valid.
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

// Versions are the supported versions of the specification.
var Versions = version.VersionsStartingFrom("0.3.0")

// Plugin is the plugin for one network namespace, in which it is first used. Its methods may be
// called concurrently.
type Plugin struct {
	Passive bool         // STATUS changes nothing
	Log     *slog.Logger // for failures in the background; nil: discarded

	filter rules.Filter
	seen   sync.Map // configurations of ADD and STATUS for Watch: *conf.Net by key

	leaving     leaving
	leavingTime time.Duration // 0: the constant

	overlaps links.Overlaps // cached by STATUS

	lockPatience time.Duration // of the stores; 0: their default

	checksSource   atomic.Bool  // a trial has shown that the kernel supports it
	tryCheckSource func() error // nil: links.CanCheckSource

	filters   atomic.Bool               // a trial or installed rules have shown that the kernel supports them
	tryFilter func(rules.Network) error // nil: rules.Try
}

// Open opens the plugin's sockets ahead of the first pod. An error means that no pod can be
// attached at present.
func (p *Plugin) Open() error { return p.filter.Open() }

func (p *Plugin) log() *slog.Logger { return cmp.Or(p.Log, slog.New(slog.DiscardHandler)) }

// Close closes the plugin's sockets. It changes nothing on the node.
func (p *Plugin) Close() error {
	p.leaving.close()
	return p.filter.Close()
}

// attachment is the subject of one call.
type attachment struct {
	*conf.Net
	plugin *Plugin
	filter *rules.Filter
	store  *addresses.Store
	id     string
	ifName string
	netns  string // path; "": the namespace is gone
	nsEnds bool   // the namespace is about to be removed with the pod's device
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

// of returns an attachment without ID, for work on the whole network.
func (p *Plugin) of(n *conf.Net) *attachment {
	a := &attachment{Net: n, plugin: p, filter: &p.filter, store: addresses.Inspect(n.Dir())}
	a.store.Patience = p.lockPatience
	return a
}

// openStore opens the directory of addresses and creates it if necessary.
func (a *attachment) openStore() error {
	store, err := addresses.Open(a.Dir())
	if err != nil {
		return err
	}
	store.Patience = a.store.Patience
	a.store = store
	return nil
}

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
	kept, err := a.reserve(ctx) // before the look at the bridge: the reservation keeps the gateway in place
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

var errNoSubnet = errors.New("neither subnets nor ipRanges has a subnet")

// gateways returns the bridge's addresses.
func (a *attachment) gateways() (all []netip.Prefix) {
	for _, r := range a.Ranges {
		all = append(all, netip.PrefixFrom(r.Gateway, r.Subnet.Bits()))
	}
	return all
}

// plug connects the pod's port to the bridge. It makes the missing parts of the bridge and of the
// rules for all pods. After a boot the first of several concurrent pods makes them, and the others
// then share the lock.
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

// plugIfReady returns no bridge if something is missing. It holds the shared lock until the port
// exists, so no other network can take the bridge meanwhile.
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

// makeAndPlug holds the exclusive lock until the port exists. Otherwise two networks that begin at
// the same time would take the bridge from each other. With unlessReady it returns no bridge if
// another pod has made everything meanwhile.
func (a *attachment) makeAndPlug(ctx context.Context, kept addresses.Reservation, unlessReady bool) (*links.Bridge, links.Plugged, error) {
	unlockStore, err := a.store.Lock(ctx) // other pods may be making the network
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

// description returns the wanted bridge, without the addresses in use.
func (a *attachment) description() *links.Description {
	return &links.Description{Name: a.Bridge, Network: a.Key(), MTU: a.MTU, Gateways: a.gateways()}
}

// ready returns the network's bridge, or nil unless it is as described and the rules for all pods
// are installed.
func (a *attachment) ready() (*links.Bridge, error) {
	bridge, err := links.FindBridge(a.Bridge)
	if err != nil {
		return nil, err
	}
	d := a.description()
	if !bridge.BelongsTo(d.Network) || !bridge.Serves(d.Gateways) {
		return nil, nil
	}
	if len(bridge.Prefixes) > len(d.Gateways) { // of an earlier configuration
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

// makeNetwork makes the missing parts of the bridge and of the rules for all pods. The caller holds
// both locks.
func (a *attachment) makeNetwork() (*links.Bridge, error) {
	d := a.description()
	var err error
	if d.InUse, err = a.addressesInUse(); err != nil {
		return nil, err
	}
	bridge, err := links.MakeBridge(d)
	if err != nil {
		a.plugin.overlaps.Forget() // or STATUS would use the cached answer for a minute
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
// lock keeps the bridge from becoming another network's, which would take these rules for old ones.
func (a *attachment) install(ctx context.Context) (written bool, err error) {
	unlock, err := links.Lock(ctx, lockfile.Shared)
	if err != nil {
		return false, err
	}
	defer unlock()
	bridge, err := links.FindBridge(a.Bridge)
	if err != nil || !bridge.BelongsTo(a.Key()) {
		return false, err // no bridge, or one to be made anew
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
			continue // the pod is gone, as after a boot, and its DEL is to come
		}
		pod := rules.Pod{ID: n.ContainerID}
		if json.Unmarshal(n.Note, &pod.Ports) != nil {
			continue // damaged by a power cut; no port was opened since
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
	if ok, err := a.filter.Installed(a.rules(bridge)); ok || err != nil {
		return false, err
	}
	if err := a.openStore(); err != nil { // the directory with the lock may have been deleted
		return false, err
	}
	unlock, err := a.store.Lock(ctx)
	if err != nil {
		return false, err
	}
	defer unlock()
	return a.install(ctx)
}

// rules returns the wanted rules. Their subnets are all of the bridge's, since older pods may have
// others than the configured ones.
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
		return kept, types.NewError(types.ErrInternal, fmt.Sprintf("container %s is already attached to network %s as %s", a.id, a.Name, a.ifName), "")
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
		Hairpin: a.Hairpins(), Isolated: a.Isolates(conf.IsolatePods), CheckSource: a.ChecksSource(),
		Ingress: limit(a.Runtime.Bandwidth.IngressRate, a.Runtime.Bandwidth.IngressBurst), Egress: limit(a.Runtime.Bandwidth.EgressRate, a.Runtime.Bandwidth.EgressBurst), IPs: a.prefixes(kept), Routes: a.podRoutes()}
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

// openPorts writes the host ports into the reservation's note and opens them. The store's lock
// keeps others from rewriting the rules meanwhile.
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

// tryPorts fails with ErrGone if another program deletes the rules meanwhile. If the ports belong
// to another pod it removes the note, or the next rewrite of the rules would open them.
func (a *attachment) tryPorts(ctx context.Context, kept addresses.Reservation, ports []rules.HostPort, note []byte) error {
	if _, err := a.install(ctx); err != nil { // the rules may have been deleted since
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

// del disconnects a pod. Of the configuration it uses only the names.
func (p *Plugin) del(ctx context.Context, args *skel.CmdArgs, nsEnds bool) error {
	a, err := p.attachment(args, conf.ParseNames)
	if err != nil {
		return err
	}
	a.nsEnds = nsEnds && a.netns != ""
	kept, ok, err := a.store.Of(a.id, a.ifName)
	switch {
	case err != nil:
		return err
	case ok:
		err = a.release(ctx, kept)
	default: // ADD reserves first, but the reservation may have been lost
		err = links.Cut(a.id, a.ifName, !a.nsEnds)
	}
	if a.nsEnds && err == nil {
		p.leaving.add(p.log(), a.id, a.ifName, cmp.Or(p.leavingTime, leavingTime))
	}
	return err
}

// release removes an attachment's port, host ports and, last, its reservation. If the store's lock
// is not free in time, host ports and reservation are left to the next DEL or GC.
func (a *attachment) release(ctx context.Context, kept addresses.Reservation) error {
	if err := links.Cut(kept.ContainerID, kept.IfName, !a.nsEnds); err != nil {
		return err
	}
	note, err := a.store.Noted(kept)
	if errors.Is(err, fs.ErrNotExist) { // another DEL was faster
		return nil
	}
	if err != nil {
		return err
	}
	if len(note) > 0 { // the note was written before any host port was opened
		unlock, err := a.store.Lock(ctx) // or a concurrent rewrite of the rules would open them again
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

// closePorts closes the host ports in the note of a reservation.
func (a *attachment) closePorts(kept addresses.Reservation, note []byte) (err error) {
	var ports []rules.HostPort
	if json.Unmarshal(note, &ports) != nil { // damaged by a power cut; no port was opened since
		if ports, err = a.portsOf(kept.IPs); err != nil {
			return err
		}
	}
	if err := a.filter.ClosePorts(a.Key(), ports); err != nil {
		return err
	}
	return a.filter.ForgetFlows(ports)
}

// portsOf returns the open host ports that lead to the addresses.
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

// gc releases the attachments that are not valid. It waits for locks no longer than one DEL does.
func (p *Plugin) gc(ctx context.Context, args *skel.CmdArgs) error {
	a, err := p.attachment(args, conf.ParseGC)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(a.store.Patience, addresses.LockPatience)) // free locks take no time
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
	return errors.Join(append(errs, a.cutOrphans(valid), a.closeOrphans(used))...)
}

// cutOrphans deletes ports of attachments that are neither valid nor reserved.
func (a *attachment) cutOrphans(valid map[types.GCAttachment]bool) error {
	ports, err := links.Ports(a.Key())
	for _, p := range ports {
		if !valid[types.GCAttachment{ContainerID: p.ContainerID, IfName: p.IfName}] {
			err = errors.Join(err, links.Cut(p.ContainerID, p.IfName, true))
		}
	}
	return err
}

// closeOrphans closes host ports that lead to unused addresses.
func (a *attachment) closeOrphans(used map[netip.Addr]bool) error {
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

// status reports whether an ADD with the same configuration could succeed. It ignores whether an
// address is free: a full node continues to run its pods. Unless the plugin is passive it repairs
// the node for existing pods. Error codes (specification, section 2, STATUS): 50 if no pod can be
// attached, 51 if existing pods may have lost connections as well.
func (p *Plugin) status(ctx context.Context, args *skel.CmdArgs) error {
	a, err := p.attachment(args, conf.Parse)
	if err != nil {
		return err
	}
	p.seen.Store(a.Key(), a.Net)
	if err := p.checkAdd(a); err != nil {
		return types.NewError(types.ErrPluginNotAvailable, "berth-net can attach no pod", err.Error())
	}
	if !p.Passive {
		if _, err := a.restore(ctx); err != nil {
			return types.NewError(types.ErrLimitedConnectivity, "berth-net can attach no pod, and existing pods may be unreachable", err.Error())
		}
	}
	if err := errors.Join(links.CheckLock(ctx), a.store.CheckLock()); err != nil { // last: errors of existing pods are worse
		return types.NewError(types.ErrPluginNotAvailable, "berth-net can attach no pod", err.Error())
	}
	return nil
}

// checkAdd returns the error that an ADD would return, or nil. It changes nothing, but the kernel may
// load modules.
func (p *Plugin) checkAdd(a *attachment) error {
	if len(a.Ranges) == 0 && !a.Capabilities[conf.CapabilityRanges] { // with the capability a runtime may pass ranges to ADD that STATUS does not have
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

// canFilter returns why the kernel cannot have the network's rules, or nil. It tries them in a
// namespace until a trial succeeds. It skips the trial if the rules are installed or there are
// pods, since restore then reports errors.
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

// Watch restores rules that other programs delete, until ctx ends. It watches the networks that ADD
// and STATUS were called for. It returns an error if the kernel cannot notify it.
func (p *Plugin) Watch(ctx context.Context) error {
	said := map[string]string{} // by network, so that a lasting error is logged once
	return rules.Watch(ctx, func() error {
		var errs []error
		for key, n := range p.seen.Range {
			written, err := p.of(n.(*conf.Net)).restore(ctx)
			switch {
			case err != nil && err.Error() != said[key.(string)]:
				p.log().Error("restore deleted packet filter rules", "network", key, "error", err)
				said[key.(string)] = err.Error()
			case err == nil && written:
				p.log().Warn("restored deleted packet filter rules", "network", key)
			}
			if err == nil {
				delete(said, key.(string))
			}
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	})
}

// asCNI converts an error to one of the specification.
func asCNI(err error) *types.Error {
	if e, ok := errors.AsType[*types.Error](err); ok && error(e) == err {
		return e
	}
	code := types.ErrInternal
	if e, ok := errors.AsType[*types.Error](err); ok { // keeps the joined errors' text
		code = e.Code
	}
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, unix.EINTR) {
		code = types.ErrTryAgainLater
	}
	return types.NewError(code, err.Error(), "")
}
