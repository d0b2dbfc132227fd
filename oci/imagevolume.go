package oci

import (
	"strings"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	"berth/internal/errdefs"
)

// IsImageVolume tells whether a mount is of an image (KEP-4639) and not of a host path.
func IsImageVolume(m *runtimeapi.Mount) bool { return m.GetImage().GetImage() != "" }

// imageSource is the place of the image that the i-th mount is of, and the option for its
// propagation. It is read-only, which the request has to say, and is not made noexec: the
// tools of a tools image are meant to run. Nothing of the host is ever mounted below an
// image, so HOST_TO_CONTAINER promises nothing that it does not get; BIDIRECTIONAL would.
func imageSource(in ContainerInput, i int) (source, propagation string, err error) {
	m := in.Config.GetMounts()[i]
	switch {
	case m.GetHostPath() != "":
		err = imageVolumeError(m, "both host_path and image are given")
	case !m.GetReadonly():
		err = imageVolumeError(m, "image volumes are read-only, and readonly is false")
	case m.GetPropagation() == runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL:
		err = imageVolumeError(m, "an image has no place on the host to propagate to")
	case strings.IndexByte(m.GetImageSubPath(), 0) >= 0:
		err = imageVolumeError(m, "image_sub_path has a zero byte")
	case in.ImageVolumes[i] == "":
		err = errdefs.Internal("mount of %s: place of its image is missing", m.GetContainerPath())
	}
	return in.ImageVolumes[i], "rprivate", err
}

func imageVolumeError(m *runtimeapi.Mount, what string) error {
	return errdefs.InvalidArgument("%w: mount of %s: %s", crierrors.ErrImageVolumeMountFailed, m.GetContainerPath(), what)
}
