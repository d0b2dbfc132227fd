package server

import (
	"context"
	"fmt"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/sandbox/state"
)

// encoded is an encoded answer in immutable parts. Handlers may return it instead of a message.
type encoded mem.BufferSlice

// codec is gRPC's codec, except that it passes encoded answers to the transport unchanged. The
// transport copies them once, into the socket's buffer. gRPC would first copy a message into a
// buffer of its size. Above 32 KiB that is a buffer of 1 MiB from the pool.
type codec struct{ encoding.CodecV2 }

// newCodec returns the server's codec. Clients use protobuf's codec, the only one in CRI.
func newCodec() codec { return codec{encoding.GetCodecV2("proto")} }

// Marshal implements encoding.CodecV2.
func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	if answer, ok := v.(encoded); ok {
		return mem.BufferSlice(answer), nil
	}
	return c.CodecV2.Marshal(v)
}

// encodedLists are the methods of RuntimeService with encoded answers.
var encodedLists = map[string]grpc.MethodHandler{
	"ListContainers": encodedList((*runtimeService).listContainers,
		runtimeapi.RuntimeService_ListContainers_FullMethodName),
	"ListPodSandbox": encodedList((*runtimeService).listPodSandbox,
		runtimeapi.RuntimeService_ListPodSandbox_FullMethodName),
}

// runtimeServiceDesc is RuntimeService with encodedLists.
func runtimeServiceDesc() *grpc.ServiceDesc {
	desc := runtimeapi.RuntimeService_ServiceDesc
	desc.Methods = slices.Clone(desc.Methods)
	for i, method := range desc.Methods {
		if handler, ok := encodedLists[method.MethodName]; ok {
			desc.Methods[i].Handler = handler
		}
	}
	return &desc
}

// encodedList is the handler that protoc-gen-go-grpc generates for a unary method, except for the
// type of the answer.
func encodedList[Request any](list func(*runtimeService, *Request) (encoded, error),
	fullMethod string) grpc.MethodHandler {
	return func(
		srv any, ctx context.Context, decode func(any) error, interceptor grpc.UnaryServerInterceptor,
	) (any, error) {
		req := new(Request)
		if err := decode(req); err != nil {
			return nil, err
		}
		handler := func(_ context.Context, req any) (any, error) { return list(srv.(*runtimeService), req.(*Request)) }
		if interceptor == nil {
			return handler(ctx, req)
		}
		return interceptor(ctx, req, &grpc.UnaryServerInfo{Server: srv, FullMethod: fullMethod}, handler)
	}
}

// itemsField is the field number of the items in the answers of ListContainers and ListPodSandbox,
// also in batches.
const itemsField = 1

// encodedItems returns the encoded answer of a list. The encoding of a repeated field is the
// concatenation of its items. So items of an earlier answer are reused, and are not built or
// encoded again. keep returns an item's cached encoding. nil disables the cache.
func encodedItems[Snapshot any, Item proto.Message](all []Snapshot, keep func(Snapshot) *state.Answer,
	item func(Snapshot) Item) (encoded, error) {
	items := make(encoded, 0, len(all))
	for _, snapshot := range all {
		part, err := keep(snapshot).Get(func() ([]byte, error) { return encodedItem(item(snapshot)) })
		if err != nil {
			return nil, err
		}
		items = append(items, mem.SliceBuffer(part))
	}
	return items, nil
}

// encodedItem returns an item after its field number and length.
func encodedItem(item proto.Message) ([]byte, error) {
	size := proto.Size(item)
	part := make([]byte, 0, protowire.SizeTag(itemsField)+protowire.SizeBytes(size))
	part = protowire.AppendVarint(protowire.AppendTag(part, itemsField, protowire.BytesType), uint64(size))
	part, err := proto.MarshalOptions{UseCachedSize: true}.MarshalAppend(part, item)
	if err != nil {
		return nil, fmt.Errorf("encode list item: %w", err)
	}
	return part, nil
}

// sendItems sends encoded items of a list in batches, as sendBatches for encoded items.
func sendItems(items encoded, stream grpc.ServerStream) error {
	return inBatches(slices.Values(items), mem.Buffer.Len,
		func(batch []mem.Buffer) error { return stream.SendMsg(encoded(batch)) })
}
