package running

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"berth/internal/coded"
	"berth/shim/proto"
)

// AttachIO are the streams of an attached client. Any may be nil.
type AttachIO struct {
	Stdin          io.ReadCloser // Copy closes it; Close must end a Read
	Stdout, Stderr io.Writer     // a container with a terminal has only Stdout
	Resize         <-chan proto.TerminalSize
	// StdinGrace is how long Copy waits for output after the end of Stdin. 0: until the container
	// ends.
	StdinGrace time.Duration
}

// maxGraces bounds the time that a container's output can prolong a Copy after the end of Stdin,
// in units of StdinGrace.
const maxGraces = 8

// maxQueued is the maximum that a monitor queues for its clients, in bytes.
const maxQueued = 8 << 20

// Wants returns the streams that are not nil.
func (s AttachIO) Wants() proto.Streams {
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

// Attached is a connection to a monitor that carries a container's own streams.
type Attached struct {
	*proto.FrameConn
	AnnouncesEnd bool // the monitor sends proto.FrameEnd

	// When the client's input ended; nil: it has not ended, or its end does not matter.
	inputEnd atomic.Pointer[time.Time]
}

// Copy connects streams to a running container until the container or ctx ends, or a write to
// Stdout or Stderr fails. With StdinGrace it also ends after Stdin, when no more output follows. It
// closes the connection.
//
// While Stdout or Stderr do not take output, the container waits. The monitor gives up a client
// that takes nothing for ten minutes. Then Copy passes on the output so far and returns Aborted.
func (c *Attached) Copy(ctx context.Context, streams AttachIO) error {
	var sending sync.WaitGroup
	defer sending.Wait()
	if streams.Stdin != nil {
		defer streams.Stdin.Close()
	}
	ctx, cancel := context.WithCancel(ctx)
	defer c.Close()
	defer cancel()
	defer context.AfterFunc(ctx, c.Interrupt)()

	if streams.Resize != nil {
		sending.Go(func() { c.sendSizes(ctx, streams.Resize) })
	}
	if streams.Stdin != nil {
		sending.Go(func() {
			c.sendStdin(streams.Stdin)
			c.endSoon(streams.StdinGrace)
		})
	}
	err := c.output(streams)
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	if err != nil {
		return fmt.Errorf("attach: %w", err)
	}
	return nil
}

// endSoon makes output end when no data has arrived for the time grace. If grace is 0, output
// continues.
func (c *Attached) endSoon(grace time.Duration) {
	if grace == 0 {
		return
	}
	now := time.Now()
	c.inputEnd.Store(&now)
	_ = c.SetReadDeadline(now.Add(grace)) // fails only for a closed connection
}

// output copies output until the end.
func (c *Attached) output(streams AttachIO) error {
	var after rest
	for {
		began, end := time.Now(), c.inputEnd.Load()
		if end != nil {
			if after.isOver(*end, streams.StdinGrace) {
				return nil
			}
			// Only now, because a slow client may have taken longer for the output before.
			_ = c.SetReadDeadline(began.Add(streams.StdinGrace))
		}
		f, err := c.Next()
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
	return coded.Errorf(coded.Aborted, "output is missing: %s", why)
}

// unannounced returns the error for the end of a connection without proto.FrameEnd. Older monitors
// also end the connection like this when the container has ended, but not within a frame.
func (c *Attached) unannounced() error {
	if c.AnnouncesEnd || len(c.In) > 0 {
		return coded.Errorf(coded.Aborted, "output is missing: the container's monitor has closed the connection")
	}
	return nil
}

// sendStdin copies input until it ends or the connection does.
func (c *Attached) sendStdin(r io.Reader) {
	buf := make([]byte, proto.MaxPayload)
	for {
		n, err := r.Read(buf)
		if n > 0 && c.Send(proto.FrameStdin, buf[:n]) != nil {
			return
		}
		if err != nil {
			_ = c.Send(proto.FrameStdinEOF, nil) // it fails only if the connection has ended
			return
		}
	}
}

// sendSizes sends the terminal's sizes. It does not wait for the answers, and output skips them.
func (c *Attached) sendSizes(ctx context.Context, sizes <-chan proto.TerminalSize) {
	for {
		select {
		case <-ctx.Done():
			return
		case s, ok := <-sizes:
			if !ok || c.Send(proto.FrameResize, s.Encode()) != nil {
				return
			}
		}
	}
}
