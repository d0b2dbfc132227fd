package streaming

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/moby/spdystream/spdy"
	"golang.org/x/sys/unix"
	"k8s.io/cri-streaming/pkg/streaming/portforward"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/wsstream"

	"berth/server/sessions/wire"
)

// pairTimeout bounds the time between the two streams of a forwarded connection. The library waits
// that long even if the client has disconnected.
const pairTimeout = 10 * time.Second

func (s *Server) servePortForward(w http.ResponseWriter, r *http.Request, session wire.Session) {
	f := &forwarder{ctx: r.Context(), runtime: s.runtime, session: session, log: s.cfg.Log}
	if wsstream.IsWebSocketRequest(r) {
		f.channels = len(session.Ports)
		w = s.guardWebSocket(w, &f.ending)
	} else {
		w = s.guardSPDY(w, func(string) streamRules { return forwardRules() }, &f.guard)
		defer context.AfterFunc(r.Context(), f.stop)()
	}
	portforward.ServePortForward(w, r, f, session.ID, "", &portforward.V4Options{Ports: session.Ports}, 0,
		min(s.streamsTimeout, pairTimeout), portforward.SupportedProtocols)
	if f.ending.Load() {
		s.awaitClient(r, nil)
	}
}

// forwarder is a portforward.PortForwarder with the session's context, which the library does not
// pass on.
type forwarder struct {
	ctx     context.Context
	runtime Runtime
	session wire.Session
	log     *slog.Logger
	guard   atomic.Pointer[spdyGuard] // of a SPDY session; set before its first stream
	ending  atomic.Bool               // all channels of a WebSocket session have ended
	worked  atomic.Bool               // a port has accepted a connection

	mu sync.Mutex
	// +checklocks:mu
	channels int // of a WebSocket session, that have not ended
	// +checklocks:mu
	open int // forwarded connections
}

// PortForward implements portforward.PortForwarder.
func (f *forwarder) PortForward(_ context.Context, _, _ string, port int32, stream io.ReadWriteCloser) error {
	full := f.begin() > maxForwards
	defer f.end()
	if s, ok := stream.(httpstream.Stream); ok {
		return f.forwardSPDY(port, s, full)
	}
	client := &forwardClient{ReadWriteCloser: stream, f: f}
	err := f.runtime.PortForward(f.ctx, f.session, port, client)
	if client.left.Load() {
		return nil
	}
	return err
}

// forwardSPDY forwards a connection of a session in which other connections may be open. client-go
// ends all connections after an error in one of them. So an error is returned only in three cases.
// No port has accepted a connection yet, or the session cannot be used any more, or the session
// ends.
func (f *forwarder) forwardSPDY(port int32, s httpstream.Stream, full bool) error {
	ctx, cancel := context.WithCancel(f.ctx)
	defer cancel()
	f.guard.Load().onReset(spdy.StreamId(s.Identifier()), cancel)
	client := &forwardClient{ReadWriteCloser: s, f: f}
	err := errFull
	if !full {
		err = f.runtime.PortForward(ctx, f.session, port, client)
	}
	switch {
	case client.left.Load(), ctx.Err() != nil && f.ctx.Err() == nil:
		err = nil
	case err != nil && f.ctx.Err() != nil:
		err = context.Cause(f.ctx)
	case err != nil && (f.worked.Load() || errors.Is(err, unix.ECONNRESET)): // a reset may precede any use of the client
		f.log.Info("a forwarded connection ended with an error", "pod", f.session.ID, "port", port, "err", err)
		err = nil
	}
	if err != nil {
		// The library resets the stream, possibly before it answers it. The client would then
		// ignore the error. A write waits for the answer.
		_, _ = s.Write(nil) // fails only if the client has disconnected
		return err
	}
	// Further data from the client has no reader and would block the client's other connections.
	_ = s.Reset() // fails only if the client has disconnected
	return nil
}

var errFull = fmt.Errorf("the session has %d connections, which is the limit", maxForwards)

// begin returns the number of connections.
func (f *forwarder) begin() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.open++
	return f.open
}

func (f *forwarder) end() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.open--
	if f.channels--; f.channels == 0 {
		f.ending.Store(true)
	}
}

// stop ends a SPDY session that has no open connections. Otherwise an error of a connection tells
// the client about the session's end.
func (f *forwarder) stop() {
	f.mu.Lock()
	idle := f.open == 0
	f.mu.Unlock()
	if g := f.guard.Load(); idle && g != nil {
		g.closeWrite()
	}
}

// forwardClient is the client's side of a forwarded connection. It records a reset by the client. A
// reset is no failure, because clients reset all other connections after an error in one.
type forwardClient struct {
	io.ReadWriteCloser
	f    *forwarder
	left atomic.Bool
}

// Read implements io.Reader.
func (c *forwardClient) Read(p []byte) (int, error) {
	c.f.worked.Store(true)
	n, err := c.ReadWriteCloser.Read(p)
	return n, c.note(err)
}

// Write implements io.Writer.
func (c *forwardClient) Write(p []byte) (int, error) {
	c.f.worked.Store(true)
	n, err := c.ReadWriteCloser.Write(p)
	return n, c.note(err)
}

// Close implements io.Closer.
func (c *forwardClient) Close() error { return c.note(c.ReadWriteCloser.Close()) }

func (c *forwardClient) note(err error) error {
	if err != nil && !errors.Is(err, io.EOF) {
		c.left.Store(true)
	}
	return err
}
