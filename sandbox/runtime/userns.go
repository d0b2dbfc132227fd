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

// idMap returns how the root filesystems of the pod are shown to its user namespace, nil if it has
// none.
func (k Launcher) idMap(pod *state.Pod) *rootfs.IDMap {
	if pod.Mappings == nil {
		return nil
	}
	return &rootfs.IDMap{UserNS: k.Node.Dirs.UserNS(pod.ID), Mappings: *pod.Mappings}
}

// rootPlace returns the required mount point of a root filesystem; empty: any.
func (k Launcher) rootPlace(root rootfs.Spec) string {
	if root.IDMap == nil {
		return ""
	}
	return k.Node.Dirs.RootPlace()
}

// checkMounts refuses mounts whose filesystem cannot be mapped, when the
// container is created and not only when it starts.
func (k Launcher) checkMounts(podID string, r *handler.Runtime, spec *specs.Spec) error {
	ns := k.Node.Dirs.UserNS(podID)
	for _, mount := range spec.Mounts {
		if oci.IsIDMapped(mount) && r != nil && !r.IDMappedMounts { // it would show wrong owners
			return errdefs.FailedPrecondition("mount of %s: %s has no ID-mapped mounts, or does not say so",
				mount.Destination, r.Path)
		}
		if !oci.IsIDMapped(mount) || len(mount.UIDMappings) > 0 { // those libcontainer makes a namespace for
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
