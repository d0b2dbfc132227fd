package proto

import (
	"net"
	"sync"
	"time"
)

// FrameConn is a client's connection to a monitor. It carries frames. One goroutine may call Next
// while others call Send.
type FrameConn struct {
	*net.UnixConn
	In []byte // received, not yet decoded

	sending sync.Mutex // held while one frame is written
}

// Interrupt makes pending and later reads and writes fail.
func (c *FrameConn) Interrupt() { _ = c.SetDeadline(time.Unix(1, 0)) }

// Send sends one frame.
func (c *FrameConn) Send(t FrameType, payload []byte) error {
	c.sending.Lock()
	defer c.sending.Unlock()
	_, err := c.Write(AppendFrame(nil, t, payload))
	return err
}

// Next returns the next frame. Its payload is valid until the following call. The error is io.EOF
// at the end.
func (c *FrameConn) Next() (Frame, error) {
	for {
		f, size, err := NextFrame(c.In)
		if err != nil {
			return Frame{}, err
		}
		if size > 0 {
			c.In = c.In[size:]
			return f, nil
		}
		// Space for the longest frame, so that a payload is copied at most once.
		buf := make([]byte, len(c.In), HeaderSize+MaxPayload)
		copy(buf, c.In)
		n, err := c.Read(buf[len(buf):cap(buf)])
		if err != nil {
			return Frame{}, err
		}
		c.In = buf[:len(buf)+n]
	}
}
