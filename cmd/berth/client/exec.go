package client

import (
	"context"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"berth/internal/errdefs"
	"berth/server/admin"
)

// ExecWith returns the URL of a session, as CRI's Exec does, with options that CRI lacks. It needs
// berth as the runtime.
func (c *Client) ExecWith(ctx context.Context, req admin.ExecRequest) (string, error) {
	message, err := admin.Encode(req)
	if err != nil {
		return "", err
	}
	answer := &wrapperspb.BytesValue{}
	err = c.conn.Invoke(ctx, admin.ExecMethod, message, answer)
	if errdefs.Code(err) == codes.Unimplemented {
		return "", errdefs.New(codes.Unimplemented,
			"CRI has no fields for --user, --workdir and --env, so they need berth 0.3 or later as the runtime")
	}
	if err != nil {
		return "", err
	}
	var reply admin.ExecReply
	err = admin.Decode(answer, &reply)
	return reply.URL, err
}
