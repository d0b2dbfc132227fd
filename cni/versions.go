package cni

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/version"

	"berth/internal/errdefs"
)

// program is the file of an installed plugin. It differs after the plugin was replaced.
type program struct {
	path     string
	size     int64
	modified time.Time
}

// findPlugins returns the programs of the chain. The error is FailedPrecondition for the first
// plugin that is not installed, because every ADD would fail.
func (n *Network) findPlugins(list *libcni.NetworkConfigList) (found []program, err error) {
	for _, p := range list.Plugins {
		path, err := n.plugins.FindInPath(p.Network.Type, n.dirs.Load().bin)
		if err != nil {
			return nil, errdefs.FailedPrecondition("CNI network %q: %w", list.Name, err)
		}
		file := program{path: path}
		if info, err := os.Stat(path); err == nil { // a built-in plugin has no file
			file.size, file.modified = info.Size(), info.ModTime()
		}
		found = append(found, file)
	}
	return found, nil
}

// checkVersions returns FailedPrecondition for the first plugin that is too old for the cniVersion
// of the list, because it refuses every ADD. If a plugin does not tell its versions, it counts as
// new enough.
func checkVersions(ctx context.Context, list *libcni.NetworkConfigList, programs []program) error {
	wanted := list.CNIVersion
	if wanted == "" {
		wanted = "0.1.0"
	}
	for i, p := range programs {
		if strings.HasPrefix(p.path, builtInPath) {
			continue
		}
		versions, err := supportedVersions(ctx, p.path)
		if err != nil || len(versions) == 0 || slices.Contains(versions, wanted) {
			continue
		}
		return errdefs.FailedPrecondition("CNI network %q: the plugin %q (%s) supports the CNI versions %s, but the"+
			" configuration has cniVersion %q: install a newer plugin, or lower cniVersion", list.Name,
			list.Plugins[i].Network.Type, p.path, strings.Join(versions, ", "), wanted)
	}
	return nil
}

// versionTimeout bounds one VERSION, which plugins answer from memory.
const versionTimeout = 2 * time.Second

// supportedVersions runs VERSION. The verb changes nothing, so the run needs no note and no cgroup.
func supportedVersions(ctx context.Context, path string) ([]string, error) {
	run := &pluginRun{
		path:  path,
		verb:  "VERSION",
		stdin: fmt.Appendf(nil, "{\"cniVersion\": %q}", version.Current()),
		env:   withoutServiceVars(append(os.Environ(), "CNI_COMMAND=VERSION")),
		start: (*exec.Cmd).Start,
	}
	ctx, cancel := context.WithTimeout(ctx, versionTimeout)
	defer cancel()
	out, err := run.outcome(ctx, run.exec(ctx))
	if err != nil {
		return nil, err
	}
	info, err := new(version.PluginDecoder).Decode(out)
	if err != nil {
		return nil, fmt.Errorf("decode the versions of CNI plugin %s: %w", path, err)
	}
	return info.SupportedVersions(), nil
}
