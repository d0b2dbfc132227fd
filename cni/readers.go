package cni

import (
	"context"
	"iter"
	"log/slog"

	"github.com/containernetworking/cni/libcni"
)

// Readers inspect the state that plugins keep on the node, because CNI has no verb for it. A plugin
// also works without a reader. Then its addresses and devices cannot be compared with pods.
type Readers struct {
	Plugins map[string]PluginReader // by plugin type
	IPAMs   []IPAMReader
}

// PluginReader inspects a plugin that assigns addresses. conf is the plugin configuration that GC
// gets. An earlier version of the plugin may have used it. If conf names no network, the methods
// return no item and no error, because the plugin has never attached a pod with it. The methods
// change nothing.
type PluginReader interface {
	// Reservations returns the addresses that the plugin keeps for pods.
	Reservations(conf []byte) ([]Reservation, error)
	// Objects returns the network devices and host ports that the plugin created for pods.
	Objects(conf []byte) ([]Object, error)
}

// IPAMReader reads the addresses that plugins get from an IPAM plugin.
type IPAMReader interface {
	// Uses reports whether the list names the IPAM plugin.
	Uses(list *libcni.NetworkConfigList) bool
	// Reservations returns the addresses that pods of a network with this list may have.
	Reservations(list *libcni.NetworkConfigList) ([]Reservation, error)
	// Holds reports whether a network has an address of the pod in the plugin's default directory.
	Holds(podID string) (bool, error)
	// ReleaseOrphans releases addresses whose reservations lost their pod ID in a power failure.
	ReleaseOrphans(ctx context.Context, list *libcni.NetworkConfigList, log *slog.Logger) error
}

// Reservation is a file that reserves an address for a pod.
type Reservation struct {
	File  string
	IP    string
	PodID string
}

// Object is a network device or a host port of a pod. PodID is empty if it cannot be determined.
type Object struct{ PodID, Description string }

// Reservations reads the addresses of pods of networks with these configuration lists. It ignores
// invalid lists, because such a network never had a pod.
func (r Readers) Reservations(lists ...[]byte) ([]Reservation, error) {
	var all distinct[Reservation]
	for _, list := range parseDistinct(lists) {
		for _, ipam := range r.IPAMs {
			if err := all.add(ipam.Reservations(list)); err != nil {
				return nil, err
			}
		}
		for reader, conf := range r.plugins(list) {
			if err := all.add(reader.Reservations(conf)); err != nil {
				return nil, err
			}
		}
	}
	return all.items, nil
}

// Objects returns the objects of pods of networks with these configuration lists.
func (r Readers) Objects(lists ...[]byte) ([]Object, error) {
	var all distinct[Object]
	for _, list := range parseDistinct(lists) {
		for reader, conf := range r.plugins(list) {
			if err := all.add(reader.Objects(conf)); err != nil {
				return nil, err
			}
		}
	}
	return all.items, nil
}

// KnowsAddressesOf reports whether Reservations can read the addresses of a network with this
// configuration list.
func (r Readers) KnowsAddressesOf(list []byte) bool {
	network, err := parseConf(list, true)
	if err != nil {
		return false
	}
	for _, ipam := range r.IPAMs {
		if ipam.Uses(network) {
			return true
		}
	}
	for range r.plugins(network) {
		return true
	}
	return false
}

// plugins yields each plugin of a list that has a reader, with its configuration.
func (r Readers) plugins(list *libcni.NetworkConfigList) iter.Seq2[PluginReader, []byte] {
	return func(yield func(PluginReader, []byte) bool) {
		for _, p := range list.Plugins {
			reader := r.Plugins[p.Network.Type]
			if reader == nil {
				continue
			}
			inject := map[string]any{"name": list.Name, "cniVersion": list.CNIVersion}
			conf, err := libcni.InjectConf(p, inject)
			if err != nil {
				continue // such a network never had a pod
			}
			if !yield(reader, conf.Bytes) {
				return
			}
		}
	}
}

// parseDistinct decodes each list once, because many pods have the same list.
func parseDistinct(lists [][]byte) (all []*libcni.NetworkConfigList) {
	seen := map[string]bool{}
	for _, data := range lists {
		if seen[string(data)] {
			continue
		}
		seen[string(data)] = true
		if list, err := parseConf(data, true); err == nil {
			all = append(all, list)
		}
	}
	return all
}

// distinct collects items without duplicates. Lists may share a directory.
type distinct[T comparable] struct {
	items []T
	seen  map[T]bool
}

func (d *distinct[T]) add(items []T, err error) error {
	if d.seen == nil {
		d.seen = map[T]bool{}
	}
	for _, item := range items {
		if !d.seen[item] {
			d.seen[item] = true
			d.items = append(d.items, item)
		}
	}
	return err
}
