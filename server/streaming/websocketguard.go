package streaming

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync/atomic"
)

// maxFrame bounds a WebSocket frame. The library accepts frames of 32 MiB and holds them in memory
// twice. Clients send frames of 32 KiB.
const maxFrame = 1 << 20

// webSocketGuard wraps a client's connection and ends it at a frame longer than maxFrame. Reads are
// serial.
type webSocketGuard struct {
	net.Conn
	frames
	log *slog.Logger

	ending      *atomic.Bool // the server ends the session, so its next Close frame is the last message
	ended       atomic.Bool  // that frame was sent
	clientEnded atomic.Bool  // the client has sent a Close frame or has disconnected
}

// Close implements net.Conn. The library calls it after it has sent a Close frame. At the session's
// end the connection stays open until the client has answered (RFC 6455, section 7.1.1).
func (g *webSocketGuard) Close() error {
	if g.ending.Load() && !g.clientEnded.Load() && !g.ended.Swap(true) {
		return nil
	}
	return g.Conn.Close()
}

// Read implements net.Conn. After an invalid frame it closes the connection and returns an error.
func (g *webSocketGuard) Read(p []byte) (int, error) {
	n, err := g.read(p, g.next)
	if err != nil {
		g.clientEnded.Store(true)
	}
	return n, err
}

// next reads a frame's header (RFC 6455, section 5.2): two bytes, an extended length, and the mask.
func (g *webSocketGuard) next() error {
	const (
		masked = 0x80
		short  = 126 // the length is in the next two bytes
		long   = 127 // the length is in the next eight bytes
	)
	header := make([]byte, 2, 14)
	if _, err := io.ReadFull(g.from, header); err != nil {
		return err
	}
	length := uint64(header[1] &^ masked)
	rest := map[uint64]int{short: 2, long: 8}[length]
	sizes := rest
	if header[1]&masked != 0 {
		rest += 4
	}
	header = header[:2+rest]
	if _, err := io.ReadFull(g.from, header[2:]); err != nil {
		return err
	}
	switch sizes {
	case 2:
		length = uint64(binary.BigEndian.Uint16(header[2:]))
	case 8:
		length = binary.BigEndian.Uint64(header[2:])
	}
	if length > maxFrame {
		err := fmt.Errorf("WebSocket frame of %d bytes, the limit is %d", length, maxFrame)
		g.log.Info("close WebSocket connection after an invalid frame", "err", err)
		return errors.Join(err, g.Conn.Close())
	}
	return g.pass(header, int(length))
}

// pass passes on a frame. After the server's Close frame it discards everything up to the client's
// Close frame.
func (g *webSocketGuard) pass(header []byte, length int) error {
	const (
		opcode    = 0x0f
		closeKind = 8
	)
	ends := header[0]&opcode == closeKind
	if ends {
		g.clientEnded.Store(true)
	}
	if !ends && g.ended.Load() {
		_, err := io.CopyN(io.Discard, g.from, int64(length))
		return err
	}
	g.ready, g.body = header, length
	return nil
}
