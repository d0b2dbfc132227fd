// Package cdi puts CDI devices into runtime-specs (tags.cncf.io/container-device-interface):
// what a vendor says in /etc/cdi or /var/run/cdi that a container needs to use its device.
//
// # Contract
//
// Devices are asked for by name, and nothing else names them: the annotations that other
// runtimes read are not looked at, since they may come from anybody (CVE-2026-53492). What a
// spec file says is trusted as far as its directory is: only the node's administrator
// writes there. Its hooks run on the host, as root.
//
// Nothing is kept between calls: files appear, change and go while berth runs, and there is
// no watcher to own. Files are read only for containers that ask for a device.
package cdi

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/codes"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"

	"berth/internal/errdefs"
)

// Dirs are directories of CDI spec files, those that win last. They need not exist.
type Dirs []string

// Inject edits spec so that its container has the devices: device nodes and their cgroup
// rules, mounts, environment, hooks, groups, network devices, RDT class. A device that is
// named twice is there once. Without devices spec is left alone.
//
// Errors: InvalidArgument for what is no name of a device; FailedPrecondition, with the
// names, for devices that no spec file has; Unimplemented for devices that want a hook after
// the container's end. Spec files that can't be read matter to nobody else's devices; they
// are named where a device is missing.
func (d Dirs) Inject(spec *specs.Spec, devices []string) error {
	if len(devices) == 0 {
		return nil
	}
	names, err := distinct(devices)
	if err != nil {
		return err
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(d...), cdi.WithAutoRefresh(false))
	if err != nil {
		return fmt.Errorf("read CDI specs in %s: %w", strings.Join(d, ", "), err)
	}
	missing, err := cache.InjectDevices(spec, names...)
	if len(missing) > 0 {
		return errdefs.FailedPrecondition("CDI device %s is not known in %s%s",
			strings.Join(missing, ", "), strings.Join(d, ", "), unreadable(cache))
	}
	if err != nil {
		return errdefs.FailedPrecondition("CDI device %s: %w", strings.Join(names, ", "), err)
	}
	if spec.Hooks != nil && len(spec.Hooks.Poststop) > 0 {
		return errdefs.New(codes.Unimplemented, "CDI device %s: poststop hooks are not supported", strings.Join(names, ", "))
	}
	return nil
}

// HostPaths are the paths of the host of the devices' nodes, which specs do not have. Devices that are
// not known have none.
func (d Dirs) HostPaths(devices []string) ([]string, error) {
	if len(devices) == 0 {
		return nil, nil
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(d...), cdi.WithAutoRefresh(false))
	if err != nil {
		return nil, fmt.Errorf("read CDI specs in %s: %w", strings.Join(d, ", "), err)
	}
	var paths []string
	for _, name := range devices {
		device := cache.GetDevice(name)
		if device == nil {
			continue
		}
		for _, node := range slices.Concat(device.ContainerEdits.DeviceNodes, device.GetSpec().ContainerEdits.DeviceNodes) {
			paths = append(paths, cmp.Or(node.HostPath, node.Path))
		}
	}
	return paths, nil
}

// distinct checks the names, vendor/class=device, and drops repetitions.
func distinct(devices []string) ([]string, error) {
	var names []string
	for _, name := range devices {
		if _, _, _, err := parser.ParseQualifiedName(name); err != nil {
			return nil, errdefs.InvalidArgument("CDI device: %w", err)
		}
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names, nil
}

// unreadable names the spec files and directories with errors.
func unreadable(cache *cdi.Cache) string {
	failed := cache.GetErrors()
	if len(failed) == 0 {
		return ""
	}
	return "; with errors: " + strings.Join(slices.Sorted(maps.Keys(failed)), ", ")
}
