package oci

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/host"
	"berth/internal/userns"
	"berth/oci/users"
)

// idMapOption makes libcontainer use the ID mappings of the container's user namespace for a mount,
// or the mount's own mappings. It applies to the mount itself, because mounts below it may have
// filesystems that cannot be mapped.
const idMapOption = "idmap"

// UserNamespace returns the ID mappings of the user namespace that a pod requests. It returns nil
// for the node's user namespace: mode NODE, or no userns_options, which kubelets before KEP-127
// send.
//
// It returns InvalidArgument for inconsistent requests and for requests that kubelet never sends:
//   - a mode other than POD and NODE
//   - mappings with NODE
//   - a number of mappings for users or groups other than one
//   - a mapping that does not start with root
//   - a user namespace together with the node's PID or IPC namespace
//
// The node's network is allowed (KEP-5607).
func UserNamespace(config *runtimeapi.PodSandboxConfig) (*userns.Mappings, error) {
	options := config.GetLinux().GetSecurityContext().GetNamespaceOptions()
	m, err := mappingsOf(options.GetUsernsOptions())
	if err != nil || m == nil {
		return nil, err
	}
	if options.GetPid() == runtimeapi.NamespaceMode_NODE {
		return nil, errdefs.InvalidArgument("namespace_options.pid: NODE is not possible with a user namespace")
	}
	if options.GetIpc() == runtimeapi.NamespaceMode_NODE {
		return nil, errdefs.InvalidArgument("namespace_options.ipc: NODE is not possible with a user namespace")
	}
	return m, nil
}

func mappingsOf(u *runtimeapi.UserNamespace) (*userns.Mappings, error) {
	if u == nil {
		return nil, nil
	}
	switch u.GetMode() {
	case runtimeapi.NamespaceMode_NODE:
		if len(u.GetUids()) > 0 || len(u.GetGids()) > 0 {
			return nil, errdefs.InvalidArgument("userns_options: mode NODE has no mappings")
		}
		return nil, nil
	case runtimeapi.NamespaceMode_POD:
	default:
		return nil, errdefs.InvalidArgument("userns_options: mode %s is not possible, only POD and NODE", u.GetMode())
	}
	uids, err := podMapping("uids", u.GetUids())
	if err != nil {
		return nil, err
	}
	gids, err := podMapping("gids", u.GetGids())
	if err != nil {
		return nil, err
	}
	return &userns.Mappings{UIDs: uids, GIDs: gids}, nil
}

func podMapping(field string, mappings []*runtimeapi.IDMapping) ([]specs.LinuxIDMapping, error) {
	if len(mappings) != 1 {
		return nil, errdefs.InvalidArgument("userns_options.%s: %d mappings, a pod needs exactly one", field, len(mappings))
	}
	if first := mappings[0].GetContainerId(); first != 0 {
		return nil, errdefs.InvalidArgument("userns_options.%s: the mapping starts with ID %d in the container, not with 0",
			field, first)
	}
	return idMappings("userns_options."+field, mappings)
}

// idMappings converts mappings. A range must not be empty or exceed the valid IDs. 4294967295 is
// not a valid ID, because system calls interpret it as "no change".
func idMappings(field string, mappings []*runtimeapi.IDMapping) ([]specs.LinuxIDMapping, error) {
	var out []specs.LinuxIDMapping
	for _, m := range mappings {
		if m.GetLength() == 0 {
			return nil, errdefs.InvalidArgument("%s: a mapping of length 0", field)
		}
		end := uint64(max(m.GetHostId(), m.GetContainerId())) + uint64(m.GetLength())
		if end > math.MaxUint32 {
			return nil, errdefs.InvalidArgument("%s: the mapping of %d IDs from %d (host %d) exceeds ID %d",
				field, m.GetLength(), m.GetContainerId(), m.GetHostId(), uint32(math.MaxUint32-1))
		}
		out = append(out, specs.LinuxIDMapping{ContainerID: m.GetContainerId(), HostID: m.GetHostId(), Size: m.GetLength()})
	}
	return out, nil
}

// checkContainerUserNamespace refuses a container that requests a different user namespace than its
// pod.
func checkContainerUserNamespace(in ContainerInput) error {
	pod, asked := in.Pod.Mappings, in.security().GetNamespaceOptions().GetUsernsOptions()
	own, err := mappingsOf(asked)
	switch {
	case err != nil:
		return err
	case asked == nil:
		return nil
	case (own == nil) != (pod == nil),
		own != nil && (own.UIDs[0] != pod.UIDs[0] || own.GIDs[0] != pod.GIDs[0]):
		return errdefs.InvalidArgument("userns_options: different from pod %s", in.Pod.ID)
	}
	return nil
}

// checkMapped refuses an identity that the pod's user namespace does not map. The kernel would
// refuse it with a less specific error.
func checkMapped(pod Pod, u users.User) error {
	m := pod.Mappings
	if m == nil {
		return nil
	}
	if !m.HasUID(u.UID) {
		return errdefs.InvalidArgument("user %d is not in the pod's user namespace, which has %d users",
			u.UID, m.UIDs[0].Size)
	}
	for _, g := range append([]uint32{u.GID}, u.Groups...) {
		if !m.HasGID(g) {
			return errdefs.InvalidArgument("group %d is not in the pod's user namespace, which has %d groups", g, m.GIDs[0].Size)
		}
	}
	return nil
}

// setFirstNamespaces adds a new mount namespace and, if the pod has one, its user namespace. The
// error is Internal if the config requests a user namespace but the pod has no Mappings, or vice
// versa. Otherwise a container could run in the node's user namespace because its caller has lost
// the mappings. The spec gets both the path and the mappings of the user namespace, because
// containerd and CRI-O send both and OCI runtimes expect them.
func setFirstNamespaces(pod Pod, spec *specs.Spec) error {
	mount := specs.LinuxNamespace{Type: specs.MountNamespace}
	spec.Linux.Namespaces = []specs.LinuxNamespace{mount}
	m, users := pod.Mappings, pod.options().GetUsernsOptions()
	if wanted := users != nil && users.GetMode() != runtimeapi.NamespaceMode_NODE; wanted != (m != nil) {
		return errdefs.Internal("pod %s: the mappings of its user namespace do not match its config", pod.ID)
	}
	if m == nil {
		return nil
	}
	if pod.UserNS == "" {
		return errdefs.Internal("pod %s: path of its user namespace is missing", pod.ID)
	}
	spec.Linux.Namespaces = []specs.LinuxNamespace{{Type: specs.UserNamespace, Path: pod.UserNS}, mount}
	spec.Linux.UIDMappings, spec.Linux.GIDMappings = m.UIDs, m.GIDs
	return nil
}

// sysMount returns the container's /sys. A sysfs shows one network namespace, and only that
// namespace's owner can mount it. So a pod that has a user namespace and uses the node's network
// gets a bind mount of the node's /sys. The node's mounts below /sys, such as cgroups and debugfs,
// are read-only as well. Later mounts of the node do not propagate, because they would be writable.
func sysMount(in ContainerInput, access string) specs.Mount {
	if in.Pod.Mappings != nil && in.Pod.hostNetwork() {
		if access == "ro" && in.Host.RecursiveReadOnly {
			access = "rro"
		}
		return specs.Mount{Destination: "/sys", Type: "bind", Source: "/sys",
			Options: []string{"rbind", "rprivate", "nosuid", "noexec", "nodev", access}}
	}
	return specs.Mount{Destination: "/sys", Type: "sysfs", Source: "sysfs",
		Options: []string{"nosuid", "noexec", "nodev", access}}
}

// mapMount sets the ID mappings of a mount in the CRI config. If they equal the pod's, the pod's
// user namespace is used. libcontainer makes a namespace for other mappings. An image volume is
// already mapped to the pod's namespace.
func mapMount(m *runtimeapi.Mount, pod Pod, mount *specs.Mount) error {
	if IsImageVolume(m) {
		return nil
	}
	if len(m.GetUidMappings()) == 0 && len(m.GetGidMappings()) == 0 {
		return nil
	}
	field := "mount of " + m.GetContainerPath()
	uids, err := idMappings(field+": uidMappings", m.GetUidMappings())
	if err != nil {
		return err
	}
	gids, err := idMappings(field+": gidMappings", m.GetGidMappings())
	if err != nil {
		return err
	}
	if len(uids) == 0 || len(gids) == 0 {
		return errdefs.InvalidArgument("%s: only one of uidMappings and gidMappings", field)
	}
	mount.Options = append(mount.Options, idMapOption)
	own := pod.Mappings
	if own != nil && len(uids) == 1 && uids[0] == own.UIDs[0] && len(gids) == 1 && gids[0] == own.GIDs[0] {
		return nil
	}
	mount.UIDMappings, mount.GIDMappings = uids, gids
	return nil
}

// BindDevices is for a spec with a user namespace, in which no process can make device nodes. It
// replaces the spec's device nodes by bind mounts of the host's nodes. libcontainer would bind the
// host's file at the node's path in the container, which may be any file. BindDevices therefore
// leaves a node to libcontainer only if the host has the same node at the same path. It looks for
// the other nodes at sources, which are host paths of devices or of directories, and then below
// /dev. It is the last step, because edits by vendors and plugins add nodes too. A bound device
// keeps the host's owner and mode. Owners and modes in the spec, from
// devices.ownership_from_security_context or a CDI file, have no effect.
//
// The error is FailedPrecondition for a device that the host does not have at these paths.
func BindDevices(spec *specs.Spec, sources []string, files Files) error {
	var left []specs.LinuxDevice
	var known []host.Device
	for _, node := range spec.Linux.Devices {
		at, err := devicesAt(node.Path, files)
		if err != nil {
			return err
		}
		if slices.ContainsFunc(at, func(d host.Device) bool { return d.Path == node.Path && isDevice(d, node) }) {
			left = append(left, node)
			continue
		}
		if known == nil {
			if known, err = devicesOf(append(slices.Clone(sources), "/dev"), files); err != nil {
				return err
			}
		}
		i := slices.IndexFunc(known, func(d host.Device) bool { return isDevice(d, node) })
		if i < 0 {
			return errdefs.FailedPrecondition("device %s (%s %d:%d): the host has no such node, and in a user namespace none "+
				"can be made",
				node.Path, node.Type, node.Major, node.Minor)
		}
		spec.Mounts = append(spec.Mounts, specs.Mount{Destination: node.Path, Type: "bind", Source: known[i].Path,
			Options: []string{"bind", "rprivate", "nosuid", "noexec", "rw"}})
	}
	spec.Linux.Devices = left
	return nil
}

func devicesOf(paths []string, files Files) ([]host.Device, error) {
	var all []host.Device
	for _, path := range paths {
		resolved, err := files.Resolve(path)
		if errdefs.IsBadPath(err) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("list devices: %w", err)
		}
		found, err := devicesAt(resolved, files)
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	return all, nil
}

// devicesAt is files.Devices, but a missing path or device is no error.
func devicesAt(path string, files Files) ([]host.Device, error) {
	devices, err := files.Devices(path)
	if err == nil || errors.Is(err, host.ErrNotDevice) || errdefs.IsBadPath(err) {
		return devices, nil
	}
	return nil, fmt.Errorf("list devices: %w", err)
}

// isDevice reports whether a node is the device. In a spec "u" means "c".
func isDevice(d host.Device, node specs.LinuxDevice) bool {
	kind := node.Type
	if kind == "u" {
		kind = "c"
	}
	return d.Type == kind && d.Major == node.Major && d.Minor == node.Minor
}

// IsIDMapped reports whether a mount maps the owners of its source.
func IsIDMapped(m specs.Mount) bool {
	return slices.Contains(m.Options, idMapOption) || len(m.UIDMappings) > 0
}
