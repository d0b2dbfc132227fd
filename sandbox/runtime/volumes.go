package runtime

import (
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

// FindVolumes finds the images that a config's mounts name, by the ID that kubelet got
// from PullImage or any other reference.
func (k Roots) FindVolumes(config *runtimeapi.ContainerConfig) ([]state.Volume, error) {
	var volumes []state.Volume
	for i, mount := range config.GetMounts() {
		if !oci.IsImageVolume(mount) {
			continue
		}
		img, err := k.Images.Get(mount.Image.Image)
		if err != nil {
			return nil, volumeFailed(mount, err)
		}
		volumes = append(volumes, state.Volume{Mount: i, ImageID: img.ID, Layers: img.Layers})
	}
	return volumes, nil
}

// volumeFailed makes an error that kubelet recognizes by how it begins.
func volumeFailed(m *runtimeapi.Mount, err error) error {
	return fmt.Errorf("%w: mount of %s: %w", crierrors.ErrImageVolumeMountFailed, m.ContainerPath, err)
}

// VolumePlaces tells where the launcher mounts a container's image volumes, by index of the mount.
func (k Roots) VolumePlaces(id string, volumes []state.Volume) map[int]string {
	places := make(map[int]string, len(volumes))
	for _, v := range volumes {
		places[v.Mount] = filepath.Join(k.Dirs.Shim(id), fmt.Sprintf("volume-%d", v.Mount))
	}
	return places
}

// HoldVolumes keeps the layers of a container's image volumes alive and returns what to mount.
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
			failed = errors.Join(failed, volumeFailed(mount, fmt.Errorf("layers of image %s: %w", v.ImageID, err)))
			continue // after a restart the other volumes must be held nevertheless
		}
		layers.Layers = k.notAlone(layers.Layers)
		held = append(held, proto.Volume{Path: places[v.Mount], Rootfs: layers, SubPath: mount.ImageSubPath})
	}
	return held, failed
}

// ShownAs returns image volumes shown as a root filesystem is: to the same user namespace, with the
// same SELinux label.
func ShownAs(root rootfs.Spec, volumes []proto.Volume) []proto.Volume {
	for i := range volumes {
		volumes[i].Rootfs.IDMap, volumes[i].Rootfs.Label = root.IDMap, root.Label
	}
	return volumes
}

// ReleaseVolumes ends what HoldVolumes began. It may be repeated.
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
