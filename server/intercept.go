package server

import (
	"context"
	"errors"
	"log/slog"
	"path"
	"runtime/debug"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/sandbox/state"
	"berth/server/admin"
)

// unary wraps every unary RPC.
func (s *Server) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo,
	handler grpc.UnaryHandler) (resp any, err error) {
	began := time.Now()
	ctx, traced := s.beginTrace(ctx, info.FullMethod)
	named := s.namesIn(req) // before the object may be removed
	defer func() {
		if p := recover(); p != nil {
			resp, err = nil, s.panicked(info.FullMethod, p)
		}
		call := call{method: info.FullMethod, failed: err, attrs: slices.Concat(ids(req), ids(resp), named.Attrs())}
		switch req.(type) {
		// Kubelet reads the beginning of a pull's error.
		case *runtimeapi.PullImageRequest, *runtimeapi.PullSecurityProfileRequest:
		default:
			err = named.Explain(err)
		}
		err = coded(err)
		s.endTrace(traced, info.FullMethod, req, resp, err)
		call.took = time.Since(began)
		s.observe(info.FullMethod, false, err, call.took)
		s.logCall(ctx, call)
	}()
	if !s.requests.TryAcquire(1) {
		refuse(ctx)
		return nil, errdefs.Unavailable("berth is stopping")
	}
	defer s.requests.Release(1)
	if s.changing != nil && changing[info.FullMethod] {
		defer s.changing()()
	}
	if age, waits := waiting[info.FullMethod]; waits {
		resp, err = s.untilStop(ctx, age, req, handler)
	} else {
		resp, err = handler(ctx, req)
	}
	failpoint.Reach("server.answer")
	return resp, err
}

// waiting are methods that may take minutes, with the age at which a stop cuts a call. Until the
// stop has ended and the next daemon serves, no request is answered. Stops, pulls and removals
// continue when the client repeats them. A removal that only waits for free space succeeds. The
// command of an ExecSync is killed, so one that has just begun, as probes do every second, may
// still end.
var waiting = map[string]time.Duration{
	runtimeapi.RuntimeService_StopContainer_FullMethodName:   0,
	runtimeapi.ImageService_PullImage_FullMethodName:         0,
	runtimeapi.RuntimeService_RemoveContainer_FullMethodName: 0,
	runtimeapi.ImageService_RemoveImage_FullMethodName:       0,
	runtimeapi.RuntimeService_ExecSync_FullMethodName:        250 * time.Millisecond,
}

// untilStop calls a handler. When the server stops, it cancels the handler's context, but not before
// the call has some age. A method without age is then refused, because it continues when the client
// repeats it.
func (s *Server) untilStop(ctx context.Context, age time.Duration, req any, handler grpc.UnaryHandler) (any, error) {
	cut, cancel := context.WithCancel(ctx)
	defer cancel()
	began := time.Now()
	defer context.AfterFunc(s.stopping, func() {
		select {
		case <-cut.Done():
		case <-time.After(age - time.Since(began)):
			cancel()
		}
	})()
	resp, err := handler(cut, req)
	if err != nil && s.stopping.Err() != nil {
		if age == 0 {
			refuse(ctx)
		}
		err = errdefs.Unavailable("berth is stopping: %w", err)
	}
	return resp, err
}

// changing are the methods that create, start, stop or remove objects.
var changing = map[string]bool{
	runtimeapi.RuntimeService_RunPodSandbox_FullMethodName:    true,
	runtimeapi.RuntimeService_StopPodSandbox_FullMethodName:   true,
	runtimeapi.RuntimeService_RemovePodSandbox_FullMethodName: true,
	runtimeapi.RuntimeService_CreateContainer_FullMethodName:  true,
	runtimeapi.RuntimeService_StartContainer_FullMethodName:   true,
	runtimeapi.RuntimeService_StopContainer_FullMethodName:    true,
	runtimeapi.RuntimeService_RemoveContainer_FullMethodName:  true,
	runtimeapi.ImageService_PullImage_FullMethodName:          true,
	runtimeapi.ImageService_RemoveImage_FullMethodName:        true,
	admin.TagMethod:   true,
	admin.UntagMethod: true,
}

// stream wraps every streaming RPC.
func (s *Server) stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo,
	handler grpc.StreamHandler) (err error) {
	began := time.Now()
	defer func() {
		if p := recover(); p != nil {
			err = s.panicked(info.FullMethod, p)
		}
		call := call{method: info.FullMethod, failed: err, took: time.Since(began)}
		err = coded(err)
		s.observe(info.FullMethod, true, err, call.took)
		s.logCall(ss.Context(), call)
	}()
	return handler(srv, ss)
}

// panicked logs a panic with its stack and returns the client's error. Call it from the deferred
// function that recovered, so that the stack is complete.
func (s *Server) panicked(method string, p any) error {
	s.log.Error("panic", "method", path.Base(method), "panic", p, "stack", string(debug.Stack()))
	return status.Errorf(codes.Internal, "%s: internal error, see berth's log", path.Base(method))
}

// coded converts err to a gRPC status with err's full text. It keeps the code of err, of a context
// error, or of a missing feature. Otherwise the code is Unknown.
func coded(err error) error {
	if err == nil {
		return nil
	}
	err = errdefs.Scarce(err)
	st, ok := status.FromError(err)
	if !ok {
		st = status.New(errdefs.Code(err), err.Error())
	}
	return st.Err()
}

// levelOf returns the log level of an RPC with this result: warning for errors that concern
// operators, otherwise debug.
func levelOf(err error) slog.Level {
	switch status.Code(coded(err)) {
	case codes.OK, codes.NotFound, codes.Canceled, codes.Unimplemented:
		return slog.LevelDebug
	}
	if errdefs.IsSuperseded(err) {
		return slog.LevelDebug
	}
	return slog.LevelWarn
}

// call is one RPC that has ended.
type call struct {
	method string
	took   time.Duration
	failed error // as the handler returned it
	attrs  []slog.Attr
}

// logCall logs one RPC.
func (s *Server) logCall(ctx context.Context, c call) {
	level := levelOf(c.failed)
	if !s.log.Enabled(ctx, level) {
		return
	}
	err := coded(c.failed)
	code := status.Code(err)
	if errors.Is(c.failed, crierrors.ErrRegistryUnavailable) {
		code = codes.Unavailable // kubelet expects Unknown
	}
	attrs := append(c.attrs, slog.Duration("took", c.took), slog.String("code", code.String()))
	if info, ok := clientOf(ctx); ok {
		attrs = append(attrs, slog.Int("peer", int(info.pid)))
	}
	if err != nil {
		attrs = append(attrs, slog.String("error", status.Convert(err).Message()))
	}
	s.log.LogAttrs(ctx, level, path.Base(c.method), attrs...)
}

// namesIn returns the names of the container or pod that a request concerns.
func (s *Server) namesIn(req any) state.Names {
	var names state.Names
	if s.names == nil {
		return names
	}
	if m, ok := req.(interface{ GetPodSandboxId() string }); ok {
		names, _ = s.names(m.GetPodSandboxId())
	}
	if m, ok := req.(interface{ GetContainerId() string }); ok {
		names, _ = s.names(m.GetContainerId())
	}
	switch m := req.(type) {
	case interface {
		GetConfig() *runtimeapi.PodSandboxConfig
	}:
		names = state.NamesOf(m.GetConfig().GetMetadata(), nil)
	case interface {
		GetSandboxConfig() *runtimeapi.PodSandboxConfig
	}: // also of a container
		if own := m.GetSandboxConfig().GetMetadata(); own != nil {
			names = state.NamesOf(own, nil)
		}
	}
	if m, ok := req.(*runtimeapi.CreateContainerRequest); ok {
		names.Container = errdefs.Clip(m.GetConfig().GetMetadata().GetName())
	}
	return names
}

// ids returns the IDs in a message as log fields. Other fields are never logged.
func ids(msg any) []slog.Attr {
	var attrs []slog.Attr
	add := func(key, value string) {
		if value != "" {
			attrs = append(attrs, slog.String(key, value))
		}
	}
	if m, ok := msg.(interface{ GetPodSandboxId() string }); ok {
		add("pod", m.GetPodSandboxId())
	}
	if m, ok := msg.(interface{ GetContainerId() string }); ok {
		add("container", m.GetContainerId())
	}
	if m, ok := msg.(interface{ GetImage() *runtimeapi.ImageSpec }); ok {
		add("image", m.GetImage().GetImage())
	}
	return attrs
}
