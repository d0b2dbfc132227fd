package cni

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"berth/internal/failpoint"
	"berth/internal/netns"
)

// CachedResult is the result of an ADD in libcni's cache.
type CachedResult struct {
	File    string
	PodID   string
	Network string
	IPs     []string
}

// CachedResults returns the results of ADDs that no DEL has undone, from libcni's cache in the
// CacheDir of a [Config]. A [Network] may use the directory at the same time: CachedResults omits
// files that disappear meanwhile. A file that cannot be decoded gives a result without PodID.
func CachedResults(cacheDir string) ([]CachedResult, error) {
	dir := filepath.Join(cacheDir, "results") // see libcni, getCacheFilePath
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read cached CNI results: %w", err)
	}
	var all []CachedResult
	for _, e := range entries {
		data, err := readConf(filepath.Join(dir, e.Name()))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read cached CNI result %s: %w", e.Name(), err)
		}
		all = append(all, cachedResult(filepath.Join(dir, e.Name()), data))
	}
	return all, nil
}

// DropCachedResults removes the cached results of a pod after its DEL. libcni's DEL ignores a
// failure to remove them, for example on a read-only filesystem.
func (n *Network) DropCachedResults(podID string) error {
	files, err := filepath.Glob(filepath.Join(n.cfg.CacheDir, "results", "*-"+podID+"-*")) // see libcni, getCacheFilePath
	failpoint.Reach("cni.forget")
	for _, file := range files {
		err = errors.Join(err, os.Remove(file))
	}
	failpoint.Reach("cni.forgotten")
	if err != nil {
		return fmt.Errorf("remove cached CNI results of pod %s: %w", podID, err)
	}
	return nil
}

// cachedResult decodes the addresses of a result of any version from 0.1.0 to 1.1.0.
func cachedResult(file string, data []byte) CachedResult {
	type address struct {
		Address string `json:"address"` // since 0.3.0
		IP      string `json:"ip"`      // before 0.3.0, in ip4 and ip6
	}
	var cached struct {
		ContainerID string `json:"containerId"`
		NetworkName string `json:"networkName"`
		Result      struct {
			IPs []address `json:"ips"`
			IP4 address   `json:"ip4"`
			IP6 address   `json:"ip6"`
		} `json:"result"`
	}
	r := CachedResult{File: file}
	if json.Unmarshal(data, &cached) != nil {
		return r
	}
	r.PodID, r.Network = cached.ContainerID, cached.NetworkName
	for _, a := range append(cached.Result.IPs, cached.Result.IP4, cached.Result.IP6) {
		if p, err := netip.ParsePrefix(a.Address + a.IP); err == nil {
			r.IPs = append(r.IPs, p.Addr().String())
		}
	}
	return r
}

// MayHold reports whether a pod may still own network resources. It serves for pods without a
// record, whose network configuration is lost. It checks for a network namespace, a cached result,
// and an address in the default directory of an IPAM plugin.
func (n *Network) MayHold(podID, netnsPath string) (bool, error) {
	if netns.Existing(netnsPath) != "" {
		return true, nil
	}
	cached, err := CachedResults(n.cfg.CacheDir)
	if err != nil || slices.ContainsFunc(cached, func(r CachedResult) bool { return r.PodID == podID || r.PodID == "" }) {
		return true, err
	}
	for _, ipam := range n.cfg.Readers.IPAMs {
		if held, err := ipam.Holds(podID); held || err != nil {
			return true, err
		}
	}
	return false, nil
}
