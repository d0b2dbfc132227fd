package statecheck

import (
	"fmt"
	"slices"
	"strings"

	"berth/cni"
	"berth/sandbox/state"
)

// Addresses: records of the CNI library, host-local and berth-net, and objects of berth-net, belong
// to a recorded pod whose network exists. Kept addresses of a running pod equal those in its
// record. No two pods of a network have the same address.

// readNetwork needs the records, because pods may have networks that the configuration no longer
// has.
func (f *facts) readNetwork() (err error) {
	if f.results, err = cni.CachedResults(f.node.CNICacheDir); err != nil {
		return err
	}
	if f.reservations, err = f.node.Networks.Reservations(f.networks()...); err != nil {
		return err
	}
	if f.objects, err = f.node.Networks.Objects(f.networks()...); err != nil {
		return err
	}
	f.runs, err = cni.ReadNotedRuns(f.node.CNIRunDir)
	return err
}

// networks returns the configurations of the pods' networks and of the node's.
func (f *facts) networks() [][]byte {
	var lists [][]byte
	for _, p := range f.pods {
		if p.Network != nil {
			lists = append(lists, p.Network.ConfList)
		}
	}
	if f.node.Network != nil {
		return append(lists, f.node.Network)
	}
	return append(lists, cni.ConfiguredList(f.node.CNIConfDir))
}

func compareAddresses(f *facts, d *finder) {
	kept := map[string][]string{}
	for _, r := range f.results {
		kept[r.PodID] = append(kept[r.PodID], r.IPs...)
		f.compareHeld(d, r.PodID, r.File, "a result of CNI ADD")
	}
	reserved := map[string][]string{}
	for _, r := range f.reservations {
		reserved[r.PodID] = append(reserved[r.PodID], r.IP)
		f.compareHeld(d, r.PodID, r.File, "the address "+r.IP)
	}
	for _, o := range f.objects {
		f.compareHeld(d, o.PodID, o.Description, o.Description)
	}
	for _, p := range f.pods {
		if p.Network == nil || !f.podRuns(p) {
			continue
		}
		compareIPs(d, p, "the CNI library's result", kept[p.ID])
		if f.node.Networks.KnowsAddressesOf(p.Network.ConfList) {
			compareIPs(d, p, "the store of addresses", reserved[p.ID])
		}
	}
	f.compareTwice(d)
}

// compareHeld compares something that is kept for a pod.
func (f *facts) compareHeld(d *finder, id, file, what string) {
	switch p := f.pods[id]; {
	case p == nil && f.others[id]: // several berths may share a network
	case p == nil:
		d.differ(file, "a recorded pod that holds "+what, "no record of %q", id)
	case f.podIsOver(p):
		d.differ(podName(id), "no network, since the pod was stopped", "%s, in %s", what, file)
	}
}

func compareIPs(d *finder, p *state.FoundPod, where string, found []string) {
	want := slices.Sorted(slices.Values(p.IPs))
	slices.Sort(found)
	if !slices.Equal(want, found) {
		d.differ(podName(p.ID), fmt.Sprintf("the addresses %s in %s", strings.Join(want, ", "), where),
			"[%s]", strings.Join(found, ", "))
	}
}

func (f *facts) compareTwice(d *finder) {
	owner := map[string]string{}
	for id, p := range f.pods {
		if p.Network == nil {
			continue
		}
		for _, ip := range p.IPs {
			key := p.Network.Network + " " + ip
			if other := owner[key]; other != "" {
				d.differ("address "+ip, "one pod with it", "two: %s and %s", min(id, other), max(id, other))
			}
			owner[key] = id
		}
	}
}
