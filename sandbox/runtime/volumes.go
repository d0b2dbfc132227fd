package runtime

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	"berth/internal/rootfs"
	"berth/oci"
	"berth/sandbox/state"
	"berth/shim/proto"
)

// FindVolumes finds the images of a config's mounts, by the IDs that PullImage returned or by other
// references. They must pass the signature policy of the pod's namespace.
func (k Roots) FindVolumes(
	ctx context.Context, namespace string, config *runtimeapi.ContainerConfig,
) ([]state.Volume, error) {
	var volumes []state.Volume
	for i, mount := range config.GetMounts() {
		if !oci.IsImageVolume(mount) {
			continue
		}
		img, err := k.Images.Get(mount.Image.Image)
		if err != nil {
			return nil, volumeFailed(mount, err)
		}
		if err := k.Images.Verify(ctx, img, mount.Image.UserSpecifiedImage, namespace); err != nil {
			return nil, volumeFailed(mount, err)
		}
		volumes = append(volumes, state.Volume{Mount: i, ImageID: img.ID, Layers: img.Layers})
	}
	return volumes, nil
}

// volumeFailed returns an error with the prefix that kubelet matches.
func volumeFailed(m *runtimeapi.Mount, err error) error {
	return fmt.Errorf("%w: mount of %s: %w", crierrors.ErrImageVolumeMountFailed, m.ContainerPath, err)
}

// VolumePlaces returns the launcher's mount points of a container's image volumes, by index of the
// mount.
func (k Roots) VolumePlaces(id string, volumes []state.Volume) map[int]string {
	places := make(map[int]string, len(volumes))
	for _, v := range volumes {
		places[v.Mount] = filepath.Join(k.Dirs.Shim(id), fmt.Sprintf("volume-%d", v.Mount))
	}
	return places
}

// HoldVolumes holds the layers of a container's image volumes and returns the volumes to mount.
func (k Roots) HoldVolumes(
	id string, config *runtimeapi.ContainerConfig, volumes []state.Volume,
) ([]proto.Volume, error) {
	places := k.VolumePlaces(id, volumes)
	var held []proto.Volume
	var failed error
	for _, v := range volumes {
		mount := config.Mounts[v.Mount]
		layers, err := k.Images.Hold(v.Holder(id), v.Layers)
		if err != nil {
			failed = errors.Join(failed, volumeFailed(mount, fmt.Errorf("hold layers of image %s: %w", v.ImageID, err)))
			continue // recovery must hold the other volumes
		}
		layers.Layers = k.asOverlay(layers.Layers)
		held = append(held, proto.Volume{Path: places[v.Mount], Rootfs: layers, SubPath: mount.ImageSubPath})
	}
	return held, failed
}

// WithMapping returns image volumes with the ID mapping and SELinux label of a root filesystem.
func WithMapping(root rootfs.Spec, volumes []proto.Volume) []proto.Volume {
	for i := range volumes {
		volumes[i].Rootfs.IDMap, volumes[i].Rootfs.Label = root.IDMap, root.Label
	}
	return volumes
}

// ReleaseVolumes releases the layers that HoldVolumes holds. It may be repeated.
func (k Roots) ReleaseVolumes(id string, volumes []state.Volume) error {
	var failed error
	for _, v := range volumes {
		failed = errors.Join(failed, k.Images.Release(v.Holder(id)))
	}
	return failed
}

// CheckVolumes verifies that a container's image volumes can be mounted: their layers exist, and
// the layers contain the subpaths.
func (k Roots) CheckVolumes(id string, config *runtimeapi.ContainerConfig, volumes []state.Volume) error {
	held, err := k.HoldVolumes(id, config, volumes)
	if err != nil {
		return err
	}
	for i, v := range held {
		if v.SubPath == "" {
			continue
		}
		if err := CheckSubPath(v.Rootfs, v.SubPath); err != nil {
			return volumeFailed(config.Mounts[volumes[i].Mount], err)
		}
	}
	return nil
}
