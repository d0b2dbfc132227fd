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
	"berth/server/admin"
)

// Traces returns the recorded operations of pod starts.
type Traces interface {
	// StartOf returns the operations that started a pod and its containers, in order of time.
	// Operations of an earlier daemon are missing.
	StartOf(podID string) []trace.Operation
	// RecordPull adds the trace of an image pull, which may still run, to a pod's start.
	RecordPull(pod *runtimeapi.PodSandboxMetadata, image string, t *trace.Trace)
	admin.Starts
}

// Tracing selects and exports traces.
type Tracing interface {
	// Sample reports whether an operation is exported, given its remote parent.
	Sample(asking trace.Remote) bool
	// Export takes ownership of a complete trace. It does not block.
	Export(*trace.Trace)
	// Info returns statistics of the export for verbose Status.
	Info() otlp.Info
}

// ofStart are the methods that start a pod. They and pulls are always recorded, whether exported or
// not.
var ofStart = map[string]bool{
	runtimeapi.RuntimeService_RunPodSandbox_FullMethodName:   true,
	runtimeapi.RuntimeService_CreateContainer_FullMethodName: true,
	runtimeapi.RuntimeService_StartContainer_FullMethodName:  true,
}

// beginTrace starts to record an RPC. The trace is nil if the RPC is not recorded.
func (s *Server) beginTrace(ctx context.Context, method string) (context.Context, *trace.Trace) {
	var remote trace.Remote
	var done func(*trace.Trace)
	if s.tracing != nil {
		if remote = remoteOf(ctx); s.tracing.Sample(remote) {
			done = s.tracing.Export
		}
	}
	isPull := method == runtimeapi.ImageService_PullImage_FullMethodName
	if done == nil && !ofStart[method] && !isPull {
		return ctx, nil
	}
	begin := trace.Start
	if isPull {
		begin = trace.StartLarge
	}
	ctx, t := begin(ctx, path.Base(method), done)
	t.Remote = remote
	return ctx, t
}

// remoteOf returns the parent span that kubelet sends with the request.
func remoteOf(ctx context.Context) trace.Remote {
	if values := metadata.ValueFromIncomingContext(ctx, "traceparent"); len(values) == 1 {
		return trace.ParseRemote(values[0])
	}
	return trace.Remote{}
}

// endTrace ends the record of an RPC with its answer.
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
	s.observeTrace(method, t, err)
	t.End()
}

// traceAttributes returns an RPC's subject in OpenTelemetry's semantic conventions. Like the log it
// contains only IDs and names.
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
