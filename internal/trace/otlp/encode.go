package otlp

import (
	"encoding/binary"
	"math/rand/v2"
	"strings"

	common "go.opentelemetry.io/proto/otlp/common/v1"
	resource "go.opentelemetry.io/proto/otlp/resource/v1"
	tracev1 "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"berth/internal/trace"
)

// flagSampled is the trace flag of W3C Trace Context.
const flagSampled = 1

// validText replaces invalid UTF-8, because collectors refuse a whole request that contains it.
func validText(s string) string { return strings.ToValidUTF8(s, "\ufffd") }

func attribute(key, value string) *common.KeyValue {
	return &common.KeyValue{
		Key:   validText(key),
		Value: &common.AnyValue{Value: &common.AnyValue_StringValue{StringValue: validText(value)}},
	}
}

// describeSender returns the resource of all spans, which is this daemon.
func describeSender(cfg Config) *resource.Resource {
	r := &resource.Resource{
		Attributes: []*common.KeyValue{attribute("service.name", "berth"), attribute("service.version", cfg.Version)},
	}
	if cfg.Host != "" {
		r.Attributes = append(r.Attributes, attribute("host.name", cfg.Host))
	}
	return r
}

// encodeRequest returns an ExportTraceServiceRequest with these traces, and the number of its
// spans. It uses TracesData, which has the same encoding by definition, because the request's Go
// package imports a REST gateway.
func encodeRequest(sender *resource.Resource, version string,
	batch []*trace.Trace) (request []byte, spans int, err error) {
	scoped := &tracev1.ScopeSpans{Scope: &common.InstrumentationScope{Name: "berth", Version: version}}
	for _, t := range batch {
		scoped.Spans = append(scoped.Spans, spansOf(t)...)
	}
	request, err = proto.Marshal(&tracev1.TracesData{ResourceSpans: []*tracev1.ResourceSpans{
		{Resource: sender, ScopeSpans: []*tracev1.ScopeSpans{scoped}},
	}})
	return request, len(scoped.Spans), err
}

// spansOf returns the spans of an operation. The client's span is the parent of the first one.
// If there is no client's span, the spans form a new trace.
func spansOf(t *trace.Trace) []*tracev1.Span {
	traceID := t.Remote.TraceID
	if !t.Remote.Valid() {
		copy(traceID[:8], randomID())
		copy(traceID[8:], randomID())
	}
	parts, _ := t.Parts()
	spans := make([]*tracev1.Span, len(parts))
	began := t.Began().UnixNano()
	for i, p := range parts {
		s := &tracev1.Span{
			TraceId: traceID[:], SpanId: randomID(), Name: validText(p.Name), Kind: tracev1.Span_SPAN_KIND_INTERNAL,
			StartTimeUnixNano: uint64(began + p.Began), EndTimeUnixNano: uint64(began + p.Ended),
			Flags: flagSampled | uint32(tracev1.SpanFlags_SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK),
		}
		switch {
		case p.Parent >= 0:
			s.ParentSpanId = spans[p.Parent].SpanId
		case t.Remote.Valid():
			s.ParentSpanId = t.Remote.SpanID[:]
			s.Flags |= uint32(tracev1.SpanFlags_SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK)
		}
		if i == 0 {
			describeOperation(s, t)
		}
		spans[i] = s
	}
	return spans
}

// randomID returns eight random bytes that are not all zero.
func randomID() []byte { return binary.BigEndian.AppendUint64(nil, rand.Uint64()|1) }

// describeOperation adds the operation's attributes and result to its first span. It omits the text
// of a failure, because the text may contain details of the request.
func describeOperation(s *tracev1.Span, t *trace.Trace) {
	s.Kind = tracev1.Span_SPAN_KIND_SERVER
	for _, a := range t.Attributes {
		s.Attributes = append(s.Attributes, attribute(a.Key, a.Value))
	}
	if _, failed := t.Failure(); failed {
		s.Status = &tracev1.Status{Code: tracev1.Status_STATUS_CODE_ERROR}
	}
}

// Field numbers of ExportTraceServiceResponse and of its message ExportTracePartialSuccess.
const (
	responsePartial = 1
	partialRejected = 1
	partialMessage  = 2
)

// refusal returns an error if an ExportTraceServiceResponse reports rejected spans. A retry would
// not help. The response is parsed by hand, because the message's Go package imports a REST
// gateway.
func refusal(answer []byte) error {
	partial, ok := field(answer, responsePartial, protowire.BytesType)
	if !ok {
		return nil
	}
	rejected, ok := field(partial, partialRejected, protowire.VarintType)
	n, _ := protowire.ConsumeVarint(rejected)
	if !ok || n == 0 {
		return nil // if no span was rejected, the message is only a warning
	}
	message, _ := field(partial, partialMessage, protowire.BytesType)
	return status.Errorf(codes.InvalidArgument, "the collector refused %d spans: %.200q", n, message)
}

// field returns the content of the first field with a number and type. ok is false if the message
// has no such field or is malformed.
func field(message []byte, number protowire.Number, kind protowire.Type) (value []byte, ok bool) {
	for len(message) > 0 {
		n, t, length := protowire.ConsumeTag(message)
		if length < 0 {
			return nil, false
		}
		message = message[length:]
		length = protowire.ConsumeFieldValue(n, t, message)
		if length < 0 {
			return nil, false
		}
		value := message[:length]
		if n == number && t == kind {
			if kind == protowire.BytesType {
				value, _ = protowire.ConsumeBytes(value)
			}
			return value, true
		}
		message = message[length:]
	}
	return nil, false
}
