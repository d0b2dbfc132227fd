package cni

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"github.com/containernetworking/cni/libcni"

	"berth/cni/berthnet"
	"berth/cni/berthnet/conf"
	"berth/cni/hostlocal"
	"berth/internal/failpoint"
	"berth/internal/netns"
)

// KeptResult is the result of an ADD as the library has kept it.
type KeptResult struct {
	File    string
	PodID   string
	Network string
	IPs     []string
}

// KeptResults reads what the library keeps below a Config's CacheDir of ADDs that no DEL
// has undone, whether a Network is open there or not. What vanishes meanwhile is left out;
// a file that can't be understood has no PodID.
func KeptResults(cacheDir string) ([]KeptResult, error) {
	dir := filepath.Join(cacheDir, "results") // see libcni, getCacheFilePath
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read kept results: %w", err)
	}
	var all []KeptResult
	for _, e := range entries {
		data, err := readConf(filepath.Join(dir, e.Name()))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read kept result %s: %w", e.Name(), err)
		}
		all = append(all, keptResult(filepath.Join(dir, e.Name()), data))
	}
	return all, nil
}

// Forget removes what the library keeps of results of a pod that was disconnected. A DEL succeeds, too, where the library
// could not remove it, as on a read-only filesystem.
func (n *Network) Forget(podID string) error {
	files, err := filepath.Glob(filepath.Join(n.cfg.CacheDir, "results", "*-"+podID+"-*")) // see libcni, getCacheFilePath
	failpoint.Reach("cni.forget")
	for _, file := range files {
		err = errors.Join(err, os.Remove(file))
	}
	failpoint.Reach("cni.forgotten")
	if err != nil {
		return fmt.Errorf("forget the results of pod %s: %w", podID, err)
	}
	return nil
}

// keptResult understands results of versions 0.1.0 to 1.1.0 as far as addresses go.
func keptResult(file string, data []byte) KeptResult {
	type address struct {
		Address string `json:"address"` // since 0.3.0
		IP      string `json:"ip"`      // before, in ip4 and ip6
	}
	var kept struct {
		ContainerID string `json:"containerId"`
		NetworkName string `json:"networkName"`
		Result      struct {
			IPs []address `json:"ips"`
			IP4 address   `json:"ip4"`
			IP6 address   `json:"ip6"`
		} `json:"result"`
	}
	r := KeptResult{File: file}
	if json.Unmarshal(data, &kept) != nil {
		return r
	}
	r.PodID, r.Network = kept.ContainerID, kept.NetworkName
	for _, a := range append(kept.Result.IPs, kept.Result.IP4, kept.Result.IP6) {
		if p, err := netip.ParsePrefix(a.Address + a.IP); err == nil {
			r.IPs = append(r.IPs, p.Addr().String())
		}
	}
	return r
}

// Reservation is an address that is kept for a pod, in a file.
type Reservation = hostlocal.Reservation

// Reservations reads the stores of host-local and berth-net, as far as networks with these configuration
// lists use them. They are those of which the place and the form are known.
func Reservations(lists ...[]byte) ([]Reservation, error) {
	var all []Reservation
	seen := map[string]bool{}
	for _, list := range lists {
		network, err := parseConf(list, true)
		if err != nil {
			continue // such a network never had a pod
		}
		for _, dir := range hostlocal.Dirs(network) {
			if seen[dir] {
				continue
			}
			seen[dir] = true
			found, err := hostlocal.Reservations(dir)
			if err != nil {
				return nil, err
			}
			all = append(all, found...)
		}
		for _, own := range ownNetworks(network, nil) {
			if seen[own.Dir()] {
				continue
			}
			seen[own.Dir()] = true
			found, err := berthnet.Reservations(own)
			if err != nil {
				return nil, err
			}
			for _, r := range found {
				for _, ip := range r.IPs {
					all = append(all, Reservation{File: r.File, IP: ip.String(), PodID: r.ContainerID})
				}
			}
		}
	}
	return all, nil
}

// ownNetworks are the configurations of berth-net in a list, with ranges of addresses where some are given.
func ownNetworks(list *libcni.NetworkConfigList, ranges *[][]IPRange) (all []*conf.Net) {
	for _, p := range list.Plugins {
		if p.Network.Type != berthnet.Type {
			continue
		}
		more := map[string]any{"name": list.Name, "cniVersion": list.CNIVersion}
		maps.Copy(more, withRanges(p, ranges))
		whole, err := libcni.InjectConf(p, more)
		if err != nil {
			continue // such a network never had a pod
		}
		if n, err := conf.Parse(whole.Bytes); err == nil {
			all = append(all, n)
		}
	}
	return all
}

// Trace is something that berth-net has made for a pod on the node.
type Trace = berthnet.Trace

// Traces returns what networks with these configuration lists have made for pods with berth-net.
func Traces(lists ...[]byte) (all []Trace, err error) {
	seen := map[string]bool{}
	for _, list := range lists {
		network, err := parseConf(list, true)
		if err != nil || seen[network.Name] {
			continue
		}
		for _, own := range ownNetworks(network, nil) {
			seen[network.Name] = true
			found, err := berthnet.Traces(own)
			if err != nil {
				return nil, err
			}
			all = append(all, found...)
		}
	}
	return all, nil
}

// MayHold tells whether a pod of which nothing but its ID is known may have something of a network whose configuration is gone: a namespace, the
// result of an ADD, an address of host-local in the default place.
func (n *Network) MayHold(podID, netnsPath string) (bool, error) {
	return mayHold(n.cfg.CacheDir, hostlocal.DefaultDir, podID, netnsPath)
}

func mayHold(cacheDir, dataDir, podID, netnsPath string) (bool, error) {
	if netns.Existing(netnsPath) != "" {
		return true, nil
	}
	kept, err := KeptResults(cacheDir)
	if err != nil || slices.ContainsFunc(kept, func(r KeptResult) bool { return r.PodID == podID || r.PodID == "" }) {
		return true, err
	}
	return hostlocal.Holds(dataDir, podID)
}

// KeepsAddresses tells whether a network with this configuration list has its addresses from a store that Reservations reads.
func KeepsAddresses(list []byte) bool {
	conf, err := parseConf(list, true)
	return err == nil && (hostlocal.Uses(conf) || len(ownNetworks(conf, nil)) > 0)
}

// Current returns the configuration list of the network that new pods join, nil without one.
func Current(confDir string) []byte {
	net, _, err := load(confDir)
	if err != nil {
		return nil
	}
	return net.list.Bytes
}
