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

// encoded is the encoding of an answer, in parts that are never changed again: what a handler may answer with in place of a message.
type encoded mem.BufferSlice

// codec is gRPC's own but for answers that are encoded already, which go to the transport as they are: it copies them once, into what it
// writes to the socket. As messages they would be copied into memory of their size first, 1 MiB of the pool's for more than 32 KiB.
type codec struct{ encoding.CodecV2 }

// newCodec returns the codec of a server; its clients have that of protobuf, there is no other in CRI.
func newCodec() codec { return codec{encoding.GetCodecV2("proto")} }

// Marshal implements encoding.CodecV2.
func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	if answer, ok := v.(encoded); ok {
		return mem.BufferSlice(answer), nil
	}
	return c.CodecV2.Marshal(v)
}

// encodedLists are the methods of RuntimeService that answer with what is encoded.
var encodedLists = map[string]grpc.MethodHandler{
	"ListContainers": encodedList((*runtimeService).listContainers, runtimeapi.RuntimeService_ListContainers_FullMethodName),
	"ListPodSandbox": encodedList((*runtimeService).listPodSandbox, runtimeapi.RuntimeService_ListPodSandbox_FullMethodName),
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

// encodedList is what protoc-gen-go-grpc generates for a unary method, but for the type of the answer.
func encodedList[Request any](list func(*runtimeService, *Request) (encoded, error), fullMethod string) grpc.MethodHandler {
	return func(srv any, ctx context.Context, decode func(any) error, interceptor grpc.UnaryServerInterceptor) (any, error) {
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

// itemsField is the number of the field that has the items, in the answers of ListContainers and ListPodSandbox and of their streaming forms.
const itemsField = 1

// encodedItems returns a list's answer. The encoding of a repeated field is that of its items, one after the other, so items that were in
// an earlier answer are those of that one (keep; nil: none is kept) and neither made nor encoded again.
func encodedItems[Snapshot any, Item proto.Message](all []Snapshot, keep func(Snapshot) *state.Answer, item func(Snapshot) Item) (encoded, error) {
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

// encodedItem is an item with its field's number and its length before it.
func encodedItem(item proto.Message) ([]byte, error) {
	size := proto.Size(item)
	part := make([]byte, 0, protowire.SizeTag(itemsField)+protowire.SizeBytes(size))
	part = protowire.AppendVarint(protowire.AppendTag(part, itemsField, protowire.BytesType), uint64(size))
	part, err := proto.MarshalOptions{UseCachedSize: true}.MarshalAppend(part, item)
	if err != nil {
		return nil, fmt.Errorf("encode an item of a list: %w", err)
	}
	return part, nil
}

// sendItems answers a streaming list with encoded items, as sendBatches does with others.
func sendItems(items encoded, stream grpc.ServerStream) error {
	return inBatches(slices.Values(items), mem.Buffer.Len, func(batch []mem.Buffer) error { return stream.SendMsg(encoded(batch)) })
}
