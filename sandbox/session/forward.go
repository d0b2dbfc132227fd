package session

import (
	"context"
	"errors"
	"io"
	"net"
	"strconv"
	"time"

	"berth/cni"
	"berth/internal/errdefs"
)

// dialTime is how long a port may take to accept a connection.
const dialTime = 10 * time.Second

// Forward connects a client to a TCP port at localhost as seen in the network namespace
// pinned at netns, the host's if that is empty; IPv4 first. It returns when both sides have
// ended, one of them fails, or ctx ends. Each side may close its direction and go on in
// the other (stream.Close closes the one to the client).
//
// When it fails a Read from stream that is under way is not waited for: the caller
// closes the stream. Unavailable if nothing listens there, or berth is stopping.
func (r Runner) Forward(ctx context.Context, netns string, port uint16, stream io.ReadWriteCloser) error {
	conn, err := dial(ctx, netns, port)
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
func (r Runner) copyBoth(ctx context.Context, conn *net.TCPConn, stream io.ReadWriteCloser) error {
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

// dial connects to a port at localhost, as seen in a network namespace.
func dial(ctx context.Context, netns string, port uint16) (*net.TCPConn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTime)
	defer cancel()
	var conn *net.TCPConn
	connect := func() (err error) { conn, err = dialLocalhost(ctx, port); return err }
	var err error
	if netns == "" {
		err = connect()
	} else {
		err = cni.InNetNS(netns, connect)
	}
	if err != nil {
		return nil, errdefs.Unavailable("connect: %w", err)
	}
	return conn, nil
}

// dialLocalhost connects from the network namespace of the calling thread.
func dialLocalhost(ctx context.Context, port uint16) (*net.TCPConn, error) {
	var all error
	for _, address := range []string{"127.0.0.1", "::1"} {
		var d net.Dialer
		conn, err := d.DialContext(ctx, "tcp", net.JoinHostPort(address, strconv.Itoa(int(port))))
		if err == nil {
			return conn.(*net.TCPConn), nil
		}
		all = errors.Join(all, err)
	}
	return nil, all
}
