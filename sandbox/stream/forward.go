package stream

import (
	"context"
	"errors"
	"io"
	"net"
	"time"

	"berth/internal/errdefs"
)

// Forward connects a client to a TCP port of a pod, at localhost as seen in the network namespace
// pinned at netns, the host's if that is empty; IPv4 first. It returns when both sides have
// ended, one of them fails, or ctx ends. Each side may close its direction and go on in
// the other (stream.Close closes the one to the client).
//
// When it fails a Read from stream that is under way is not waited for: the caller
// closes the stream. Unavailable if nothing listens there, or berth is stopping.
func (r runner) Forward(ctx context.Context, pod, netns string, port uint16, stream io.ReadWriteCloser) error {
	conn, err := r.dials.dial(ctx, pod, netns, port)
	if err != nil {
		return err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { interrupt(conn) })()
	return r.copyBoth(ctx, conn, stream)
}

// interrupt makes reads and writes fail.
func interrupt(conn net.Conn) { _ = conn.SetDeadline(time.Unix(1, 0)) }

// copyBoth copies in both directions until both have ended, one fails, or ctx ends.
func (r runner) copyBoth(ctx context.Context, conn *net.TCPConn, stream io.ReadWriteCloser) error {
	toPod := make(chan error, 1)
	spawned := r.Spawn(func() { // see Forward for its end
		_, err := io.Copy(conn, stream)
		if err != nil {
			interrupt(conn)
		}
		_ = conn.CloseWrite() // fails if the pod has closed its side, which reading tells
		toPod <- err
	})
	if !spawned {
		return errdefs.Unavailable("berth is stopping")
	}
	_, err := io.Copy(stream, conn)
	if err == nil {
		err = stream.Close()
	}
	if err != nil {
		select {
		case inputErr := <-toPod: // the reason, if there is one
			return errors.Join(inputErr, err)
		default:
			return err
		}
	}
	select {
	case <-toPod: // the pod has said all: how the client leaves is of no interest
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
