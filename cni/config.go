package cni

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/utils"
	"github.com/containernetworking/cni/pkg/version"
	"golang.org/x/sys/unix"

	"berth/internal/errdefs"
	"berth/internal/safefs"
)

// maxConfSize is the largest configuration file that is read.
const maxConfSize = 1 << 20

// network is a valid configuration and the file it came from. Immutable.
type network struct {
	file string
	list *libcni.NetworkConfigList // Bytes is the complete list, including plugins
}

func (n *network) same(o *network) bool {
	if n == nil || o == nil {
		return n == o
	}
	return n.file == o.file && bytes.Equal(n.list.Bytes, o.list.Bytes)
}

// supports11 reports whether the network's CNI version has STATUS and GC.
func supports11(list *libcni.NetworkConfigList) bool {
	ok, err := version.GreaterThanOrEqualTo(list.CNIVersion, "1.1.0")
	return ok && err == nil
}

// load returns the first valid configuration in dir, in lexical order of file names, and the
// invalid files before it. Like containerd and CRI-O it reads *.conflist for lists and *.conf,
// *.json for single plugins. If no file is valid, it returns FailedPrecondition with the reasons.
func load(dir string) (*network, []Skipped, error) {
	names, err := confFiles(dir, ".conflist", ".conf", ".json")
	if err != nil {
		return nil, nil, errdefs.FailedPrecondition("no CNI network configured: %w", err)
	}
	var skipped []Skipped
	for _, name := range names {
		file := filepath.Join(dir, name)
		list, err := loadFile(file)
		if err == nil {
			return &network{file: file, list: list}, skipped, nil
		}
		skipped = append(skipped, Skipped{File: file, Error: err.Error()})
	}
	return nil, skipped, noneValid(dir, skipped)
}

// configured returns the network that new pods join, with the invalid files before it.
func (n *Network) configured() (*network, []Skipped, error) {
	if n.cfg.List == nil {
		return load(n.dirs.Load().conf)
	}
	list, err := parseConf(n.cfg.List, true)
	if err == nil {
		err = validateList(list)
	}
	if err != nil {
		return nil, nil, errdefs.FailedPrecondition("network configuration: %w", err)
	}
	return &network{list: list}, nil, nil
}

func noneValid(dir string, skipped []Skipped) error {
	if len(skipped) == 0 {
		return errdefs.FailedPrecondition("no CNI network configured: no .conflist, .conf or .json file in %s", dir)
	}
	parts := make([]string, len(skipped))
	for i, s := range skipped {
		parts[i] = fmt.Sprintf("%s: %s", filepath.Base(s.File), s.Error)
	}
	return errdefs.FailedPrecondition("no CNI network configured: no valid file in %s: %s", dir, strings.Join(parts, "; "))
}

// confFiles returns the sorted names of the files in dir with one of the extensions. It returns nil
// if dir does not exist.
func confFiles(dir string, extensions ...string) ([]string, error) {
	entries, err := os.ReadDir(dir) // sorted by name
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if !e.IsDir() && slices.Contains(extensions, filepath.Ext(e.Name())) {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// loadFile reads one configuration and the plugin files that belong to it.
func loadFile(file string) (*libcni.NetworkConfigList, error) {
	data, err := readConf(file)
	if err != nil {
		return nil, err
	}
	list, err := parseConf(data, filepath.Ext(file) == ".conflist")
	if err != nil {
		return nil, err
	}
	if !list.LoadOnlyInlinedPlugins {
		if list, err = withPluginFiles(list, filepath.Join(filepath.Dir(file), list.Name)); err != nil {
			return nil, err
		}
	}
	return list, validateList(list)
}

// readConf reads a regular file of at most maxConfSize bytes. It refuses a FIFO or device, which
// could block the owner goroutine.
func readConf(file string) ([]byte, error) { return safefs.ReadHostFile(file, maxConfSize) }

// parseConf decodes a list. It converts a single plugin's configuration to a list of one. It
// validates the name and the version, and validateList checks the rest.
func parseConf(data []byte, isList bool) (*libcni.NetworkConfigList, error) {
	list, err := decodeConf(data, isList)
	if err != nil {
		return nil, err
	}
	if err := utils.ValidateNetworkName(list.Name); err != nil {
		return nil, err
	}
	return list, knownVersion(data, list.CNIVersion)
}

func decodeConf(data []byte, isList bool) (*libcni.NetworkConfigList, error) {
	if isList {
		return libcni.NetworkConfFromBytes(data)
	}
	conf, err := libcni.NetworkPluginConfFromBytes(data)
	if err != nil {
		if hasPlugins(data) {
			return nil, errors.New(`it has "plugins", so it is a list of plugins: rename it to end with .conflist`)
		}
		return nil, err
	}
	//nolint:staticcheck // deprecated because CNI 1.0 only has lists, but operators still have such files
	return libcni.ConfListFromConf(conf)
}

// hasPlugins reports whether data is a configuration list.
func hasPlugins(data []byte) bool {
	var raw struct {
		Plugins []json.RawMessage `json:"plugins"`
	}
	return json.Unmarshal(data, &raw) == nil && raw.Plugins != nil
}

// knownVersion refuses a configuration if this runtime supports none of its CNI versions. libcni
// has set v to the highest supported version in cniVersion and cniVersions, or to "" if none is
// supported. In other places, "" means 0.1.0.
func knownVersion(data []byte, v string) error {
	var raw struct {
		CNIVersions []string `json:"cniVersions"`
	}
	if err := json.Unmarshal(data, &raw); err != nil {
		return fmt.Errorf("cniVersions: %w", err)
	}
	switch {
	case v == "" && len(raw.CNIVersions) > 0:
		return fmt.Errorf("none of cniVersions %q is supported, the newest supported is %s",
			raw.CNIVersions, version.Current())
	case v != "" && !slices.Contains(version.All.SupportedVersions(), v):
		return fmt.Errorf("cniVersion %q is not supported, the newest supported is %s", v, version.Current())
	}
	return nil
}

// withPluginFiles adds the plugins in dir, one per file, to the list (CNI 1.1: "plugins may be
// loaded from a directory named after the network"). It makes list.Bytes complete, because DEL must
// not depend on files that may change.
func withPluginFiles(list *libcni.NetworkConfigList, dir string) (*libcni.NetworkConfigList, error) {
	names, err := confFiles(dir, ".conf")
	if err != nil && !errors.Is(err, unix.ENOTDIR) { // a file may have the network's name
		return nil, err
	}
	if len(names) == 0 {
		return list, nil
	}
	plugins := slices.Clone(list.Plugins)
	for _, name := range names {
		file := filepath.Join(dir, name)
		data, err := readConf(file)
		if err != nil {
			return nil, fmt.Errorf("plugin file %s: %w", file, err)
		}
		plugin, err := libcni.NetworkPluginConfFromBytes(data)
		if err != nil {
			return nil, fmt.Errorf("plugin file %s: %w", file, err)
		}
		plugins = append(plugins, plugin)
	}
	return inlinePlugins(list, plugins)
}

func inlinePlugins(list *libcni.NetworkConfigList, plugins []*libcni.PluginConfig) (*libcni.NetworkConfigList, error) {
	whole := map[string]json.RawMessage{}
	if err := json.Unmarshal(list.Bytes, &whole); err != nil {
		return nil, err
	}
	raws := make([]json.RawMessage, len(plugins))
	for i, p := range plugins {
		raws[i] = p.Bytes
	}
	var err error
	if whole["plugins"], err = json.Marshal(raws); err != nil {
		return nil, err
	}
	whole["loadOnlyInlinedPlugins"] = json.RawMessage("true")
	data, err := json.Marshal(whole)
	if err != nil {
		return nil, err
	}
	return libcni.NetworkConfFromBytes(data)
}

func validateList(list *libcni.NetworkConfigList) error {
	if len(list.Plugins) == 0 {
		return errors.New("no plugins")
	}
	for i, p := range list.Plugins {
		if t := p.Network.Type; t == "." || t == ".." || strings.ContainsAny(t, "/\x00") {
			return fmt.Errorf("plugin %d: type %q is not a file name", i, t)
		}
	}
	return nil
}

// ConfiguredList returns the configuration list in confDir that new pods join, or nil if there is
// none.
func ConfiguredList(confDir string) []byte {
	net, _, err := load(confDir)
	if err != nil {
		return nil
	}
	return net.list.Bytes
}
