package streaming

import (
	"bufio"
	"errors"
	"net"
	"net/http"

	"k8s.io/streaming/pkg/httpstream"
)

// guardedWriter is a ResponseWriter whose hijacked connection is guarded: the libraries that speak the protocols take from a
// client whatever it sends.
type guardedWriter struct {
	http.ResponseWriter
	// guard makes the connection that a library is given. What the client has sent so far is in from.
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

// guardSPDY guards the connection of a client that is going to speak SPDY. rules are those of the protocol that the answer names.
func (s *Server) guardSPDY(w http.ResponseWriter, rules func(protocol string) streamRules) http.ResponseWriter {
	return guardedWriter{w, func(conn net.Conn, from *bufio.Reader) (net.Conn, error) {
		return newSPDYGuard(conn, from, rules(w.Header().Get(httpstream.HeaderProtocolVersion)), s.cfg.Log)
	}}
}

// guardWebSocket guards the connection of a client that is going to speak WebSocket.
func (s *Server) guardWebSocket(w http.ResponseWriter) http.ResponseWriter {
	return guardedWriter{w, func(conn net.Conn, from *bufio.Reader) (net.Conn, error) {
		return &webSocketGuard{Conn: conn, frames: frames{from: from}, log: s.cfg.Log}, nil
	}}
}

// frames is what a guard hands on of its client's frames: headers whole, which it may have changed, and the rest as it
// comes. Reads are one at a time.
type frames struct {
	from  *bufio.Reader
	ready []byte // to be handed on
	body  int    // bytes to be handed on after that, as they are
}

// read hands on what there is, after next has found something.
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
