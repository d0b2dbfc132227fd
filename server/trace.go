package server

import (
	"context"
	"path"
	"strconv"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/trace"
	"berth/internal/trace/otlp"
)

// Traces is what the server needs to show where the time of a pod's start went.
type Traces interface {
	// StartOf returns the operations that started a pod: its own and those of its containers, in order of time. Those of an
	// earlier daemon are not known any more.
	StartOf(podID string) []trace.Operation
}

// Tracing decides what is exported, and exports it.
type Tracing interface {
	// Sample tells whether an operation is to be exported, given what asks for it.
	Sample(asking trace.Remote) bool
	// Export takes over a trace that is complete. It does not block.
	Export(*trace.Trace)
	// Info tells, for verbose Status, what became of them.
	Info() otlp.Info
}

// ofStart are the methods whose time is recorded always, whether it is exported or not.
var ofStart = map[string]bool{
	runtimeapi.RuntimeService_RunPodSandbox_FullMethodName:   true,
	runtimeapi.RuntimeService_CreateContainer_FullMethodName: true,
	runtimeapi.RuntimeService_StartContainer_FullMethodName:  true,
}

// beginTrace begins to record an RPC, if its time is recorded: the trace is nil if not.
func (s *Server) beginTrace(ctx context.Context, method string) (context.Context, *trace.Trace) {
	var remote trace.Remote
	var done func(*trace.Trace)
	if s.tracing != nil {
		if remote = remoteOf(ctx); s.tracing.Sample(remote) {
			done = s.tracing.Export
		}
	}
	if done == nil && !ofStart[method] {
		return ctx, nil
	}
	ctx, t := trace.Start(ctx, path.Base(method), done)
	t.Remote = remote
	return ctx, t
}

// remoteOf is the span of kubelet's that the request says it is part of.
func remoteOf(ctx context.Context) trace.Remote {
	if values := metadata.ValueFromIncomingContext(ctx, "traceparent"); len(values) == 1 {
		return trace.ParseRemote(values[0])
	}
	return trace.Remote{}
}

// endTrace ends the record of an RPC that is answered so.
func (s *Server) endTrace(t *trace.Trace, method string, req, resp any, err error) {
	if t == nil {
		return
	}
	if t.Exported() {
		t.Attributes = traceAttributes(method, req, resp, status.Code(err))
	}
	if err != nil {
		t.Fail(status.Convert(err).Message())
	}
	t.End()
}

// traceAttributes name what an RPC was about, in the words of OpenTelemetry's semantic conventions. Like the log they tell IDs and names and nothing else.
func traceAttributes(method string, req, resp any, code codes.Code) []trace.Attribute {
	all := []trace.Attribute{
		{Key: "rpc.system", Value: "grpc"},
		{Key: "rpc.service", Value: path.Base(path.Dir(method))},
		{Key: "rpc.method", Value: path.Base(method)},
		{Key: "rpc.grpc.status_code", Value: strconv.Itoa(int(code))},
	}
	add := func(key, value string) {
		if value != "" {
			all = append(all, trace.Attribute{Key: key, Value: value})
		}
	}
	pod := func(m *runtimeapi.PodSandboxMetadata) {
		add("k8s.pod.name", m.GetName())
		add("k8s.namespace.name", m.GetNamespace())
		add("k8s.pod.uid", m.GetUid())
	}
	switch req := req.(type) {
	case *runtimeapi.RunPodSandboxRequest:
		pod(req.GetConfig().GetMetadata())
	case *runtimeapi.CreateContainerRequest:
		pod(req.GetSandboxConfig().GetMetadata())
		add("k8s.container.name", req.GetConfig().GetMetadata().GetName())
		add("container.image.name", req.GetConfig().GetImage().GetImage())
	case *runtimeapi.PullImageRequest:
		pod(req.GetSandboxConfig().GetMetadata())
		add("container.image.name", req.GetImage().GetImage())
	}
	for _, message := range []any{req, resp} {
		if m, ok := message.(interface{ GetPodSandboxId() string }); ok {
			add("berth.pod.id", m.GetPodSandboxId())
		}
		if m, ok := message.(interface{ GetContainerId() string }); ok {
			add("container.id", m.GetContainerId())
		}
	}
	return all
}
