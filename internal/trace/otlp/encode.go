package otlp

import (
	"encoding/binary"
	"math/rand/v2"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"

	"berth/internal/trace"
)

// The numbers are those of opentelemetry/proto/collector/trace/v1/trace_service.proto, trace/v1/trace.proto, resource/v1/resource.proto and
// common/v1/common.proto, in which fields only ever come to.
const (
	requestResourceSpans = 1

	resourceSpansResource = 1
	resourceSpansScopes   = 2
	resourceAttributes    = 1

	scopeSpansScope = 1
	scopeSpansSpans = 2
	scopeName       = 1
	scopeVersion    = 2

	spanTraceID    = 1
	spanID         = 2
	spanParentID   = 4
	spanName       = 5
	spanKind       = 6
	spanBegan      = 7
	spanEnded      = 8
	spanAttributes = 9
	spanStatus     = 15
	spanFlags      = 16
	kindInternal   = 1
	kindServer     = 2

	statusCode  = 3
	statusError = 2

	keyValueKey   = 1
	keyValueValue = 2
	valueString   = 1

	responsePartial = 1
	partialRejected = 1
	partialMessage  = 2
)

// flagSampled is W3C's trace flag; flagRemote of OTLP says that it is known whether the parent is another process's, and that it is.
const (
	flagSampled   = 1
	flagHasRemote = 1 << 8
	flagRemote    = 1 << 9
)

func appendBytes(b []byte, field protowire.Number, value []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(b, field, protowire.BytesType), value)
}

// appendText makes valid UTF-8 of any text: collectors refuse a whole request otherwise.
func appendText(b []byte, field protowire.Number, value string) []byte {
	return protowire.AppendString(protowire.AppendTag(b, field, protowire.BytesType), strings.ToValidUTF8(value, "\ufffd"))
}

func appendVarint(b []byte, field protowire.Number, value uint64) []byte {
	return protowire.AppendVarint(protowire.AppendTag(b, field, protowire.VarintType), value)
}

func appendTime(b []byte, field protowire.Number, nanoseconds int64) []byte {
	return protowire.AppendFixed64(protowire.AppendTag(b, field, protowire.Fixed64Type), uint64(nanoseconds))
}

func appendAttribute(b []byte, field protowire.Number, key, value string) []byte {
	pair := appendText(nil, keyValueKey, key)
	pair = appendBytes(pair, keyValueValue, appendText(nil, valueString, value))
	return appendBytes(b, field, pair)
}

// encodeResource says who sends.
func encodeResource(cfg Config) []byte {
	b := appendAttribute(nil, resourceAttributes, "service.name", "berth")
	b = appendAttribute(b, resourceAttributes, "service.version", cfg.Version)
	if cfg.Host != "" {
		b = appendAttribute(b, resourceAttributes, "host.name", cfg.Host)
	}
	return b
}

// encodeRequest is an ExportTraceServiceRequest of these traces.
func encodeRequest(resource []byte, version string, batch []*trace.Trace) (request []byte, spans int) {
	scope := appendText(appendText(nil, scopeName, "berth"), scopeVersion, version)
	scoped := appendBytes(nil, scopeSpansScope, scope)
	for _, t := range batch {
		var n int
		scoped, n = appendTrace(scoped, t)
		spans += n
	}
	all := appendBytes(nil, resourceSpansResource, resource)
	all = appendBytes(all, resourceSpansScopes, scoped)
	return appendBytes(nil, requestResourceSpans, all), spans
}

// appendTrace appends the spans of an operation. What asked for it is the parent of the first; where nothing did, the trace is new.
func appendTrace(b []byte, t *trace.Trace) (_ []byte, spans int) {
	traceID := t.Remote.TraceID
	if !t.Remote.Valid() {
		binary.BigEndian.PutUint64(traceID[:8], rand.Uint64())
		binary.BigEndian.PutUint64(traceID[8:], rand.Uint64()|1) // not zero
	}
	parts, _ := t.Parts()
	ids := make([][8]byte, len(parts))
	for i, p := range parts {
		binary.BigEndian.PutUint64(ids[i][:], rand.Uint64()|1)
		span := appendBytes(nil, spanTraceID, traceID[:])
		span = appendBytes(span, spanID, ids[i][:])
		flags, kind := uint32(flagSampled|flagHasRemote), uint64(kindInternal)
		switch {
		case p.Parent >= 0:
			span = appendBytes(span, spanParentID, ids[p.Parent][:])
		case t.Remote.Valid():
			span = appendBytes(span, spanParentID, t.Remote.SpanID[:])
			flags |= flagRemote
		}
		if i == 0 {
			kind = kindServer
		}
		span = appendText(span, spanName, p.Name)
		span = appendVarint(span, spanKind, kind)
		span = appendTime(span, spanBegan, t.Began().UnixNano()+p.Began)
		span = appendTime(span, spanEnded, t.Began().UnixNano()+p.Ended)
		if i == 0 {
			span = appendOperation(span, t)
		}
		span = protowire.AppendFixed32(protowire.AppendTag(span, spanFlags, protowire.Fixed32Type), flags)
		b = appendBytes(b, scopeSpansSpans, span)
	}
	return b, len(parts)
}

// appendOperation appends what is known of the operation itself.
func appendOperation(span []byte, t *trace.Trace) []byte {
	for _, a := range t.Attributes {
		span = appendAttribute(span, spanAttributes, a.Key, a.Value)
	}
	if _, failed := t.Failure(); failed { // why is not sent: it may tell more of the request
		span = appendBytes(span, spanStatus, appendVarint(nil, statusCode, statusError))
	}
	return span
}

// refusal is what an ExportTraceServiceResponse says that was not taken: those spans are lost, and sending them again is of no use.
func refusal(answer []byte) error {
	partial, ok := field(answer, responsePartial, protowire.BytesType)
	if !ok {
		return nil
	}
	rejected, ok := field(partial, partialRejected, protowire.VarintType)
	if n, _ := protowire.ConsumeVarint(rejected); !ok || n == 0 {
		return nil // a message alone is a hint
	}
	n, _ := protowire.ConsumeVarint(rejected)
	message, _ := field(partial, partialMessage, protowire.BytesType)
	return status.Errorf(codes.InvalidArgument, "the collector has refused %d spans: %.200q", n, message)
}

// field returns the content of the first field of that number and type; false if there is none, also where the message can't be read.
func field(message []byte, number protowire.Number, kind protowire.Type) ([]byte, bool) {
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
