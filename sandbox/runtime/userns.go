package runtime

import (
	"errors"
	"fmt"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"berth/internal/errdefs"
	"berth/internal/rootfs"
	"berth/oci"
	"berth/sandbox/handler"
	"berth/sandbox/state"
)

// idMap returns the ID mapping of the root filesystems of a pod, nil if the pod has no user
// namespace.
func (k Launcher) idMap(pod *state.Pod) *rootfs.IDMap {
	if pod.Mappings == nil {
		return nil
	}
	return &rootfs.IDMap{UserNS: k.Node.UserNS(pod.ID), Mappings: *pod.Mappings}
}

// rootPlace returns the required mount point of a root filesystem, or "" for any.
func (k Launcher) rootPlace(root rootfs.Spec) string {
	if root.IDMap == nil {
		return ""
	}
	return k.Node.RootPlace()
}

// checkMounts refuses mounts whose filesystem cannot be ID-mapped. It runs at the creation of a
// container, so that the start does not fail.
func (k Launcher) checkMounts(podID string, r *handler.Runtime, spec *specs.Spec) error {
	ns := k.Node.UserNS(podID)
	for _, mount := range spec.Mounts {
		if oci.IsIDMapped(mount) && r != nil && !r.IDMappedMounts { // unmapped, the mount would show wrong owners
			return errdefs.FailedPrecondition("mount of %s: runtime %s does not report support for ID-mapped mounts",
				mount.Destination, r.Path)
		}
		if !oci.IsIDMapped(mount) || len(mount.UIDMappings) > 0 { // libcontainer creates a user namespace for mounts with mappings
			continue
		}
		err := rootfs.CheckIDMap(mount.Source, ns)
		if errors.Is(err, errors.ErrUnsupported) {
			return errdefs.FailedPrecondition("mount of %s: %w", mount.Destination, err)
		}
		if err != nil {
			return fmt.Errorf("mount of %s: %w", mount.Destination, err)
		}
	}
	return nil
}
