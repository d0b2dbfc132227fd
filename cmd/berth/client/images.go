package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image"
	"berth/image/lazy"
	"berth/server/admin"
)

// Image is an image as the commands list it. JSON has empty lists, not null.
type Image struct {
	ID      string   `json:"id"`
	Tags    []string `json:"tags"`
	Digests []string `json:"digests"`
	Size    uint64   `json:"size"` // bytes
	Pinned  bool     `json:"pinned"`
	// ArtifactType is the type of an OCI artifact; empty: a container image.
	ArtifactType string `json:"artifactType,omitempty"`
	// Fetched is how much of an incomplete image is on the node; empty: all.
	Fetched string `json:"fetched,omitempty"`
}

// ImageOf converts an image of the API.
func ImageOf(img *runtimeapi.Image) Image {
	return Image{
		ID: img.GetId(), Tags: append([]string{}, img.GetRepoTags()...),
		Digests: append([]string{}, img.GetRepoDigests()...), Size: img.GetSize(), Pinned: img.GetPinned(),
		ArtifactType: img.GetSpec().GetAnnotations()[image.ArtifactType],
		Fetched:      img.GetSpec().GetAnnotations()[lazy.FetchedAnnotation],
	}
}

// Name returns the tags of an image, else its first digest.
func (i Image) Name() string {
	switch {
	case len(i.Tags) > 0:
		return strings.Join(i.Tags, ", ")
	case len(i.Digests) > 0:
		return i.Digests[0]
	}
	return "<none>"
}

// AllImages returns all images, sorted by name.
func (c *Client) AllImages(ctx context.Context) ([]Image, error) {
	reply, err := c.ListImages(ctx, &runtimeapi.ListImagesRequest{})
	if err != nil {
		return nil, fmt.Errorf("list images: %w", err)
	}
	images := []Image{}
	for _, img := range reply.GetImages() {
		images = append(images, ImageOf(img))
	}
	slices.SortFunc(images, func(a, b Image) int {
		return cmp.Or(cmp.Compare(a.Name(), b.Name()), cmp.Compare(a.ID, b.ID))
	})
	return images, nil
}

// errNotBerth is the error for calls of package admin to another runtime.
var errNotBerth = errors.New("the runtime on this socket is not berth, or an older one: CRI has no call for this")

// Load sends an archive. It returns the images that the daemon has added, and a text for each entry
// that it has skipped.
func (c *Client) Load(ctx context.Context, from io.Reader, req admin.LoadRequest) (added []admin.Image,
	skipped []string, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true}, admin.LoadMethod)
	if err != nil {
		return nil, nil, adminError(err)
	}
	head, err := admin.Encode(req)
	if err != nil {
		return nil, nil, err
	}
	err = stream.SendMsg(head)
	if err == nil {
		err = admin.Copy(stream, from)
	}
	if err == nil {
		err = stream.CloseSend()
	}
	if err != nil && !errors.Is(err, io.EOF) { // EOF: the daemon has refused, and RecvMsg returns the reason
		return nil, nil, err
	}
	answer := &wrapperspb.BytesValue{}
	if err := stream.RecvMsg(answer); err != nil {
		return nil, nil, adminError(err)
	}
	return added, stream.Trailer()[admin.SkippedTrailer], admin.Decode(answer, &added)
}

// Save writes an archive with images. After an error the archive is not complete.
func (c *Client) Save(ctx context.Context, to io.Writer, req admin.SaveRequest) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, admin.SaveMethod)
	if err != nil {
		return adminError(err)
	}
	head, err := admin.Encode(req)
	if err != nil {
		return err
	}
	if err := errors.Join(stream.SendMsg(head), stream.CloseSend()); err != nil && !errors.Is(err, io.EOF) {
		return err // EOF: the daemon has refused, and RecvMsg returns the reason
	}
	for {
		chunk := &wrapperspb.BytesValue{}
		if err := stream.RecvMsg(chunk); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return adminError(err)
		}
		if _, err := to.Write(chunk.GetValue()); err != nil {
			return err
		}
	}
}

// Tag gives an image another name.
func (c *Client) Tag(ctx context.Context, image, name string) (answer admin.Image, err error) {
	return answer, c.admin(ctx, admin.TagMethod, admin.TagRequest{Image: image, Name: name}, &answer)
}

// Untag removes a name from its image.
func (c *Client) Untag(ctx context.Context, name string) (answer admin.Image, err error) {
	return answer, c.admin(ctx, admin.UntagMethod, admin.UntagRequest{Name: name}, &answer)
}

// ImageLayers returns the layers of all images.
func (c *Client) ImageLayers(ctx context.Context) (answer []admin.ImageLayers, err error) {
	return answer, c.admin(ctx, admin.LayersMethod, struct{}{}, &answer)
}

// PartialLayers returns what the runtime keeps of failed pulls. It is nil if the runtime is not
// berth, or an older one.
func (c *Client) PartialLayers(ctx context.Context) (*admin.Partial, error) {
	return c.partial(ctx, admin.PartialMethod)
}

// RemovePartialLayers deletes what the runtime keeps of failed pulls, and returns what was deleted.
// It is nil if the runtime is not berth, or an older one.
func (c *Client) RemovePartialLayers(ctx context.Context) (*admin.Partial, error) {
	return c.partial(ctx, admin.RemovePartialMethod)
}

func (c *Client) partial(ctx context.Context, method string) (*admin.Partial, error) {
	answer := &admin.Partial{}
	err := c.admin(ctx, method, struct{}{}, answer)
	if errors.Is(err, errNotBerth) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("partial layers: %w", err)
	}
	return answer, nil
}

// Indexes returns the disk usage of the indexes of blobs. It is zero if the runtime is not berth,
// or an older one.
func (c *Client) Indexes(ctx context.Context) (answer admin.Indexes, err error) {
	err = c.admin(ctx, admin.IndexesMethod, admin.IndexesRequest{}, &answer)
	if errors.Is(err, errNotBerth) {
		return admin.Indexes{}, nil
	}
	return answer, err
}

// DropIndexes removes the indexes of blobs and returns their disk usage.
func (c *Client) DropIndexes(ctx context.Context) (answer admin.Indexes, err error) {
	return answer, c.admin(ctx, admin.IndexesMethod, admin.IndexesRequest{Drop: true}, &answer)
}

// admin makes a unary call with JSON messages.
func (c *Client) admin(ctx context.Context, method string, req, answer any) error {
	in, err := admin.Encode(req)
	if err != nil {
		return err
	}
	out := &wrapperspb.BytesValue{}
	if err := c.conn.Invoke(ctx, method, in, out); err != nil {
		return adminError(err)
	}
	return admin.Decode(out, answer)
}

func adminError(err error) error {
	if status.Code(err) == codes.Unimplemented {
		return errNotBerth
	}
	var known *Error
	if errors.As(err, &known) {
		return err
	}
	return fmt.Errorf("%w", newError(err))
}
