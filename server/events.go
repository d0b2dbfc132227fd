package server

import (
	"context"
	"errors"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/sandbox/state"
)

// Events is the part of the sandbox manager that GetContainerEvents uses.
type Events interface {
	Events() *state.FeedReader[state.Event]
}

// GetContainerEvents implements RuntimeService (KEP-3386). The client gets all events after the
// stream's header. The stream ends with ResourceExhausted if the client reads too slowly and events
// were dropped, and with Unavailable if berth stops. In both cases the client must list again.
func (s *runtimeService) GetContainerEvents(_ *runtimeapi.GetEventsRequest,
	stream grpc.ServerStreamingServer[runtimeapi.ContainerEventResponse]) error {
	reader := s.pods.Events()
	defer reader.Close()
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	defer context.AfterFunc(s.stopping, cancel)()
	if err := stream.SendHeader(metadata.MD{}); err != nil {
		return err
	}
	for {
		event, err := reader.Next(ctx)
		switch {
		case s.stopping.Err() != nil:
			return errdefs.Unavailable("container events: berth is stopping")
		case errors.Is(err, state.ErrBehind):
			return errdefs.New(codes.ResourceExhausted, "container events: %w", err)
		case err != nil:
			return err
		}
		if err := stream.Send(s.eventResponse(event)); err != nil {
			return err
		}
	}
}

func (s *runtimeService) eventResponse(event state.Event) *runtimeapi.ContainerEventResponse {
	resp := &runtimeapi.ContainerEventResponse{
		ContainerId:        event.ID,
		ContainerEventType: event.Type,
		CreatedAt:          event.At.UnixNano(),
	}
	if event.Pod != nil {
		resp.PodSandboxStatus = podStatus(event.Pod)
	}
	for _, c := range slices.Backward(event.Containers) { // newest first, as in containerStatuses
		resp.ContainersStatuses = append(resp.ContainersStatuses, s.containerStatus(c))
	}
	return resp
}
