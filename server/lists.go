package server

import (
	"iter"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Lists in batches (KEP-5825). The API's RPCs Stream… send the same answers as the RPCs List…. They
// send one snapshot in several messages.

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

// batchBytes bounds one message of a list. It is far below MaxMessage, so neither side buffers
// much. It is far above the size of an item, so hundreds of pods need one or two messages.
const batchBytes = 1 << 20

// sendBatches sends the items of a list in order, each exactly once. A batch has at least one item
// and at most batchBytes. A larger item gets a separate batch. If there are no items, it sends no
// message. The handler returns its result: nil ends the RPC, and an error of send means that the
// client has disconnected.
//
// items may compute the items one by one. Each batch is sent before the next one is computed.
func sendBatches[T proto.Message](items iter.Seq[T], send func([]T) error) error {
	return inBatches(items, func(item T) int { return proto.Size(item) }, send)
}

// inBatches is sendBatches with a function for the size of an item in bytes.
func inBatches[T any](items iter.Seq[T], sizeOf func(T) int, send func([]T) error) error {
	var batch []T
	size := 0
	for item := range items {
		bytes := sizeOf(item)
		if len(batch) > 0 && size+bytes > batchBytes {
			if err := send(batch); err != nil {
				return err
			}
			batch, size = nil, 0 // not reused, because gRPC may still hold the message
		}
		batch, size = append(batch, item), size+bytes
	}
	if len(batch) == 0 {
		return nil
	}
	return send(batch)
}
