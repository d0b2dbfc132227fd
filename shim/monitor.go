package shim

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/shim/proto"
	"berth/shim/running"
)

// Monitor talks to the monitor of a running container. Each call opens a separate connection. It is
// safe for concurrent use.
//
// Calls return FailedPrecondition if the container is not running.
type Monitor struct{ dir string }

// OpenMonitor returns the Monitor of a shim directory without connecting to it.
func OpenMonitor(dir string) *Monitor { return &Monitor{dir} }

// ReopenLog makes the monitor open the log's path again after a rotation. On an error it continues
// with the old file and has created no new one.
func (m *Monitor) ReopenLog(ctx context.Context) error {
	return m.call(ctx, "reopen log", proto.FrameReopen, nil)
}

// Resize changes the size of the container's terminal, in characters.
func (m *Monitor) Resize(ctx context.Context, width, height uint16) error {
	return m.call(ctx, "resize terminal", proto.FrameResize, proto.TerminalSize{Width: width, Height: height}.Encode())
}

// CloseStdin closes the container's stdin after the container has read all input sent so far.
func (m *Monitor) CloseStdin(ctx context.Context) error {
	return m.call(ctx, "close stdin", proto.FrameCloseStdin, nil)
}

// Listens returns nil if a monitor accepts connections or its backlog has space.
func (m *Monitor) Listens(ctx context.Context) error {
	c, err := m.dial(ctx)
	if err != nil {
		return err
	}
	return c.Close()
}

// call sends one request and waits for the answer.
func (m *Monitor) call(ctx context.Context, what string, t proto.FrameType, payload []byte) error {
	c, err := m.dial(ctx)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	defer c.Close()
	defer context.AfterFunc(ctx, c.Interrupt)()
	err = c.Send(t, payload)
	if err == nil {
		err = c.answer()
	}
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// client is a connection to a monitor.
type client struct{ *proto.FrameConn }

// dialRetry is the pause between two attempts to connect to a busy monitor.
const dialRetry = 5 * time.Millisecond

// dial connects through a descriptor of the directory, since a socket's path is limited to 107
// bytes. If the socket's backlog is full the kernel returns EAGAIN (unix_stream_connect); dial
// retries until ctx ends.
func (m *Monitor) dial(ctx context.Context) (*client, error) {
	dir, err := os.Open(m.dir)
	if err != nil {
		return nil, notRunning(err)
	}
	defer dir.Close()
	address := &net.UnixAddr{Name: "/proc/self/fd/" + strconv.Itoa(int(dir.Fd())) + "/" + proto.SocketFile, Net: "unix"}
	for {
		conn, err := net.DialUnix("unix", nil, address)
		if err == nil {
			return &client{&proto.FrameConn{UnixConn: conn}}, nil
		}
		if !errors.Is(err, unix.EAGAIN) {
			return nil, notRunning(err)
		}
		select {
		case <-time.After(dialRetry):
		case <-ctx.Done():
			return nil, errors.Join(ctx.Err(), err)
		}
	}
}

// notRunning returns FailedPrecondition for errors that mean that no monitor listens.
func notRunning(err error) error {
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
		return errdefs.FailedPrecondition("the container is not running: %w", err)
	}
	return err
}

// answer waits for the answer to a request.
func (c *client) answer() error {
	_, err := c.answerWith()
	return err
}

// answerWith is answer, but also returns the payload of a successful answer.
func (c *client) answerWith() ([]byte, error) {
	f, err := c.Next()
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return nil, errdefs.FailedPrecondition("the container has ended")
	case err != nil:
		return nil, err
	case f.Type == proto.FrameError:
		return nil, errdefs.Reported(codes.Internal, string(f.Payload))
	case f.Type != proto.FrameOK:
		return nil, errdefs.Internal("unexpected answer of type %d", f.Type)
	}
	return f.Payload, nil
}

// OpenAttach connects to a running container's streams. The caller owns the connection of the
// result. If the container's stdin is open for one client only (proto.Launch.StdinOnce), the end of
// its input closes it.
func (m *Monitor) OpenAttach(ctx context.Context, wants proto.Streams) (*running.Attached, error) {
	c, err := m.dial(ctx)
	if err != nil {
		return nil, fmt.Errorf("attach: %w", err)
	}
	stop := context.AfterFunc(ctx, c.Interrupt)
	err = c.Send(proto.FrameAttach, []byte{byte(wants)})
	var payload []byte
	if err == nil {
		payload, err = c.answerWith()
	}
	if !stop() {
		err = ctx.Err()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("attach: %w", err), c.Close())
	}
	announces := len(payload) > 0 && payload[0] == proto.AnnouncesEnd
	return &running.Attached{FrameConn: c.FrameConn, AnnouncesEnd: announces}, nil
}
