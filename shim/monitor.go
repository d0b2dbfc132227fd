package shim

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/shim/proto"
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
	return c.conn.Close()
}

// call sends one request and waits for the answer.
func (m *Monitor) call(ctx context.Context, what string, t proto.FrameType, payload []byte) error {
	c, err := m.dial(ctx)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	defer c.conn.Close()
	defer context.AfterFunc(ctx, c.interrupt)()
	err = c.send(t, payload)
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

// AttachIO are the streams of an attached client. Any may be nil.
type AttachIO struct {
	Stdin          io.ReadCloser // Attach closes it; Close must end a Read
	Stdout, Stderr io.Writer     // a container with a terminal has only Stdout
	Resize         <-chan proto.TerminalSize
	// StdinGrace is how long Attach waits for output after the end of Stdin. 0: until the container
	// ends.
	StdinGrace time.Duration
}

// maxGraces bounds the time that a container's output can prolong an Attach after the end of Stdin,
// in units of StdinGrace.
const maxGraces = 8

// maxQueued is the maximum that a monitor queues for its clients, in bytes.
const maxQueued = 8 << 20

// Attach connects streams to a running container until the container or ctx ends, or a write to
// Stdout or Stderr fails. With StdinGrace it also ends after Stdin, when no more output follows.
// If the container's stdin is open for one client only (proto.Launch.StdinOnce), the end of Stdin
// closes it.
//
// While Stdout or Stderr do not take output, the container waits. The monitor gives up a client
// that takes nothing for ten minutes. Then Attach passes on the output so far and returns Aborted.
func (m *Monitor) Attach(ctx context.Context, streams AttachIO) error {
	var sending sync.WaitGroup
	defer sending.Wait()
	if streams.Stdin != nil {
		defer streams.Stdin.Close()
	}
	c, err := m.dial(ctx)
	if err != nil {
		return fmt.Errorf("attach: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer c.conn.Close()
	defer cancel()
	defer context.AfterFunc(ctx, c.interrupt)()

	err = c.send(proto.FrameAttach, []byte{byte(streams.wants())})
	if err == nil {
		c.announcesEnd, err = c.attachAnswer()
	}
	if err == nil {
		if streams.Resize != nil {
			sending.Go(func() { c.sendSizes(ctx, streams.Resize) })
		}
		if streams.Stdin != nil {
			sending.Go(func() {
				c.sendStdin(streams.Stdin)
				c.endSoon(streams.StdinGrace)
			})
		}
		err = c.output(streams)
	}
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	if err != nil {
		return fmt.Errorf("attach: %w", err)
	}
	return nil
}

func (s AttachIO) wants() proto.Streams {
	var w proto.Streams
	if s.Stdin != nil {
		w |= proto.WantStdin
	}
	if s.Stdout != nil {
		w |= proto.WantStdout
	}
	if s.Stderr != nil {
		w |= proto.WantStderr
	}
	return w
}

// client is a connection to a monitor.
type client struct {
	conn *net.UnixConn
	in   []byte // received, not yet decoded

	sending sync.Mutex // held while one frame is written

	announcesEnd bool // the attached monitor sends proto.FrameEnd

	inputEnd atomic.Pointer[time.Time] // when the attached client's input ended; nil: it has not ended, or its end does not matter
}

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
			return &client{conn: conn}, nil
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

// interrupt makes pending and later reads and writes fail.
func (c *client) interrupt() { _ = c.conn.SetDeadline(time.Unix(1, 0)) }

func (c *client) send(t proto.FrameType, payload []byte) error {
	c.sending.Lock()
	defer c.sending.Unlock()
	_, err := c.conn.Write(proto.AppendFrame(nil, t, payload))
	return err
}

// next returns the next frame. Its payload is valid until the following call. The error is io.EOF
// at the end.
func (c *client) next() (proto.Frame, error) {
	for {
		f, size, err := proto.NextFrame(c.in)
		if err != nil {
			return proto.Frame{}, err
		}
		if size > 0 {
			c.in = c.in[size:]
			return f, nil
		}
		// Space for the longest frame, so that a payload is copied at most once.
		buf := make([]byte, len(c.in), proto.HeaderSize+proto.MaxPayload)
		copy(buf, c.in)
		n, err := c.conn.Read(buf[len(buf):cap(buf)])
		if err != nil {
			return proto.Frame{}, err
		}
		c.in = buf[:len(buf)+n]
	}
}

// answer waits for the answer to a request.
func (c *client) answer() error {
	_, err := c.answerWith()
	return err
}

// answerWith is answer, but also returns the payload of a successful answer.
func (c *client) answerWith() ([]byte, error) {
	f, err := c.next()
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

// attachAnswer is answer for proto.FrameAttach.
func (c *client) attachAnswer() (announcesEnd bool, err error) {
	payload, err := c.answerWith()
	return len(payload) > 0 && payload[0] == proto.AnnouncesEnd, err
}

// endSoon makes output end when no data has arrived for the time grace. If grace is 0, output
// continues.
func (c *client) endSoon(grace time.Duration) {
	if grace == 0 {
		return
	}
	now := time.Now()
	c.inputEnd.Store(&now)
	_ = c.conn.SetReadDeadline(now.Add(grace)) // fails only for a closed connection
}

// output copies output until the end.
func (c *client) output(streams AttachIO) error {
	var after rest
	for {
		began, end := time.Now(), c.inputEnd.Load()
		if end != nil {
			if after.isOver(*end, streams.StdinGrace) {
				return nil
			}
			// Only now, because a slow client may have taken longer for the output before.
			_ = c.conn.SetReadDeadline(began.Add(streams.StdinGrace))
		}
		f, err := c.next()
		if end != nil {
			after.waited += time.Since(began)
			after.size += len(f.Payload)
		}
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET):
			return c.unannounced()
		case c.inputEnd.Load() != nil && errors.Is(err, os.ErrDeadlineExceeded):
			return nil
		case err != nil:
			return err
		}
		switch f.Type {
		case proto.FrameStdout:
			_, err = streams.Stdout.Write(f.Payload)
		case proto.FrameStderr:
			_, err = streams.Stderr.Write(f.Payload)
		case proto.FrameEnd:
			return ended(string(f.Payload))
		}
		if err != nil {
			return err
		}
	}
}

// rest is the output that follows the end of an attached client's input.
type rest struct {
	size   int
	waited time.Duration // for the container, not for the client
}

// isOver returns whether the rest has become too long. A slow client gets the data that the monitor
// had queued for it.
func (r rest) isOver(end time.Time, grace time.Duration) bool {
	limit := maxGraces * grace
	return r.waited >= limit || r.size >= maxQueued && time.Since(end) >= limit
}

// ended returns the error for a proto.FrameEnd.
func ended(why string) error {
	if why == "" {
		return nil
	}
	return errdefs.New(codes.Aborted, "output is missing: %s", why)
}

// unannounced returns the error for the end of a connection without proto.FrameEnd. Older monitors
// also end the connection like this when the container has ended, but not within a frame.
func (c *client) unannounced() error {
	if c.announcesEnd || len(c.in) > 0 {
		return errdefs.New(codes.Aborted, "output is missing: the container's monitor has closed the connection")
	}
	return nil
}

// sendStdin copies input until it ends or the connection does.
func (c *client) sendStdin(r io.Reader) {
	buf := make([]byte, proto.MaxPayload)
	for {
		n, err := r.Read(buf)
		if n > 0 && c.send(proto.FrameStdin, buf[:n]) != nil {
			return
		}
		if err != nil {
			_ = c.send(proto.FrameStdinEOF, nil) // it fails only if the connection has ended
			return
		}
	}
}

// sendSizes sends the terminal's sizes. It does not wait for the answers, and output skips them.
func (c *client) sendSizes(ctx context.Context, sizes <-chan proto.TerminalSize) {
	for {
		select {
		case <-ctx.Done():
			return
		case s, ok := <-sizes:
			if !ok || c.send(proto.FrameResize, s.Encode()) != nil {
				return
			}
		}
	}
}
