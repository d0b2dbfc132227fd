package server

import (
	"context"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/sandbox/stream"
)

// Reachable checks whether a session is possible. Package sandbox documents the contracts.
type Reachable interface {
	CheckExec(id string, command []string) (string, error)
	CheckAttach(id string, terminal bool) (string, error)
	CheckPortForward(podID string) (string, error)
}

// Sessions issues URLs. Package server/sessions documents the contracts.
type Sessions interface {
	ExecWith(req *runtimeapi.ExecRequest, options stream.ExecOptions) (string, error)
	Attach(req *runtimeapi.AttachRequest) (string, error)
	PortForward(req *runtimeapi.PortForwardRequest) (string, error)
}

// Exec implements RuntimeService.
func (s *runtimeService) Exec(_ context.Context, req *runtimeapi.ExecRequest) (*runtimeapi.ExecResponse, error) {
	return s.ExecWith(req, stream.ExecOptions{})
}

// ExecWith is Exec with options that CRI lacks.
func (s *runtimeService) ExecWith(req *runtimeapi.ExecRequest,
	options stream.ExecOptions) (*runtimeapi.ExecResponse, error) {
	if err := need(
		field{"container_id", req.GetContainerId() != ""},
		field{"cmd", len(req.GetCmd()) > 0},
	); err != nil {
		return nil, err
	}
	if err := checkStreams(req); err != nil {
		return nil, err
	}
	if err := options.Check(); err != nil {
		return nil, err
	}
	id, err := s.pods.CheckExec(req.GetContainerId(), req.GetCmd())
	if err != nil {
		return nil, err
	}
	url, err := s.cfg.Sessions.ExecWith(&runtimeapi.ExecRequest{ContainerId: id, Cmd: req.GetCmd(),
		Tty: req.GetTty(), Stdin: req.GetStdin(), Stdout: req.GetStdout(), Stderr: req.GetStderr()}, options)
	if err != nil {
		return nil, err
	}
	return &runtimeapi.ExecResponse{Url: url}, nil
}

// Attach implements RuntimeService.
func (s *runtimeService) Attach(_ context.Context, req *runtimeapi.AttachRequest) (*runtimeapi.AttachResponse, error) {
	if err := need(field{"container_id", req.GetContainerId() != ""}); err != nil {
		return nil, err
	}
	if err := checkStreams(req); err != nil {
		return nil, err
	}
	id, err := s.pods.CheckAttach(req.GetContainerId(), req.GetTty())
	if err != nil {
		return nil, err
	}
	url, err := s.cfg.Sessions.Attach(&runtimeapi.AttachRequest{ContainerId: id,
		Tty: req.GetTty(), Stdin: req.GetStdin(), Stdout: req.GetStdout(), Stderr: req.GetStderr()})
	if err != nil {
		return nil, err
	}
	return &runtimeapi.AttachResponse{Url: url}, nil
}

// checkStreams refuses combinations of streams that the API forbids.
func checkStreams(req interface {
	GetTty() bool
	GetStdin() bool
	GetStdout() bool
	GetStderr() bool
}) error {
	if !req.GetStdin() && !req.GetStdout() && !req.GetStderr() {
		return errdefs.InvalidArgument("one of stdin, stdout and stderr must be true")
	}
	if req.GetTty() && req.GetStderr() {
		return errdefs.InvalidArgument("tty and stderr cannot both be true, because a terminal has one output")
	}
	return nil
}

// PortForward implements RuntimeService. The request's ports are for WebSocket clients. SPDY
// clients name the port in each stream.
func (s *runtimeService) PortForward(_ context.Context,
	req *runtimeapi.PortForwardRequest) (*runtimeapi.PortForwardResponse, error) {
	if err := need(field{"pod_sandbox_id", req.GetPodSandboxId() != ""}); err != nil {
		return nil, err
	}
	if len(req.GetPort()) > maxPorts {
		return nil, errdefs.InvalidArgument("port: %d ports are too many for one session", len(req.GetPort()))
	}
	for _, port := range req.GetPort() {
		if port < 1 || port > 65535 {
			return nil, errdefs.InvalidArgument("port: %d is not between 1 and 65535", port)
		}
	}
	id, err := s.pods.CheckPortForward(req.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	url, err := s.cfg.Sessions.PortForward(&runtimeapi.PortForwardRequest{PodSandboxId: id, Port: req.GetPort()})
	if err != nil {
		return nil, err
	}
	return &runtimeapi.PortForwardResponse{Url: url}, nil
}

// maxPorts bounds the ports of one WebSocket. Each port needs two channels, and a channel's number
// is one byte.
const maxPorts = 127
