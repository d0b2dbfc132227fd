package sandbox

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	"berth/internal/rootfs"
	"berth/oci"
	"berth/sandbox/imagefs"
	"berth/sandbox/record"
	"berth/shim"
)

// imageVolumes finds the images that a config's mounts name, by the ID that kubelet got
// from PullImage or any other reference.
func (m *Manager) imageVolumes(config *runtimeapi.ContainerConfig) ([]record.Volume, error) {
	var volumes []record.Volume
	for i, mount := range config.GetMounts() {
		if !oci.IsImageVolume(mount) {
			continue
		}
		img, err := m.images.Get(mount.Image.Image)
		if err != nil {
			return nil, volumeFailed(mount, err)
		}
		volumes = append(volumes, record.Volume{Mount: i, ImageID: img.ID, Layers: img.Layers})
	}
	return volumes, nil
}

// volumeFailed makes an error that kubelet recognizes by how it begins.
func volumeFailed(m *runtimeapi.Mount, err error) error {
	return fmt.Errorf("%w: mount of %s: %w", crierrors.ErrImageVolumeMountFailed, m.ContainerPath, err)
}

// volumePlaces tells where the launcher mounts a container's image volumes, by index of the mount.
func (m *Manager) volumePlaces(c *container) map[int]string {
	places := make(map[int]string, len(c.rec.Volumes))
	for _, v := range c.rec.Volumes {
		places[v.Mount] = filepath.Join(m.dirs.Shim(c.id), fmt.Sprintf("volume-%d", v.Mount))
	}
	return places
}

// holdVolumes keeps the layers of a container's image volumes alive and returns what to mount.
func (m *Manager) holdVolumes(c *container) ([]shim.Volume, error) {
	places := m.volumePlaces(c)
	var volumes []shim.Volume
	var failed error
	for _, v := range c.rec.Volumes {
		mount := c.config.Mounts[v.Mount]
		layers, err := m.images.Hold(v.Holder(c.id), v.Layers)
		if err != nil {
			failed = errors.Join(failed, volumeFailed(mount, fmt.Errorf("layers of image %s: %w", v.ImageID, err)))
			continue // after a restart the others are to be held all the same
		}
		layers.Layers = m.notAlone(layers.Layers)
		volumes = append(volumes, shim.Volume{Path: places[v.Mount], Rootfs: layers, SubPath: mount.ImageSubPath})
	}
	return volumes, failed
}

// volumesFor is what to mount of a container's image volumes, shown as its root filesystem is: to
// the same user namespace, with the same SELinux label.
func (m *Manager) volumesFor(root rootfs.Spec, c *container) ([]shim.Volume, error) {
	volumes, err := m.holdVolumes(c)
	return shownAs(root, volumes), err
}

func shownAs(root rootfs.Spec, volumes []shim.Volume) []shim.Volume {
	for i := range volumes {
		volumes[i].Rootfs.IDMap, volumes[i].Rootfs.Label = root.IDMap, root.Label
	}
	return volumes
}

// notAlone puts an empty layer below a single one. An image of one layer would be a read-only
// bind mount of it, which a container with CAP_SYS_ADMIN can make writable, and change the
// layer for all who use it. An overlay that has no upper layer can't be made writable.
func (m *Manager) notAlone(layers []rootfs.Layer) []rootfs.Layer {
	if len(layers) > 1 {
		return layers
	}
	return append([]rootfs.Layer{{Kind: rootfs.Directory, Path: m.dirs.EmptyLayer()}}, layers...)
}

// releaseVolumes ends what holdVolumes began. It may be repeated.
func (m *Manager) releaseVolumes(c *container) error {
	var failed error
	for _, v := range c.rec.Volumes {
		failed = errors.Join(failed, m.images.Release(v.Holder(c.id)))
	}
	return failed
}

// checkVolumes proves that a container's image volumes can be had: that their layers are
// there, and in them what the mounts are of.
func (m *Manager) checkVolumes(c *container) error {
	volumes, err := m.holdVolumes(c)
	if err != nil {
		return err
	}
	for i, v := range volumes {
		if v.SubPath == "" {
			continue
		}
		if err := imagefs.CheckSubPath(v.Rootfs, v.SubPath); err != nil {
			return volumeFailed(c.config.Mounts[c.rec.Volumes[i].Mount], err)
		}
	}
	return nil
}

// statusMounts are the config's mounts with the IDs of the images they are of, which kubelet
// shows in the pod's status (KEP-5365).
func statusMounts(c *container) []*runtimeapi.Mount {
	mounts := slices.Clone(c.config.GetMounts())
	for _, v := range c.rec.Volumes {
		mount := proto.CloneOf(mounts[v.Mount])
		mount.Image.ImageRef = v.ImageID
		mounts[v.Mount] = mount
	}
	return mounts
}
