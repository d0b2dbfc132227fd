package server

import (
	"context"
	"log/slog"
	"path"
	"runtime/debug"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/server/admin"
)

// unary wraps every unary RPC.
func (s *Server) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo,
	handler grpc.UnaryHandler) (resp any, err error) {
	began := time.Now()
	ctx, traced := s.beginTrace(ctx, info.FullMethod)
	defer func() {
		if p := recover(); p != nil {
			resp, err = nil, s.panicked(info.FullMethod, p)
		}
		level := levelOf(err)
		err = coded(err)
		s.endTrace(traced, info.FullMethod, req, resp, err)
		took := time.Since(began)
		s.observe(info.FullMethod, false, err, took)
		s.logCall(ctx, level, info.FullMethod, took, err, append(ids(req), ids(resp)...))
	}()
	if !s.requests.TryAcquire(1) {
		return nil, errdefs.Unavailable("berth is stopping")
	}
	defer s.requests.Release(1)
	if s.changing != nil && changing[info.FullMethod] {
		defer s.changing()()
	}
	resp, err = handler(ctx, req)
	failpoint.Reach("server.answer")
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
		level := levelOf(err)
		err = coded(err)
		took := time.Since(began)
		s.observe(info.FullMethod, true, err, took)
		s.logCall(ss.Context(), level, info.FullMethod, took, err, nil)
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
		st = status.FromContextError(err)
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

// logCall logs one RPC.
func (s *Server) logCall(ctx context.Context, level slog.Level, method string, took time.Duration, err error,
	attrs []slog.Attr) {
	if !s.log.Enabled(ctx, level) {
		return
	}
	code := status.Code(err)
	attrs = append(attrs, slog.Duration("took", took), slog.String("code", code.String()))
	if p, ok := peer.FromContext(ctx); ok {
		if info, ok := p.AuthInfo.(peerInfo); ok {
			attrs = append(attrs, slog.Int("peer", int(info.pid)))
		}
	}
	if err != nil {
		attrs = append(attrs, slog.String("error", status.Convert(err).Message()))
	}
	s.log.LogAttrs(ctx, level, path.Base(method), attrs...)
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
