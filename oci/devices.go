package oci

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/host"
)

// setDevices sets the container's device nodes and the rules of its device cgroup. libcontainer
// adds the nodes and rules of the usual devices (null, zero, tty …).
func setDevices(in ContainerInput, spec *specs.Spec) error {
	// The first rule denies everything, and later rules take precedence.
	rules := []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}
	if in.security().GetPrivileged() && !in.WithoutHostDevices {
		rules = []specs.LinuxDeviceCgroup{{Allow: true, Access: "rwm"}}
		devices, err := in.Files.Devices("/dev")
		if err != nil {
			return fmt.Errorf("list the host's devices: %w", err)
		}
		for _, d := range devices {
			addDevice(spec, d, d.Path)
		}
	}
	for _, d := range in.Config.GetDevices() {
		granted, err := criDevices(d, in.Files)
		if err != nil {
			return err
		}
		access, err := deviceAccess(d)
		if err != nil {
			return err
		}
		for _, g := range granted {
			if in.DeviceOwnership {
				g.device = ownedBy(g.device, in.security())
			}
			addDevice(spec, g.device, g.path)
			rules = append(rules, specs.LinuxDeviceCgroup{Allow: true, Type: g.device.Type,
				Major: &g.device.Major, Minor: &g.device.Minor, Access: access})
		}
	}
	spec.Linux.Resources.Devices = rules
	return nil
}

// addDevice adds a node. It replaces an earlier node with the same path.
func addDevice(spec *specs.Spec, d host.Device, at string) {
	node := specs.LinuxDevice{Path: at, Type: d.Type, Major: d.Major, Minor: d.Minor,
		FileMode: &d.Mode, UID: &d.UID, GID: &d.GID}
	i := slices.IndexFunc(spec.Linux.Devices, func(n specs.LinuxDevice) bool { return n.Path == at })
	if i >= 0 {
		spec.Linux.Devices[i] = node
		return
	}
	spec.Linux.Devices = append(spec.Linux.Devices, node)
}

// ownedBy returns d with the user and group of the security context, if set.
func ownedBy(d host.Device, sc *runtimeapi.LinuxContainerSecurityContext) host.Device {
	if user := sc.GetRunAsUser(); user != nil {
		d.UID = uint32(user.GetValue()) // users.Resolve has checked the range
	}
	if group := sc.GetRunAsGroup(); group != nil {
		d.GID = uint32(group.GetValue())
	}
	return d
}

// grantedDevice is a device of the host and its path in the container.
type grantedDevice struct {
	device host.Device
	path   string
}

// criDevices returns the devices of an entry in the CRI config: one node, or all nodes below a
// directory.
func criDevices(d *runtimeapi.Device, files Files) ([]grantedDevice, error) {
	source := d.GetHostPath()
	dest := d.GetContainerPath()
	if dest == "" {
		dest = source
	}
	for _, p := range []string{source, dest} {
		if !path.IsAbs(p) || strings.IndexByte(p, 0) >= 0 {
			return nil, errdefs.InvalidArgument("device: %q is not an absolute path", p)
		}
	}
	if path.Clean(dest) == "/" {
		return nil, errdefs.InvalidArgument("device %s: container_path is the root", source)
	}
	resolved, err := files.Resolve(source)
	var devices []host.Device
	if err == nil {
		devices, err = files.Devices(resolved)
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, errdefs.InvalidArgument("device %s does not exist", source)
	case errdefs.IsBadPath(err):
		return nil, errdefs.InvalidArgument("device %.300q: %w", source, err)
	case errors.Is(err, host.ErrNotDevice):
		return nil, errdefs.InvalidArgument("device %s is not a device", source)
	case err != nil:
		return nil, fmt.Errorf("device %s: %w", source, err)
	case len(devices) == 0:
		return nil, errdefs.InvalidArgument("device %s is a directory without devices", source)
	}
	granted := make([]grantedDevice, 0, len(devices))
	for _, found := range devices {
		below := strings.TrimPrefix(found.Path, resolved)
		granted = append(granted, grantedDevice{found, path.Join(dest, below)})
	}
	return granted, nil
}

// deviceAccess checks the permissions of a device. As in CRI-O, empty permissions mean all
// permissions.
func deviceAccess(d *runtimeapi.Device) (string, error) {
	access := d.GetPermissions()
	if access == "" {
		return "rwm", nil
	}
	if strings.Trim(access, "rwm") != "" || len(access) > 3 {
		return "", errdefs.InvalidArgument("device %s: permissions %q are not made of r, w and m", d.GetHostPath(), access)
	}
	return access, nil
}
