package oci

import (
	"strings"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	"berth/internal/errdefs"
)

// IsImageVolume reports whether a mount's source is an image (KEP-4639) instead of a host path.
func IsImageVolume(m *runtimeapi.Mount) bool { return m.GetImage().GetImage() != "" }

// imageSource returns the path of the image of the i-th mount, and its propagation option. The
// request must ask for a read-only mount. The mount is not noexec, because users run tools from
// images. The host mounts nothing below an image, so HOST_TO_CONTAINER has no effect and is
// accepted. BIDIRECTIONAL is refused.
func imageSource(in ContainerInput, i int) (source, propagation string, err error) {
	m := in.Config.GetMounts()[i]
	switch {
	case m.GetHostPath() != "":
		err = imageVolumeError(m, "both host_path and image are given")
	case !m.GetReadonly():
		err = imageVolumeError(m, "image volumes are read-only, and readonly is false")
	case m.GetPropagation() == runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL:
		err = imageVolumeError(m, "mounts in an image volume cannot propagate to the host")
	case strings.IndexByte(m.GetImageSubPath(), 0) >= 0:
		err = imageVolumeError(m, "image_sub_path has a zero byte")
	case in.ImageVolumes[i] == "":
		err = errdefs.Internal("mount of %s: mount point of its image is missing", m.GetContainerPath())
	}
	return in.ImageVolumes[i], "rprivate", err
}

func imageVolumeError(m *runtimeapi.Mount, what string) error {
	return errdefs.InvalidArgument("%w: mount of %s: %s", crierrors.ErrImageVolumeMountFailed, m.GetContainerPath(), what)
}
