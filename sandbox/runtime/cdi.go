package runtime

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

// CDIDirs are directories of CDI spec files, in which vendors describe devices
// (tags.cncf.io/container-device-interface). Later directories take precedence. Missing directories
// are ignored. The files are read for each container that requests a device, because they may
// change while berth runs.
//
// Only the CRI's field requests devices. berth ignores the annotations that other runtimes read,
// because users control them (CVE-2026-53492). Spec files are trusted, because only the node's
// administrator can write them. Their hooks run on the host as root.
type CDIDirs []string

// Inject adds the devices to spec: device nodes and their cgroup rules, mounts, environment, hooks,
// groups, network devices, RDT class. A device that is named twice is added once. If there are no
// devices, spec stays unchanged.
//
// The error is InvalidArgument for a malformed name, FailedPrecondition for an unknown device, and
// Unimplemented for a device with a poststop hook. An unreadable spec file affects only its own
// devices. The error for an unknown device names the unreadable files.
func (d CDIDirs) Inject(spec *specs.Spec, devices []string) error {
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
		return errdefs.FailedPrecondition("CDI device %s: not found in %s%s",
			strings.Join(missing, ", "), strings.Join(d, ", "), unreadable(cache))
	}
	if err != nil {
		return errdefs.FailedPrecondition("CDI device %s: %w", strings.Join(names, ", "), err)
	}
	if spec.Hooks != nil && len(spec.Hooks.Poststop) > 0 {
		return errdefs.New(codes.Unimplemented, "CDI device %s: poststop hooks are not supported",
			strings.Join(names, ", "))
	}
	return nil
}

// HostPaths returns the host paths of the devices' nodes, which specs do not contain. It skips
// unknown devices.
func (d CDIDirs) HostPaths(devices []string) ([]string, error) {
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

// distinct checks the names, vendor/class=device, and removes duplicates.
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

// unreadable returns a text with the spec files and directories that have errors.
func unreadable(cache *cdi.Cache) string {
	failed := cache.GetErrors()
	if len(failed) == 0 {
		return ""
	}
	return "; with errors: " + strings.Join(slices.Sorted(maps.Keys(failed)), ", ")
}
