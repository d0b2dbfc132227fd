package server

import (
	"slices"

	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// The streaming forms of the lists (KEP-5825) send the same answers, from one snapshot, in several
// messages.

// StreamPodSandboxes implements RuntimeService. It shares encoded items with ListPodSandbox.
func (s *runtimeService) StreamPodSandboxes(req *runtimeapi.StreamPodSandboxesRequest,
	stream grpc.ServerStreamingServer[runtimeapi.StreamPodSandboxesResponse]) error {
	items, err := s.encodedPods(req.GetFilter())
	if err != nil {
		return err
	}
	return sendItems(items, stream)
}

// StreamContainers implements RuntimeService. It shares encoded items with ListContainers.
func (s *runtimeService) StreamContainers(req *runtimeapi.StreamContainersRequest,
	stream grpc.ServerStreamingServer[runtimeapi.StreamContainersResponse]) error {
	items, err := s.encodedContainers(req.GetFilter())
	if err != nil {
		return err
	}
	return sendItems(items, stream)
}

// StreamImages implements ImageService.
func (s *imageService) StreamImages(req *runtimeapi.StreamImagesRequest,
	stream grpc.ServerStreamingServer[runtimeapi.StreamImagesResponse]) error {
	list, err := s.ListImages(stream.Context(), &runtimeapi.ListImagesRequest{Filter: req.GetFilter()})
	if err != nil {
		return err
	}
	return sendBatches(slices.Values(list.Images), func(batch []*runtimeapi.Image) error {
		return stream.Send(&runtimeapi.StreamImagesResponse{Images: batch})
	})
}
