package admin

import (
	"context"

	"google.golang.org/grpc"

	"berth/sandbox/history"
)

const starts = "berth.admin.v1.Starts"

// Full names of the methods.
const (
	StartsMethod = "/" + starts + "/List" // nothing to a list of history.Summary, newest first
	StartMethod  = "/" + starts + "/Get"  // StartRequest to history.Start
)

// StartRequest names the pod of a start.
type StartRequest struct {
	PodID string `json:"podID"`
}

// Starts is the part of the sandbox manager that the service uses.
type Starts interface {
	// Starts returns the last pod starts, newest first.
	Starts() []history.Summary
	// Start returns the start of the pod with that ID, or NotFound.
	Start(podID string) (history.Start, error)
}

// RegisterStarts adds the service for traces of pod starts to a gRPC server.
func RegisterStarts(s grpc.ServiceRegistrar, kept Starts) {
	s.RegisterService(&grpc.ServiceDesc{
		ServiceName: starts,
		HandlerType: (*Starts)(nil),
		Methods: []grpc.MethodDesc{
			unary(starts, "List", func(_ context.Context, s Starts, _ struct{}) (any, error) { return s.Starts(), nil }),
			unary(starts, "Get", func(_ context.Context, s Starts, req StartRequest) (any, error) {
				return s.Start(req.PodID)
			}),
		},
	}, kept)
}
