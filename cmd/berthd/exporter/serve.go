package exporter

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/net/netutil"

	"berth/server"
)

// DebugSocket is the name of the unix socket below the state directory that serves metrics and
// profiles. Only root can open it.
const DebugSocket = "debug.sock"

const (
	// maxScrapes is the number of scrapes at a time. Further requests get the status 503.
	maxScrapes = 3
	// maxConnections is the number of connections to one address. Others have to wait.
	maxConnections = 32
	headerTimeout  = 10 * time.Second
	writeTimeout   = 30 * time.Second
	idleTimeout    = 10 * time.Second
	// maxHeaderBytes bounds the memory for a client's header.
	maxHeaderBytes = 16 << 10
)

// Servers are the HTTP servers of metrics. Use Listen. Its methods must not be called concurrently.
type Servers struct {
	exporter *Exporter
	log      *slog.Logger
	debug    *httpServer
	address  string
	public   *httpServer // serves address; nil if address is empty
}

// Listen serves on the debug socket in the directory state, until Close. If address is not empty,
// it also serves on address, which is an IP address and port, or a unix:// URL. Only the debug
// socket serves profiles.
func (e *Exporter) Listen(state, address string, log *slog.Logger) (_ *Servers, err error) {
	s := &Servers{exporter: e, log: log}
	socket, err := server.ListenForRoot(filepath.Join(state, DebugSocket), log)
	if err != nil {
		return nil, err
	}
	s.debug = s.serve(socket, &http.Server{Handler: e.debugHandler()}) // without WriteTimeout, because profiles take time
	move, err := s.Prepare(address)
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	move()
	return s, nil
}

// Prepare opens an address for metrics. apply serves on it and closes the present address. The
// caller must call apply. After an error the present address stays. It is an error if the present
// address uses the same port, for example 0.0.0.0:9464 after 127.0.0.1:9464.
func (s *Servers) Prepare(address string) (apply func(), err error) {
	if address == s.address {
		return func() {}, nil
	}
	var socket net.Listener
	if path, ok := strings.CutPrefix(address, "unix://"); ok {
		socket, err = server.ListenForRoot(path, s.log)
	} else if address != "" {
		socket, err = net.Listen("tcp", address)
	}
	if err != nil {
		return nil, fmt.Errorf("metrics.address: %w", err)
	}
	return func() {
		old := s.public
		s.address, s.public = address, nil
		if socket != nil {
			s.public = s.serve(socket, &http.Server{Handler: s.exporter.metricsHandler(), WriteTimeout: writeTimeout})
		}
		if err := old.close(); err != nil {
			s.log.Warn("close the former address of metrics", "error", err)
		}
	}, nil
}

// SetGroups selects the groups of metrics that are served.
func (s *Servers) SetGroups(names []string) { s.exporter.SetGroups(names) }

// Close ends the servers and their connections, and removes the sockets.
func (s *Servers) Close() error { return errors.Join(s.debug.close(), s.public.close()) }

// httpServer is a server with the goroutine that serves.
type httpServer struct {
	*http.Server
	socket net.Listener
	ended  chan struct{} // closed by the goroutine
}

// serve starts a server with limits, because every user of the node can connect to loopback.
func (s *Servers) serve(l net.Listener, srv *http.Server) *httpServer {
	srv.ReadHeaderTimeout, srv.IdleTimeout, srv.MaxHeaderBytes = headerTimeout, idleTimeout, maxHeaderBytes
	srv.ErrorLog = slog.NewLogLogger(s.log.Handler(), slog.LevelDebug)
	h := &httpServer{Server: srv, socket: netutil.LimitListener(l, maxConnections), ended: make(chan struct{})}
	go func() {
		defer close(h.ended)
		if err := srv.Serve(h.socket); !errors.Is(err, http.ErrServerClosed) {
			s.log.Error("metrics server failed, restart berth to serve metrics again", "address",
				h.socket.Addr().String(), "error", err)
		}
	}()
	return h
}

// close ends the server and its connections, and waits for its goroutine.
func (h *httpServer) close() error {
	if h == nil {
		return nil
	}
	err := h.Server.Close()
	if closed := h.socket.Close(); !errors.Is(closed, net.ErrClosed) { // Serve may not have started
		err = errors.Join(err, closed)
	}
	<-h.ended
	return err
}

func (e *Exporter) metricsHandler() *http.ServeMux {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", e.metricsPage(false))
	return mux
}

// debugHandler also serves all groups of metrics, and Go's profiles. Symbols need no handler,
// because the profiles have them.
func (e *Exporter) debugHandler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", e.metricsPage(true))
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	return mux
}

// Get requests a page from the debug socket in the directory state. The caller closes the body of
// the response.
func Get(ctx context.Context, state, page string) (*http.Response, error) {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(state, DebugSocket))
	}
	transport := &http.Transport{DisableKeepAlives: true, DialContext: dial}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://berth"+page, nil)
	if err != nil {
		return nil, err
	}
	return transport.RoundTrip(req)
}
