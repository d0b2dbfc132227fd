package oci

import (
	"maps"
	"slices"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
)

// ownCgroupNamespace reports whether the container has a cgroup namespace. The request decides.
// Without a request, containers see the host's cgroup paths on v1, as in containerd and CRI-O
// (KEP-2254). Privileged containers then also see them on v2.
func (in ContainerInput) ownCgroupNamespace() bool {
	if asked := in.security().GetNamespaceOptions().GetCgroupnsOptions(); asked != nil {
		return asked.GetMode() == runtimeapi.NamespaceMode_CONTAINER
	}
	return in.Host.CgroupV2 && !in.security().GetPrivileged()
}

// checkCgroupView refuses a cgroup namespace or a mount of cgroups that berth cannot provide
// (CgroupNamespace and CgroupMountMode in the CRI). It returns InvalidArgument for requests that
// are never valid, and FailedPrecondition for writable mounts that this node does not allow.
func checkCgroupView(in ContainerInput) error {
	asked := in.security().GetNamespaceOptions().GetCgroupnsOptions()
	mode := asked.GetMode()
	if asked != nil && mode != runtimeapi.NamespaceMode_CONTAINER && mode != runtimeapi.NamespaceMode_NODE {
		return errdefs.InvalidArgument("cgroupns_options: mode %s is not possible, only CONTAINER and NODE", mode)
	}
	privileged := in.security().GetPrivileged()
	switch mount := in.security().GetCgroupMountMode(); mount {
	case runtimeapi.CgroupMountMode_CGROUP_MOUNT_MODE_UNSPECIFIED:
		return nil
	case runtimeapi.CgroupMountMode_CGROUP_MOUNT_MODE_READ_ONLY:
		if privileged {
			return errdefs.InvalidArgument("cgroup_mount_mode: READ_ONLY is not possible for a privileged container")
		}
		return nil
	case runtimeapi.CgroupMountMode_CGROUP_MOUNT_MODE_READ_WRITE:
		if !privileged && mode == runtimeapi.NamespaceMode_NODE && asked != nil {
			return errdefs.InvalidArgument("cgroup_mount_mode: READ_WRITE with the node's cgroup namespace needs a privileged container")
		}
		return checkWritableCgroups(in)
	default:
		return errdefs.InvalidArgument("cgroup_mount_mode: unknown mode %d", mount)
	}
}

// checkWritableCgroups refuses a writable mount on a node where the kernel does not keep a
// container from changing its own limits.
func checkWritableCgroups(in ContainerInput) error {
	switch {
	case !in.Host.CgroupV2:
		return errdefs.FailedPrecondition("cgroup_mount_mode: READ_WRITE needs cgroup v2, this node has v1")
	case !slices.Contains(in.Host.CgroupOptions, "nsdelegate"):
		return errdefs.FailedPrecondition("cgroup_mount_mode: READ_WRITE needs nsdelegate, " +
			"without which cgroup v2 is mounted on this node")
	}
	return nil
}

// WritableCgroups reports whether an unprivileged container can make cgroups below its own.
func WritableCgroups(sc *runtimeapi.LinuxContainerSecurityContext) bool {
	return !sc.GetPrivileged() && sc.GetCgroupMountMode() == runtimeapi.CgroupMountMode_CGROUP_MOUNT_MODE_READ_WRITE
}

// nestingLimits limit how many cgroups a container may create below its own. Without a limit it
// could use up all 65535 IDs of memory cgroups in the kernel. It could also make paths that are too
// long to remove: 12 names of 255 bytes fit into PATH_MAX.
var nestingLimits = map[string]string{"cgroup.max.descendants": "1000", "cgroup.max.depth": "12"}

func limitNesting(r *specs.LinuxResources) {
	if r.Unified == nil {
		r.Unified = map[string]string{}
	}
	maps.Copy(r.Unified, nestingLimits)
}
