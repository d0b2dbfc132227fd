package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"strings"

	"github.com/containernetworking/cni/pkg/types"

	"berth/cmd/config"
	"berth/cni"
	"berth/cni/berthnet"
	"berth/cni/berthnet/conf"
	"berth/cni/berthnet/links"
)

// OwnNetwork is the value of the option "network" that selects the built-in network, and the name
// of that network.
const OwnNetwork = berthnet.Type

// AddressDir is the directory for address reservations of the built-in network, relative to the
// daemon's root.
const AddressDir = "network"

// OwnNet identifies the built-in network, whether or not the configuration uses it now.
func OwnNet(cfg *config.Config) *conf.Net {
	return &conf.Net{NetConf: types.NetConf{Name: OwnNetwork}, DataDir: filepath.Join(cfg.Root, AddressDir)}
}

// NetworkConfig returns the configuration of package cni. The pods' network is the built-in
// network, or the network in CNI's configuration directory. If plugin is not nil, its function runs
// in place of the program berth-net, also for configurations in the directory.
func NetworkConfig(cfg *config.Config, plugin *berthnet.Plugin) (cni.Config, error) {
	c := cni.Config{
		ConfDir:  cfg.CNIConfDir,
		BinDirs:  cfg.CNIBinDirs,
		CacheDir: cfg.CNICacheDir,
		Timeout:  cfg.CNITimeout.Duration,
		Readers:  Readers(),
	}
	if c.CacheDir == "" {
		c.CacheDir = filepath.Join(cfg.Root, "cni")
	}
	if plugin != nil {
		c.BuiltIn = map[string]cni.BuiltIn{berthnet.Type: plugin.Exec}
	}
	var err error
	c.List, err = ownNetworkList(cfg)
	return c, err
}

// CNIRunDir is the directory of the daemon's records of running CNI plugins.
func CNIRunDir(cfg *config.Config) string { return filepath.Join(cfg.State, "cni") }

// ownNetworkList returns the CNI configuration list of the built-in network, or nil if the
// configuration selects another network.
func ownNetworkList(cfg *config.Config) ([]byte, error) {
	if cfg.Network != OwnNetwork {
		return nil, nil
	}
	plugin := map[string]any{
		"type":         berthnet.Type,
		"bridge":       cfg.NetworkBridge,
		"subnets":      subnets(cfg.NetworkSubnets),
		"masquerade":   cfg.NetworkMasquerade,
		"dataDir":      filepath.Join(cfg.Root, AddressDir),
		"capabilities": map[string]bool{"portMappings": true, "ipRanges": true, "bandwidth": true, "preferredIPs": true},
	}
	if cfg.NetworkMTU != 0 {
		plugin["mtu"] = cfg.NetworkMTU
	}
	if len(cfg.NetworkNoMasquerade) > 0 {
		plugin["noMasquerade"] = cfg.NetworkNoMasquerade
	}
	if len(cfg.NetworkRoutes) > 0 {
		var routes []map[string]string
		for _, dst := range cfg.NetworkRoutes {
			routes = append(routes, map[string]string{"dst": dst})
		}
		plugin["routes"] = routes
	}
	if err := checkOwnNetwork(plugin); err != nil {
		return nil, err
	}
	return json.Marshal(map[string]any{"cniVersion": "1.1.0", "name": OwnNetwork, "plugins": []any{plugin}})
}

// checkOwnNetwork parses the plugin's configuration as the plugin itself will.
func checkOwnNetwork(plugin map[string]any) error {
	whole := maps.Clone(plugin)
	whole["cniVersion"], whole["name"] = "1.1.0", OwnNetwork
	data, err := json.Marshal(whole)
	if err != nil {
		return err
	}
	n, err := conf.Parse(data)
	if err == nil && len(n.Ranges) == 0 {
		err = errors.New("network.subnets has only IPv6 subnets, and this kernel has no IPv6")
	}
	if err != nil {
		return fmt.Errorf("options of the built-in network (table network): %w", err)
	}
	return nil
}

// subnets returns the configured subnets, without IPv6 subnets if the kernel has no IPv6, or if the
// administrator has disabled it.
func subnets(configured []string) []string {
	if !links.IPv6Off() {
		return configured
	}
	var some []string
	for _, s := range configured {
		if !strings.Contains(s, ":") {
			some = append(some, s)
		}
	}
	return some
}
