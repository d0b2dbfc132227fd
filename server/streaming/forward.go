package streaming

import (
	"context"
	"errors"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/cri-streaming/pkg/streaming/portforward"
	"k8s.io/streaming/pkg/httpstream/wsstream"
)

// pairTime bounds the time between the two streams of a forwarded connection. The library waits
// that long even if the client has disconnected.
const pairTime = 10 * time.Second

func (s *Server) servePortForward(w http.ResponseWriter, r *http.Request, req *runtimeapi.PortForwardRequest) {
	f := &forwarder{ctx: r.Context(), runtime: s.runtime, pod: req.GetPodSandboxId()}
	if wsstream.IsWebSocketRequest(r) {
		f.channels = len(req.GetPort())
		w = s.guardWebSocket(w, &f.ending)
	} else {
		w = s.guardSPDY(w, func(string) streamRules { return forwardRules() }, &f.guard)
		defer context.AfterFunc(r.Context(), f.stop)()
	}
	portforward.ServePortForward(w, r, f, f.pod, "", &portforward.V4Options{Ports: req.GetPort()}, 0,
		min(s.patience, pairTime), portforward.SupportedProtocols)
	if f.ending.Load() {
		s.awaitClient(r, nil)
	}
}

// forwarder is a portforward.PortForwarder with the session's context, which the library does not
// pass on.
type forwarder struct {
	ctx     context.Context
	runtime Runtime
	pod     string
	guard   *spdyGuard  // of a SPDY session; set before its first stream
	ending  atomic.Bool // all channels of a WebSocket session have ended

	mu       sync.Mutex // guards the fields below
	channels int        // of a WebSocket session, that have not ended
	open     int        // forwarded connections
}

// PortForward implements portforward.PortForwarder.
func (f *forwarder) PortForward(_ context.Context, _, _ string, port int32, stream io.ReadWriteCloser) error {
	f.begin()
	defer f.end()
	client := &forwardClient{ReadWriteCloser: stream}
	err := f.runtime.PortForward(f.ctx, f.pod, port, client)
	switch {
	case client.left.Load():
		err = nil
	case err != nil && f.ctx.Err() != nil:
		err = context.Cause(f.ctx)
	}
	s, ok := stream.(interface{ Reset() error })
	switch {
	case !ok: // WebSocket
	case err != nil:
		// The library resets the stream, possibly before it answers the stream, and the client
		// would then ignore the error. A write waits for the answer.
		_, _ = stream.Write(nil) // fails only if the client has disconnected
	default:
		// Both sides know the end of the stream. Further data from the client has no reader and
		// would block the client's other connections.
		_ = s.Reset() // fails only if the client has disconnected
	}
	return err
}

func (f *forwarder) begin() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.open++
}

func (f *forwarder) end() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.open--
	if f.channels--; f.channels == 0 {
		f.ending.Store(true)
	}
}

// stop ends a SPDY session without open connections. Otherwise the client learns of the session's
// end from an error of a connection.
func (f *forwarder) stop() {
	f.mu.Lock()
	idle := f.open == 0
	f.mu.Unlock()
	if idle && f.guard != nil {
		f.guard.closeWrite()
	}
}

// forwardClient is the client's side of a forwarded connection. It records a reset by the client. A
// reset is no failure, because clients reset all other connections after an error in one.
type forwardClient struct {
	io.ReadWriteCloser
	left atomic.Bool
}

// Read implements io.Reader.
func (c *forwardClient) Read(p []byte) (int, error) {
	n, err := c.ReadWriteCloser.Read(p)
	return n, c.note(err)
}

// Write implements io.Writer.
func (c *forwardClient) Write(p []byte) (int, error) {
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
