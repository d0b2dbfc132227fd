// Package admin has berth's own gRPC services for operators, on the socket of CRI. They have what
// CRI lacks: loading, saving and naming images, options of exec, and traces of pod starts. Only
// root can connect, as for CRI.
//
// # Contract
//
// A service's name contains its version. A change that an older client or server does not
// understand gets a new name. Each message is a google.protobuf.BytesValue. In a unary call it
// contains JSON. In a stream, the first message from the side that sends data contains a JSON
// request or is empty, and the other messages contain data. Unknown JSON fields are ignored.
package admin

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"berth/image"
	"berth/image/archive"
	"berth/image/pull"
	"berth/internal/errdefs"
)

// Full names of the methods.
const (
	service = "berth.admin.v1.Images"

	LoadMethod   = "/" + service + "/Load"   // stream of LoadRequest and data to a list of Image
	SaveMethod   = "/" + service + "/Save"   // SaveRequest to a stream of data
	TagMethod    = "/" + service + "/Tag"    // TagRequest to Image
	UntagMethod  = "/" + service + "/Untag"  // UntagRequest to Image
	LayersMethod = "/" + service + "/Layers" // nothing to a list of ImageLayers

	PartialMethod       = "/" + service + "/Partial"       // nothing to Partial
	RemovePartialMethod = "/" + service + "/RemovePartial" // nothing to the Partial that was removed
	IndexesMethod       = "/" + service + "/Indexes"       // IndexesRequest to Indexes
)

// ChunkSize is the most data in a message, in bytes.
const ChunkSize = 256 << 10

// LoadRequest begins a Load.
type LoadRequest struct {
	Name string `json:"name,omitempty"` // of the only image; empty: the names in the archive
	Pin  bool   `json:"pin,omitempty"`
}

// SkippedTrailer is the key of Load's trailer. The trailer has a text for each entry of the archive
// that is no image of the node, at most MaxSkipped texts. An older daemon sends no trailer.
const (
	SkippedTrailer = "berth-skipped-bin"
	MaxSkipped     = 100
)

// SaveRequest asks for an archive.
type SaveRequest struct {
	Images []string `json:"images"`
	Format string   `json:"format,omitempty"` // oci or docker; empty: oci
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

// IndexesRequest asks for the disk usage of the indexes of blobs.
type IndexesRequest struct {
	Drop bool `json:"drop,omitempty"` // remove the layers; the answer says what was removed
}

// Indexes is the disk usage of indexes of blobs.
type Indexes struct {
	Count int    `json:"count"`
	Bytes uint64 `json:"bytes"`
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

// Partial is what is kept of pulls that have not succeeded.
type Partial struct {
	Unfinished int    `json:"unfinished"` // layers with received bytes
	Finished   int    `json:"finished"`   // complete layers that no image has
	Bytes      uint64 `json:"bytes"`      // on disk, of both
}

// Layers returns the number of layers.
func (p Partial) Layers() int { return p.Unfinished + p.Finished }

// Store is the part of the image store that the service uses.
type Store interface {
	Load(ctx context.Context, from io.Reader, opts pull.LoadOptions) ([]*image.Image, error)
	Save(ctx context.Context, out io.Writer, opts image.SaveOptions) error
	Tag(ctx context.Context, ref, name string) (*image.Image, error)
	Untag(ctx context.Context, name string) (*image.Image, error)
	List() []*image.Image
	LayersOf(*image.Image) []image.LayerUse
	Partial() image.Partial
	RemovePartial() image.Partial
	Indexes() (n int, bytes int64)
	DropIndexes() (freed int64, err error)
}

// Register adds the service to a gRPC server.
func Register(s grpc.ServiceRegistrar, images Store) {
	s.RegisterService(&grpc.ServiceDesc{
		ServiceName: service,
		HandlerType: (*Store)(nil),
		Methods: []grpc.MethodDesc{
			unary(service, "Tag", func(ctx context.Context, s Store, req TagRequest) (any, error) {
				return imageOf(s.Tag(ctx, req.Image, req.Name))
			}),
			unary(service, "Untag", func(ctx context.Context, s Store, req UntagRequest) (any, error) {
				return imageOf(s.Untag(ctx, req.Name))
			}),
			unary(service, "Layers", func(_ context.Context, s Store, _ struct{}) (any, error) { return layers(s), nil }),
			unary(service, "Partial", func(_ context.Context, s Store, _ struct{}) (any, error) {
				return Partial(s.Partial()), nil
			}),
			unary(service, "RemovePartial", func(_ context.Context, s Store, _ struct{}) (any, error) {
				return Partial(s.RemovePartial()), nil
			}),
			unary(service, "Indexes", func(_ context.Context, s Store, req IndexesRequest) (any, error) {
				return indexes(s, req)
			}),
		},
		Streams: []grpc.StreamDesc{{
			StreamName: "Load", ClientStreams: true,
			Handler: func(srv any, stream grpc.ServerStream) error { return load(srv.(Store), stream) },
		}, {
			StreamName: "Save", ServerStreams: true,
			Handler: func(srv any, stream grpc.ServerStream) error { return save(srv.(Store), stream) },
		}},
	}, images)
}

// unary returns a method of a service with JSON messages. Server is the service's interface.
func unary[Server, Request any](
	service, name string, do func(context.Context, Server, Request) (any, error),
) grpc.MethodDesc {
	handle := func(ctx context.Context, srv any, message *wrapperspb.BytesValue) (any, error) {
		var req Request
		if err := Decode(message, &req); err != nil {
			return nil, err
		}
		answer, err := do(ctx, srv.(Server), req)
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
	var skipped []string
	opts := pull.LoadOptions{Name: req.Name, Pin: req.Pin, Skipped: func(entry archive.Skipped) {
		skipped = append(skipped, fmt.Sprintf("%s: %v", entry.Name, entry.Reason))
	}}
	added, err := images.Load(stream.Context(), NewReader(stream), opts)
	stream.SetTrailer(metadata.MD{SkippedTrailer: skipped[:min(len(skipped), MaxSkipped)]})
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

// save handles Save.
func save(images Store, stream grpc.ServerStream) error {
	first := &wrapperspb.BytesValue{}
	if err := stream.RecvMsg(first); err != nil {
		return err
	}
	var req SaveRequest
	if err := Decode(first, &req); err != nil {
		return err
	}
	out := bufio.NewWriterSize(sender{stream}, ChunkSize)
	opts := image.SaveOptions{Refs: req.Images, Format: archive.Format(req.Format)}
	if err := images.Save(stream.Context(), out, opts); err != nil {
		return err
	}
	return out.Flush()
}

// sender writes data to a stream.
type sender struct{ stream Sender }

func (s sender) Write(p []byte) (n int, err error) {
	for n < len(p) {
		chunk := p[n:min(len(p), n+ChunkSize)]
		if err := s.stream.SendMsg(wrapperspb.Bytes(chunk)); err != nil {
			return n, err
		}
		n += len(chunk)
	}
	return n, nil
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

func indexes(s Store, req IndexesRequest) (Indexes, error) {
	n, bytes := s.Indexes()
	if !req.Drop {
		return Indexes{n, uint64(bytes)}, nil
	}
	freed, err := s.DropIndexes()
	left, _ := s.Indexes()
	return Indexes{max(n-left, 0), uint64(freed)}, err
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

// Copy sends data until its end. It returns the error of the reader or of the stream.
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
