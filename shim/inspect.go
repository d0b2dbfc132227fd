package shim

import (
	"context"
	"errors"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"berth/internal/errdefs"
	"berth/shim/proto"
)

// Inspect returns what a container with this seccomp profile would get from a launcher.
func (l *Launchers) Inspect(ctx context.Context, profile *specs.LinuxSeccomp) (*proto.Inspected, error) {
	p, err := l.take(l.cfg.Warm, "")
	if err != nil {
		return nil, err
	}
	defer l.retire(p)
	watch := p.watchRequest(requestTimeout)
	var reply proto.Reply
	err = watch.sent(p.conn.Send(proto.Request{Inspect: &proto.Inspect{Seccomp: profile}}))
	if err == nil {
		stop := context.AfterFunc(ctx, func() { _ = p.conn.Interrupt() })
		files, receiveErr := p.conn.Receive(&reply)
		stop()
		err = errors.Join(receiveErr, closeFiles(files))
	}
	err = watch.result(err)
	switch {
	case ctx.Err() != nil && err != nil:
		return nil, context.Cause(ctx)
	case err != nil:
		return nil, errdefs.Internal("the launcher is lost: %w", err)
	case reply.Error != nil:
		return nil, failure(ctx, reply.Error)
	case reply.Inspected == nil:
		return nil, errdefs.Internal("unexpected reply from the launcher")
	}
	return reply.Inspected, nil
}
