package admin

import (
	"context"

	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/sandbox/stream"
)

const containers = "berth.admin.v1.Containers"

// ExecMethod is the full name of Exec: ExecRequest to ExecReply. It is CRI's Exec with options.
const ExecMethod = "/" + containers + "/Exec"

// ExecRequest has the fields of CRI's ExecRequest and options.
type ExecRequest struct {
	ContainerID string             `json:"containerID"`
	Args        []string           `json:"args"`
	TTY         bool               `json:"tty,omitempty"`
	Stdin       bool               `json:"stdin,omitempty"`
	Stdout      bool               `json:"stdout,omitempty"`
	Stderr      bool               `json:"stderr,omitempty"`
	Options     stream.ExecOptions `json:"options"`
}

// ExecReply has the URL of the session.
type ExecReply struct {
	URL string `json:"url"`
}

// Execs starts sessions of commands. The server's implementation checks the request as CRI's Exec
// does.
type Execs interface {
	ExecWith(*runtimeapi.ExecRequest, stream.ExecOptions) (*runtimeapi.ExecResponse, error)
}

// RegisterContainers adds the service for containers to a gRPC server.
func RegisterContainers(s grpc.ServiceRegistrar, execs Execs) {
	s.RegisterService(&grpc.ServiceDesc{
		ServiceName: containers,
		HandlerType: (*Execs)(nil),
		Methods: []grpc.MethodDesc{unary(containers, "Exec", func(_ context.Context, s Execs, req ExecRequest) (any, error) {
			reply, err := s.ExecWith(&runtimeapi.ExecRequest{ContainerId: req.ContainerID, Cmd: req.Args, Tty: req.TTY,
				Stdin: req.Stdin, Stdout: req.Stdout, Stderr: req.Stderr}, req.Options)
			if err != nil {
				return nil, err
			}
			return ExecReply{URL: reply.GetUrl()}, nil
		})},
	}, execs)
}
