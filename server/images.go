package server

import (
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image"
	"berth/image/lazy"
	"berth/image/profile"
	"berth/image/registry"
	"berth/internal/diskusage"
	"berth/internal/errdefs"
	"berth/internal/trace"
)

// ListImages implements ImageService.
func (s *imageService) ListImages(_ context.Context,
	req *runtimeapi.ListImagesRequest) (*runtimeapi.ListImagesResponse, error) {
	resp := &runtimeapi.ListImagesResponse{}
	if ref := req.GetFilter().GetImage().GetImage(); ref != "" {
		img, err := s.images.Get(ref)
		switch {
		case errdefs.IsNotFound(err):
		case err != nil:
			return nil, err
		default:
			resp.Images = append(resp.Images, s.imageItem(img))
		}
		return resp, nil
	}
	for _, img := range s.images.List() {
		resp.Images = append(resp.Images, s.imageItem(img))
	}
	return resp, nil
}

// ImageStatus implements ImageService. For an unknown image it returns no error, and an answer that
// has no image.
func (s *imageService) ImageStatus(_ context.Context,
	req *runtimeapi.ImageStatusRequest) (*runtimeapi.ImageStatusResponse, error) {
	if err := need(field{"image.image", req.GetImage().GetImage() != ""}); err != nil {
		return nil, err
	}
	img, err := s.images.Get(req.GetImage().GetImage())
	if errdefs.IsNotFound(err) {
		return &runtimeapi.ImageStatusResponse{}, nil
	}
	if err != nil {
		return nil, err
	}
	resp := &runtimeapi.ImageStatusResponse{Image: s.imageItem(img)}
	if req.GetVerbose() {
		config, err := img.Specification()
		if err != nil {
			return nil, err
		}
		detail := imageDetail{config, img.Artifact, s.images.LazyStatus(img)}
		if resp.Info, err = infoMap(map[string]any{"info": detail}); err != nil {
			return nil, err
		}
	}
	return resp, nil
}

// imageDetail is the additional part of verbose ImageStatus. It uses the names of other runtimes
// for users of crictl.
type imageDetail struct {
	Config   ocispec.Image      `json:"imageSpec"`
	Artifact *registry.Artifact `json:"artifact,omitempty"`
	Lazy     *lazy.Status       `json:"lazy,omitempty"`
}

// PullImage implements ImageService. It returns the image's ID, which the API requires since v1.36.
// kubelet compares its records of pulls (KEP-2535) with Image.id, and its garbage collector
// compares Image.id with image_id. All runtime handlers share the images, so the handler has no
// effect, but must be known. Of the pod's config only the metadata is used. The namespace selects
// the signature policy, and berth trace uses the rest. The image's annotations are ignored.
func (s *imageService) PullImage(ctx context.Context,
	req *runtimeapi.PullImageRequest) (*runtimeapi.PullImageResponse, error) {
	if err := need(field{"image.image", req.GetImage().GetImage() != ""}); err != nil {
		return nil, err
	}
	if err := s.checkHandler(req.GetImage().GetRuntimeHandler()); err != nil {
		return nil, err
	}
	namespace := req.GetSandboxConfig().GetMetadata().GetNamespace()
	s.pods.RecordPull(req.GetSandboxConfig().GetMetadata(), req.GetImage().GetImage(), trace.Of(ctx))
	img, err := s.images.PullFor(ctx, namespace, req.GetImage().GetImage(), req.GetAuth())
	if err != nil {
		return nil, err
	}
	return &runtimeapi.PullImageResponse{ImageRef: img.ID}, nil
}

// PullSecurityProfile implements ImageService. Kinds other than seccomp are refused for good.
func (s *imageService) PullSecurityProfile(ctx context.Context,
	req *runtimeapi.PullSecurityProfileRequest) (*runtimeapi.PullSecurityProfileResponse, error) {
	if kind := req.GetProfileKind(); kind != runtimeapi.SecurityProfileKind_Seccomp {
		return nil, profile.Invalid("profile_kind %d is not supported", kind)
	}
	if err := need(field{"image.image", req.GetImage().GetImage() != ""}); err != nil {
		return nil, profile.Invalid("%v", err)
	}
	if err := s.checkHandler(req.GetImage().GetRuntimeHandler()); err != nil {
		return nil, err
	}
	namespace := req.GetSandboxConfig().GetMetadata().GetNamespace()
	cached, err := s.images.PullProfile(ctx, namespace, req.GetImage().GetImage(), req.GetAuth())
	if err != nil {
		return nil, err
	}
	return &runtimeapi.PullSecurityProfileResponse{Cached: cached}, nil
}

// ListSecurityProfiles implements ImageService.
func (s *imageService) ListSecurityProfiles(context.Context,
	*runtimeapi.ListSecurityProfilesRequest) (*runtimeapi.ListSecurityProfilesResponse, error) {
	resp := &runtimeapi.ListSecurityProfilesResponse{}
	for _, p := range s.images.Profiles().List() {
		resp.Profiles = append(resp.Profiles, &runtimeapi.SecurityProfileInfo{Digest: p.Digest, Refs: p.Refs, Size: p.Size})
	}
	return resp, nil
}

// RemoveSecurityProfile implements ImageService. A missing profile is no error.
func (s *imageService) RemoveSecurityProfile(_ context.Context,
	req *runtimeapi.RemoveSecurityProfileRequest) (*runtimeapi.RemoveSecurityProfileResponse, error) {
	if err := need(field{"digest", req.GetDigest() != ""}); err != nil {
		return nil, err
	}
	if err := s.images.Profiles().Remove(digest.Digest(req.GetDigest())); err != nil {
		return nil, err
	}
	return &runtimeapi.RemoveSecurityProfileResponse{}, nil
}

// RemoveImage implements ImageService.
func (s *imageService) RemoveImage(ctx context.Context,
	req *runtimeapi.RemoveImageRequest) (*runtimeapi.RemoveImageResponse, error) {
	if err := need(field{"image.image", req.GetImage().GetImage() != ""}); err != nil {
		return nil, err
	}
	if err := s.images.Remove(ctx, req.GetImage().GetImage()); err != nil && !errdefs.IsNotFound(err) {
		return nil, err
	}
	return &runtimeapi.RemoveImageResponse{}, nil
}

// ImageFsInfo implements ImageService. It always names both filesystems, because kubelet expects
// that since KEP-4191. They have the same mountpoint if writable layers and images share a
// filesystem. The images' usage is current. The usage of writable layers comes from the last
// background sample.
func (s *imageService) ImageFsInfo(ctx context.Context,
	_ *runtimeapi.ImageFsInfoRequest) (*runtimeapi.ImageFsInfoResponse, error) {
	usage, err := s.images.Usage(ctx)
	if err != nil {
		return nil, err
	}
	writable := s.pods.WritableFilesystem()
	return &runtimeapi.ImageFsInfoResponse{
		ImageFilesystems: []*runtimeapi.FilesystemUsage{
			filesystemUsage(usage.Mountpoint, time.Now(), diskusage.Usage{Bytes: usage.Bytes, Inodes: usage.Inodes})},
		ContainerFilesystems: []*runtimeapi.FilesystemUsage{filesystemUsage(writable.Mountpoint, writable.At, writable.Used)},
	}, nil
}

func (s *imageService) imageItem(img *image.Image) *runtimeapi.Image {
	item := &runtimeapi.Image{
		Id:          img.ID,
		RepoTags:    img.RepoTags,
		RepoDigests: img.RepoDigests,
		Size:        img.Size,
		Spec:        &runtimeapi.ImageSpec{Image: img.ID},
		Pinned:      img.Pinned,
	}
	if img.Artifact != nil {
		item.Spec.Annotations = map[string]string{image.ArtifactType: img.Artifact.Type}
	}
	if fetched := s.images.Fetched(img); fetched != "" {
		item.Spec.Annotations = map[string]string{lazy.FetchedAnnotation: fetched} // artifacts are fetched whole
	}
	item.Uid, item.Username = imageUser(img.Config.User)
	return item
}

// imageUser splits an image's USER into a number or a name for CRI. Only plain digits count as a
// number. Anything else counts as a name, which kubelet refuses in pods that must not run as root.
// An unusual spelling of a number therefore cannot bypass that check.
func imageUser(user string) (*runtimeapi.Int64Value, string) {
	name, _, _ := strings.Cut(user, ":")
	if name == "" || strings.Trim(name, "0123456789") != "" {
		return nil, name
	}
	uid, err := strconv.ParseInt(name, 10, 64)
	if err != nil {
		return nil, name
	}
	return &runtimeapi.Int64Value{Value: uid}, ""
}

// isID reports whether ref is the image's ID or a prefix of it.
func isID(ref, id string) bool {
	hex := strings.TrimPrefix(id, "sha256:")
	ref = strings.TrimPrefix(ref, "sha256:")
	return ref == hex || len(ref) >= 7 && strings.HasPrefix(hex, ref)
}

// imageName returns a present name of the image, or its ID if it has no name.
func imageName(images Images, id string) string {
	img, err := images.Get(id)
	switch {
	case err != nil: // removed while a container uses the image
		return id
	case len(img.RepoTags) > 0:
		return img.RepoTags[0]
	case len(img.RepoDigests) > 0:
		return img.RepoDigests[0]
	default:
		return id
	}
}
