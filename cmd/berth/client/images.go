package client

import (
	"context"
	"errors"
	"fmt"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"berth/server/admin"
)

// errNotBerth is the error for calls of package admin to another runtime.
var errNotBerth = errors.New("the runtime on this socket is not berth, or an older one: CRI has no call for this")

// Load sends an archive and returns the images that the daemon has added.
func (c *Client) Load(ctx context.Context, from io.Reader, req admin.LoadRequest) ([]admin.Image, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true}, admin.LoadMethod)
	if err != nil {
		return nil, adminError(err)
	}
	head, err := admin.Encode(req)
	if err != nil {
		return nil, err
	}
	err = stream.SendMsg(head)
	if err == nil {
		err = admin.Copy(stream, from)
	}
	if err == nil {
		err = stream.CloseSend()
	}
	if err != nil && !errors.Is(err, io.EOF) { // EOF: the daemon has refused, and RecvMsg returns the reason
		return nil, err
	}
	answer := &wrapperspb.BytesValue{}
	if err := stream.RecvMsg(answer); err != nil {
		return nil, adminError(err)
	}
	var images []admin.Image
	return images, admin.Decode(answer, &images)
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
