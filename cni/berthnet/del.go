package berthnet

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"net/netip"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

	"berth/cni/berthnet/addresses"
	"berth/cni/berthnet/conf"
	"berth/cni/berthnet/links"
	"berth/cni/berthnet/rules"
)

// del disconnects a pod. It uses only the names of the configuration.
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

// release removes an attachment's port, its host ports and, last, its reservation. If it cannot
// lock the store in time, it leaves the host ports and the reservation to the next DEL or GC.
func (a *attachment) release(ctx context.Context, kept addresses.Reservation) error {
	if err := links.Cut(kept.ContainerID, kept.IfName, !a.nsEnds); err != nil {
		return err
	}
	note, err := a.store.Noted(kept)
	if errors.Is(err, fs.ErrNotExist) { // a concurrent DEL removed it
		return nil
	}
	if err != nil {
		return err
	}
	if len(note) > 0 { // the note was written before any host port was opened
		unlock, err := a.store.Lock(ctx) // otherwise a concurrent rewrite of the rules would open the ports again
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
	if json.Unmarshal(note, &ports) != nil { // a power failure has damaged the note; no port was opened since
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

// gc releases the attachments that are not valid. For all ports together, it waits for locks no
// longer than a single DEL would.
func (p *Plugin) gc(ctx context.Context, args *skel.CmdArgs) error {
	a, err := p.attachment(args, conf.ParseGC)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(a.store.LockTimeout, addresses.LockTimeout)) // locks that no other process holds take no time
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

// cutOrphans deletes a port unless its attachment is valid or reserved.
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
	var orphans []rules.HostPort
	for _, p := range all {
		if !used[p.Pod] {
			orphans = append(orphans, p)
		}
	}
	return a.filter.ClosePorts(a.Key(), orphans)
}
