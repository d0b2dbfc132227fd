// Package nodenet is the node's network as the configuration says: one that CNI's configuration directory describes, or berth's own.
package nodenet

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"strings"

	"berth/cmd/berth/config"
	"berth/cni"
	"berth/cni/berthnet"
	"berth/cni/berthnet/conf"
	"berth/cni/berthnet/links"
)

// Own is the value of the option "network" for berth's own network, and that one's name.
const Own = berthnet.Type

// Addresses is the directory below the daemon's root in which its own network keeps addresses.
const Addresses = "network"

// Config is what package cni is to be opened with. plugin is berth's own, which works for configurations in the directory, too;
// nil: it is not run.
func Config(cfg *config.Config, plugin *berthnet.Plugin) (cni.Config, error) {
	c := cni.Config{ConfDir: cfg.CNIConfDir, BinDirs: cfg.CNIBinDirs, CacheDir: cfg.CNICacheDir, Timeout: cfg.CNITimeout.Duration, Readers: Readers()}
	if c.CacheDir == "" {
		c.CacheDir = filepath.Join(cfg.Root, "cni")
	}
	if plugin != nil {
		c.BuiltIn = map[string]cni.BuiltIn{berthnet.Type: plugin.Exec}
	}
	var err error
	c.List, err = List(cfg)
	return c, err
}

// RunDir is where the daemon notes the CNI plugins that it runs.
func RunDir(cfg *config.Config) string { return filepath.Join(cfg.State, "cni") }

// List is the configuration list of berth's own network; nil where the directory's is used.
func List(cfg *config.Config) ([]byte, error) {
	if cfg.Network != Own {
		return nil, nil
	}
	plugin := map[string]any{
		"type":         berthnet.Type,
		"bridge":       cfg.NetworkBridge,
		"subnets":      subnets(cfg.NetworkSubnets),
		"masquerade":   cfg.NetworkMasquerade,
		"checkSource":  cfg.NetworkCheckSource,
		"dataDir":      filepath.Join(cfg.Root, Addresses),
		"capabilities": map[string]bool{"portMappings": true, "ipRanges": true, "bandwidth": true},
	}
	if cfg.NetworkMTU != 0 {
		plugin["mtu"] = cfg.NetworkMTU
	}
	if len(cfg.NetworkNoMasquerade) > 0 {
		plugin["noMasquerade"] = cfg.NetworkNoMasquerade
	}
	if len(cfg.NetworkIsolation) > 0 {
		plugin["isolation"] = cfg.NetworkIsolation
	}
	if len(cfg.NetworkRoutes) > 0 {
		var routes []map[string]string
		for _, dst := range cfg.NetworkRoutes {
			routes = append(routes, map[string]string{"dst": dst})
		}
		plugin["routes"] = routes
	}
	if err := check(plugin); err != nil {
		return nil, err
	}
	return json.Marshal(map[string]any{"cniVersion": "1.1.0", "name": Own, "plugins": []any{plugin}})
}

// check asks who will have to understand it.
func check(plugin map[string]any) error {
	whole := maps.Clone(plugin)
	whole["cniVersion"], whole["name"] = "1.1.0", Own
	data, err := json.Marshal(whole)
	if err != nil {
		return err
	}
	n, err := conf.Parse(data)
	if err == nil && len(n.Ranges) == 0 {
		err = errors.New("no subnet that this kernel can do")
	}
	if err != nil {
		return fmt.Errorf("options of berth's own network (network_…): %w", err)
	}
	return nil
}

// subnets are the configured ones that the kernel can do, and the administrator has not switched off.
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
