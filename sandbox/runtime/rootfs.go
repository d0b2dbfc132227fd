package runtime

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"berth/image"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/rootfs"
	"berth/sandbox/state"
)

// Roots makes root filesystems and image volumes.
type Roots struct {
	Images *image.Store
	Dirs   state.Dirs
	Quotas *Quotas
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
		img, err = k.Images.Pull(ctx, reference, nil)
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

// Pause returns the root filesystem of the embedded pause, one of berth's directories. With an
// SELinux label it is an overlay, because a bind mount cannot change the labels of files.
func (k Roots) Pause(dir string, idMap *rootfs.IDMap, label string) rootfs.Spec {
	root := rootfs.Spec{Layers: []rootfs.Layer{{Kind: rootfs.Directory, Path: dir}}, IDMap: idMap}
	if label != "" {
		root.Layers, root.Label = k.asOverlay(root.Layers), label
	}
	return root
}

// asOverlay adds an empty layer to a single layer. A single layer would be a read-only bind mount.
// A container with CAP_SYS_ADMIN could remount it writable and change the layer for all its users.
// An overlay without an upper layer cannot become writable.
func (k Roots) asOverlay(layers []rootfs.Layer) []rootfs.Layer {
	if len(layers) > 1 {
		return layers
	}
	return append([]rootfs.Layer{{Kind: rootfs.Directory, Path: k.Dirs.EmptyLayer()}}, layers...)
}
