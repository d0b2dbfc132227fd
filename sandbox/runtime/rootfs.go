package runtime

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	"berth/image"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/rootfs"
	"berth/oci"
	"berth/sandbox/state"
	"berth/shim/proto"
)

// Roots makes root filesystems and image volumes.
type Roots struct {
	Images *image.Store
	// PullPause pulls a pause image that is missing, without credentials.
	PullPause func(ctx context.Context, ref string) (*image.Image, error)
	Dirs      state.Dirs
	Quotas    *Quotas
}

// Writable holds the layers of an image under id and makes the directories of the writable layer.
// label is the SELinux label. project is an ID of Quotas, or 0.
func (k Roots) Writable(id string, image *state.Image, idMap *rootfs.IDMap, label string,
	project uint32) (rootfs.Spec, error) {
	root, err := k.Images.Hold(id, image.Layers)
	if err != nil {
		return root, fmt.Errorf("hold layers of image %s: %w", image.ID, err)
	}
	dir := k.Dirs.Writable(id)
	failpoint.Reach("container.make-rootfs")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return root, fmt.Errorf("make writable layer of %s: %w", id, err)
	}
	failpoint.Reach("container.rootfs-made")
	if err := k.Quotas.assign(dir, project); err != nil {
		return root, fmt.Errorf("set quota of writable layer of %s: %w", id, err)
	}
	if len(root.Layers) == 0 { // an image without layers: its program is in a volume
		root.Layers = []rootfs.Layer{{Kind: rootfs.Directory, Path: k.Dirs.EmptyLayer()}}
	}
	root.IDMap, root.Label = idMap, label
	root.Upper, root.Work = filepath.Join(dir, "upper"), filepath.Join(dir, "work")
	if err := root.MakeUpper(); err != nil {
		return root, fmt.Errorf("make writable layer of %s: %w", id, err)
	}
	return root, nil
}

// PauseImage returns the image that replaces the embedded pause. It pulls a missing image.
func (k Roots) PauseImage(ctx context.Context, reference string) (*state.Image, error) {
	img, err := k.Images.Get(reference)
	if errdefs.IsNotFound(err) {
		img, err = k.PullPause(ctx, reference)
	}
	if err != nil {
		return nil, fmt.Errorf("find pause image %s: %w", reference, err)
	}
	if err := img.CheckRunnable(); err != nil {
		return nil, fmt.Errorf("pause image: %w", err)
	}
	if err := k.Images.Verify(ctx, img, reference, ""); err != nil {
		return nil, fmt.Errorf("find pause image %s: %w", reference, err)
	}
	return &state.Image{ID: img.ID, Layers: img.Layers, Config: img.Config}, nil
}

// Pause returns the root filesystem of the embedded pause, one of berth's directories. If it has an
// SELinux label, it is an overlay, because a bind mount cannot change the labels of files. A shim
// gets an overlay, too: Kata's gives the disk of a bind mount to the virtual machine.
func (k Roots) Pause(dir string, idMap *rootfs.IDMap, label string, shim bool) rootfs.Spec {
	root := rootfs.Spec{Layers: []rootfs.Layer{{Kind: rootfs.Directory, Path: dir}}, IDMap: idMap, Label: label}
	if label != "" || shim {
		root.Layers = k.asOverlay(root.Layers)
	}
	return root
}

// asOverlay adds an empty layer to a single layer. A single layer would be a read-only bind mount.
// A container with CAP_SYS_ADMIN could remount a bind mount writable, and change the layer for all
// its users. An overlay without an upper layer cannot become writable.
func (k Roots) asOverlay(layers []rootfs.Layer) []rootfs.Layer {
	if len(layers) > 1 {
		return layers
	}
	return append([]rootfs.Layer{{Kind: rootfs.Directory, Path: k.Dirs.EmptyLayer()}}, layers...)
}

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
		written := cmp.Or(mount.Image.UserSpecifiedImage, mount.Image.Image)
		if err := k.Images.Verify(ctx, img, written, namespace); err != nil {
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
		if err == nil && len(v.Layers) == 0 {
			err = errdefs.FailedPrecondition("the image has no files")
		}
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

// CheckVolumes verifies that a container's image volumes can be mounted. Their layers must exist,
// and must contain the subpaths.
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
