package server

import (
	"context"
	"encoding/binary"
	"net"
	"reflect"
	"sync"

	"golang.org/x/net/http2"
	"google.golang.org/grpc"
)

// A stop of berth ends calls that the client must repeat. With an error, kubelet would log it and
// wait before the repetition. So the server refuses the call: HTTP/2's REFUSED_STREAM says that a
// call can be repeated (RFC 9113, 8.7), and gRPC's clients then repeat it themselves, once, on a
// new connection. All calls that berth refuses have either not begun, or continue when they are
// repeated.

// refuse refuses the call of ctx while the server stops. It first waits until the client knows that
// the connection ends, because the client must not repeat the call on this connection. The handler
// must return an error afterwards, which the client sees only if the call could not be refused.
func refuse(ctx context.Context) {
	info, isOurs := clientOf(ctx)
	id, ok := streamID(ctx)
	if !ok || !isOurs {
		return
	}
	select {
	case <-info.frames.leaving:
		info.frames.refuse(id)
	case <-ctx.Done(): // the connection has ended
	}
}

// streamID returns the HTTP/2 stream of a call. gRPC has no function for it, so this reads a
// private field. TestStoppedCallsAreRefused notices if the field is gone.
func streamID(ctx context.Context) (id uint32, ok bool) {
	stream := reflect.Indirect(reflect.ValueOf(grpc.ServerTransportStreamFromContext(ctx)))
	if stream.Kind() != reflect.Struct {
		return 0, false
	}
	field := stream.FieldByName("id")
	if !field.IsValid() || field.Kind() != reflect.Uint32 {
		return 0, false
	}
	return uint32(field.Uint()), true
}

const frameHead = 9 // bytes of the head of an HTTP/2 frame

// refusingConn is a server's HTTP/2 connection. It can send frames of its own.
type refusingConn struct {
	net.Conn
	leaving chan struct{} // closed when gRPC has written GOAWAY

	mu sync.Mutex // guards the fields below; held while bytes are written to the socket
	// +checklocks:mu
	head []byte // beginning of the next frame's head, if a write has divided it
	// +checklocks:mu
	rest int // missing bytes of the last frame's content
	// +checklocks:mu
	refusals []byte // frames that are written when the last frame is complete
}

func newRefusingConn(conn net.Conn) *refusingConn {
	return &refusingConn{Conn: conn, leaving: make(chan struct{})}
}

// Write implements net.Conn.
func (c *refusingConn) Write(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n, err := c.Conn.Write(b)
	c.follow(b[:n])
	c.writeRefusals()
	return n, err
}

// refuse tells the client that it can repeat the call with that stream.
func (c *refusingConn) refuse(stream uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.refusals = append(c.refusals, 0, 0, 4, byte(http2.FrameRSTStream), 0)
	c.refusals = binary.BigEndian.AppendUint32(c.refusals, stream)
	c.refusals = binary.BigEndian.AppendUint32(c.refusals, uint32(http2.ErrCodeRefusedStream))
	c.writeRefusals()
}

// follow finds where the frames in b end.
//
// +checklocks:c.mu
func (c *refusingConn) follow(b []byte) {
	for len(b) > 0 {
		n := min(c.rest, len(b))
		if c.rest == 0 {
			n = min(frameHead-len(c.head), len(b))
			if c.head = append(c.head, b[:n]...); len(c.head) == frameHead {
				c.begin()
			}
		} else {
			c.rest -= n
		}
		b = b[n:]
	}
}

// begin reads the head of a frame: three bytes of length, one of type.
//
// +checklocks:c.mu
func (c *refusingConn) begin() {
	c.rest = int(c.head[0])<<16 | int(c.head[1])<<8 | int(c.head[2])
	if http2.FrameType(c.head[3]) == http2.FrameGoAway {
		select {
		case <-c.leaving:
		default:
			close(c.leaving)
		}
	}
	c.head = c.head[:0]
}

// writeRefusals writes the refusals if the last frame is complete. If it fails, gRPC's next write
// fails, too.
//
// +checklocks:c.mu
func (c *refusingConn) writeRefusals() {
	if c.rest == 0 && len(c.head) == 0 && len(c.refusals) > 0 {
		_, _ = c.Conn.Write(c.refusals)
		c.refusals = nil
	}
}
