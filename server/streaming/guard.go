package streaming

import (
	"bufio"
	"errors"
	"net"
	"net/http"
	"sync/atomic"

	"k8s.io/streaming/pkg/httpstream"
)

// guardedWriter is a ResponseWriter that wraps the hijacked connection in a guard, because the
// protocols' libraries have no limits.
type guardedWriter struct {
	http.ResponseWriter
	// guard wraps the connection for a protocol library. from has the data that the client has
	// already sent.
	guard func(conn net.Conn, from *bufio.Reader) (net.Conn, error)
}

// Hijack implements http.Hijacker.
func (w guardedWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, buffers, err := http.NewResponseController(w.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, err
	}
	g, err := w.guard(conn, buffers.Reader)
	if err != nil {
		return nil, nil, errors.Join(err, conn.Close())
	}
	return g, bufio.NewReadWriter(bufio.NewReader(g), bufio.NewWriter(g)), nil
}

// guardSPDY guards a SPDY client's connection. rules returns the limits of the negotiated protocol.
// The guard is stored in made.
func (s *Server) guardSPDY(w http.ResponseWriter, rules func(protocol string) streamRules,
	made *atomic.Pointer[spdyGuard]) http.ResponseWriter {
	return guardedWriter{w, func(conn net.Conn, from *bufio.Reader) (net.Conn, error) {
		g, err := newSPDYGuard(conn, from, rules(w.Header().Get(httpstream.HeaderProtocolVersion)), s.cfg.Log)
		made.Store(g)
		return g, err
	}}
}

// guardWebSocket guards a WebSocket client's connection. The caller sets ending before the end of
// the session.
func (s *Server) guardWebSocket(w http.ResponseWriter, ending *atomic.Bool) http.ResponseWriter {
	return guardedWriter{w, func(conn net.Conn, from *bufio.Reader) (net.Conn, error) {
		return &webSocketGuard{Conn: conn, frames: frames{from: from}, log: s.cfg.Log, ending: ending}, nil
	}}
}

// frames passes on a client's frames: headers as a whole, possibly changed, and the payload in
// pieces as it arrives. Reads are serial.
type frames struct {
	from  *bufio.Reader
	ready []byte // bytes to pass on next
	body  int    // number of bytes to pass on unchanged after ready
}

// read returns data that may be passed on. It calls next to find more.
func (f *frames) read(p []byte, next func() error) (int, error) {
	for len(f.ready) == 0 && f.body == 0 {
		if err := next(); err != nil {
			return 0, err
		}
	}
	if len(f.ready) > 0 {
		n := copy(p, f.ready)
		f.ready = f.ready[n:]
		return n, nil
	}
	n, err := f.from.Read(p[:min(len(p), f.body)])
	f.body -= n
	return n, err
}
