package server

import (
	"path"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"berth/internal/trace"
)

// Observer receives measurements of RPCs, for example to export them as metrics. Its methods must
// not block.
type Observer interface {
	// Answered reports a finished RPC. method has no service name. Streaming RPCs are reported
	// when they end.
	Answered(method string, streaming bool, code codes.Code, took time.Duration)
	// Traced reports the spans of a successful RPC that is part of a pod's start, the RPC itself
	// first. Spans of steps that continue after the answer are open.
	Traced(method string, spans []trace.Part)
}

// observe reports a finished RPC to the observer.
func (s *Server) observe(method string, streaming bool, err error, took time.Duration) {
	if s.observer != nil {
		s.observer.Answered(path.Base(method), streaming, status.Code(err), took)
	}
}

// observeTrace reports the trace of a finished RPC to the observer. It must run before the trace
// ends, because reading a packed trace allocates every name.
func (s *Server) observeTrace(method string, t *trace.Trace, err error) {
	if s.observer == nil || err != nil || !ofStart[method] {
		return
	}
	parts, _ := t.Parts()
	s.observer.Traced(path.Base(method), parts)
}
