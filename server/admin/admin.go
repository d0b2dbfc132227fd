// Package admin is berth's own gRPC service for operators, on the socket of CRI. It has what CRI
// lacks: loading, saving and naming images, and options of exec. Only root can connect, as for CRI.
//
// # Contract
//
// The service's name contains its version. A change that an older client or server does not
// understand gets a new name. Each message is a google.protobuf.BytesValue. In a unary call it
// contains JSON. In a stream, the first message from the side that sends data contains a JSON
// request or nothing, and the others contain data. Unknown JSON fields are ignored.
package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"berth/image"
	"berth/internal/errdefs"
)

// Full names of the methods.
const (
	service = "berth.admin.v1.Images"

	LoadMethod   = "/" + service + "/Load"   // stream of LoadRequest and data to a list of Image
	TagMethod    = "/" + service + "/Tag"    // TagRequest to Image
	UntagMethod  = "/" + service + "/Untag"  // UntagRequest to Image
	LayersMethod = "/" + service + "/Layers" // nothing to a list of ImageLayers
)

// ChunkSize is the most data in a message, in bytes.
const ChunkSize = 256 << 10

// LoadRequest begins a Load.
type LoadRequest struct {
	Name string `json:"name,omitempty"` // of the only image; empty: the names in the archive
	Pin  bool   `json:"pin,omitempty"`
}

// TagRequest adds a name to an image.
type TagRequest struct {
	Image string `json:"image"`
	Name  string `json:"name"`
}

// UntagRequest removes a name from its image.
type UntagRequest struct {
	Name string `json:"name"`
}

// Image is an image of the node.
type Image struct {
	ID     string   `json:"id"`
	Tags   []string `json:"tags"`
	Size   uint64   `json:"size"`
	Pinned bool     `json:"pinned"`
}

// ImageLayers are the layers of an image, bottom first.
type ImageLayers struct {
	Image
	Layers []Layer `json:"layers"`
}

// Layer is a layer on disk.
type Layer struct {
	Name   string `json:"name"` // equal for layers that images share
	DiffID string `json:"diffID"`
	Blob   string `json:"blob,omitempty"`
	Bytes  uint64 `json:"bytes"`
}

// Store is the part of the image store that the service uses.
type Store interface {
	Load(ctx context.Context, from io.Reader, opts image.LoadOptions) ([]*image.Image, error)
	Tag(ctx context.Context, ref, name string) (*image.Image, error)
	Untag(ctx context.Context, name string) (*image.Image, error)
	List() []*image.Image
	LayersOf(*image.Image) []image.LayerUse
}

// Register adds the service to a gRPC server.
func Register(s grpc.ServiceRegistrar, images Store) {
	s.RegisterService(&grpc.ServiceDesc{
		ServiceName: service,
		HandlerType: (*Store)(nil),
		Methods: []grpc.MethodDesc{
			unary("Tag", func(ctx context.Context, s Store, req TagRequest) (any, error) {
				return imageOf(s.Tag(ctx, req.Image, req.Name))
			}),
			unary("Untag", func(ctx context.Context, s Store, req UntagRequest) (any, error) {
				return imageOf(s.Untag(ctx, req.Name))
			}),
			unary("Layers", func(_ context.Context, s Store, _ struct{}) (any, error) { return layers(s), nil }),
		},
		Streams: []grpc.StreamDesc{{
			StreamName: "Load", ClientStreams: true,
			Handler: func(srv any, stream grpc.ServerStream) error { return load(srv.(Store), stream) },
		}},
	}, images)
}

// unary returns a method with JSON messages.
func unary[Request any](name string, do func(context.Context, Store, Request) (any, error)) grpc.MethodDesc {
	handle := func(ctx context.Context, srv any, message *wrapperspb.BytesValue) (any, error) {
		var req Request
		if err := Decode(message, &req); err != nil {
			return nil, err
		}
		answer, err := do(ctx, srv.(Store), req)
		if err != nil {
			return nil, err
		}
		return Encode(answer)
	}
	return grpc.MethodDesc{MethodName: name, Handler: func(srv any, ctx context.Context, decode func(any) error,
		interceptor grpc.UnaryServerInterceptor) (any, error) {
		req := &wrapperspb.BytesValue{}
		if err := decode(req); err != nil {
			return nil, err
		}
		handler := func(ctx context.Context, req any) (any, error) {
			return handle(ctx, srv, req.(*wrapperspb.BytesValue))
		}
		if interceptor == nil {
			return handler(ctx, req)
		}
		return interceptor(ctx, req, &grpc.UnaryServerInfo{Server: srv, FullMethod: "/" + service + "/" + name}, handler)
	}}
}

// load handles Load.
func load(images Store, stream grpc.ServerStream) error {
	first := &wrapperspb.BytesValue{}
	if err := stream.RecvMsg(first); err != nil {
		return err
	}
	var req LoadRequest
	if err := Decode(first, &req); err != nil {
		return err
	}
	added, err := images.Load(stream.Context(), NewReader(stream), image.LoadOptions{Name: req.Name, Pin: req.Pin})
	if err != nil {
		return err
	}
	answer := []Image{}
	for _, img := range added {
		answer = append(answer, describe(img))
	}
	message, err := Encode(answer)
	if err != nil {
		return err
	}
	return stream.SendMsg(message)
}

func layers(s Store) []ImageLayers {
	all := []ImageLayers{}
	for _, img := range s.List() {
		one := ImageLayers{Image: describe(img)}
		for _, l := range s.LayersOf(img) {
			one.Layers = append(one.Layers, Layer{
				Name: l.Name.String(), DiffID: l.DiffID.String(), Blob: l.Blob.String(), Bytes: l.Bytes,
			})
		}
		all = append(all, one)
	}
	return all
}

func imageOf(img *image.Image, err error) (any, error) {
	if err != nil {
		return nil, err
	}
	return describe(img), nil
}

func describe(img *image.Image) Image {
	return Image{ID: img.ID, Tags: append([]string{}, img.RepoTags...), Size: img.Size, Pinned: img.Pinned}
}

// Encode returns a message with a value's JSON.
func Encode(v any) (*wrapperspb.BytesValue, error) {
	data, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("encode message: %w", err)
	}
	return wrapperspb.Bytes(data), nil
}

// Decode reads a message's JSON. An empty message leaves v unchanged.
func Decode(message *wrapperspb.BytesValue, v any) error {
	if len(message.GetValue()) == 0 {
		return nil
	}
	if err := json.Unmarshal(message.GetValue(), v); err != nil {
		return errdefs.InvalidArgument("decode message: %w", err)
	}
	return nil
}

// Receiver is the receiving side of a stream.
type Receiver interface{ RecvMsg(m any) error }

// NewReader returns a reader of the data that a stream receives.
func NewReader(stream Receiver) io.Reader { return &reader{stream: stream} }

type reader struct {
	stream Receiver
	rest   []byte
}

func (r *reader) Read(p []byte) (int, error) {
	for len(r.rest) == 0 {
		message := &wrapperspb.BytesValue{}
		if err := r.stream.RecvMsg(message); err != nil {
			return 0, err
		}
		r.rest = message.GetValue()
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// Sender is the sending side of a stream.
type Sender interface{ SendMsg(m any) error }

// Copy sends data until its end, and returns the reader's error or that of the stream.
func Copy(stream Sender, from io.Reader) error {
	buf := make([]byte, ChunkSize)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			if err := stream.SendMsg(wrapperspb.Bytes(buf[:n])); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}
