package server

import (
	"iter"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// The streaming forms of the lists (KEP-5825) answer what the lists answer, from one
// snapshot, in as many messages as it takes.

// StreamPodSandboxes implements RuntimeService.
func (s *runtimeService) StreamPodSandboxes(req *runtimeapi.StreamPodSandboxesRequest, stream grpc.ServerStreamingServer[runtimeapi.StreamPodSandboxesResponse]) error {
	return sendBatches(each(s.filterPods(req.GetFilter()), podItem), func(batch []*runtimeapi.PodSandbox) error {
		return stream.Send(&runtimeapi.StreamPodSandboxesResponse{PodSandboxes: batch})
	})
}

// StreamContainers implements RuntimeService.
func (s *runtimeService) StreamContainers(req *runtimeapi.StreamContainersRequest, stream grpc.ServerStreamingServer[runtimeapi.StreamContainersResponse]) error {
	return sendBatches(each(s.filterContainers(req.GetFilter()), s.containerItem), func(batch []*runtimeapi.Container) error {
		return stream.Send(&runtimeapi.StreamContainersResponse{Containers: batch})
	})
}

// each makes the items of a list, one by one.
func each[Snapshot any, Item proto.Message](all []Snapshot, item func(Snapshot) Item) iter.Seq[Item] {
	return func(yield func(Item) bool) {
		for _, snapshot := range all {
			if !yield(item(snapshot)) {
				return
			}
		}
	}
}

// StreamImages implements ImageService.
func (s *imageService) StreamImages(req *runtimeapi.StreamImagesRequest, stream grpc.ServerStreamingServer[runtimeapi.StreamImagesResponse]) error {
	list, err := s.ListImages(stream.Context(), &runtimeapi.ListImagesRequest{Filter: req.GetFilter()})
	if err != nil {
		return err
	}
	return sendBatches(slices.Values(list.Images), func(batch []*runtimeapi.Image) error {
		return stream.Send(&runtimeapi.StreamImagesResponse{Images: batch})
	})
}
