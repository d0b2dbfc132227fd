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

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/net/netutil"

	"berth/server"
)

// DebugSocket is the name of the unix socket below the state directory that serves metrics and
// profiles. Only root can open it.
const DebugSocket = "debug.sock"

const (
	// maxScrapes is the number of scrapes at a time. Further ones get the status 503.
	maxScrapes = 3
	// maxConnections is the number of connections to one address. Others have to wait.
	maxConnections = 32
	headerTimeout  = 10 * time.Second
	writeTimeout   = 30 * time.Second
	idleTimeout    = 10 * time.Second
	// maxHeaderBytes bounds the memory for a client's header.
	maxHeaderBytes = 16 << 10
)

// Servers are the HTTP servers of metrics. Use Listen.
type Servers struct {
	log     *slog.Logger
	servers []*http.Server
	sockets []net.Listener
}

// Listen opens the debug socket in the directory state. It also opens address if that is not empty:
// an IP address and port, or a unix:// URL. Only the debug socket serves profiles.
func (e *Exporter) Listen(state, address string, log *slog.Logger) (_ *Servers, err error) {
	s := &Servers{log: log}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()
	debug, err := server.ListenForRoot(filepath.Join(state, DebugSocket), log)
	if err != nil {
		return nil, err
	}
	s.add(debug, &http.Server{Handler: e.debugHandler()}) // without WriteTimeout, because profiles take time
	if address == "" {
		return s, nil
	}
	var l net.Listener
	if path, ok := strings.CutPrefix(address, "unix://"); ok {
		l, err = server.ListenForRoot(path, log)
	} else {
		l, err = net.Listen("tcp", address)
	}
	if err != nil {
		return nil, fmt.Errorf("metrics.address: %w", err)
	}
	s.add(l, &http.Server{Handler: e.metricsHandler(), WriteTimeout: writeTimeout})
	return s, nil
}

// add adds a server with limits, because every user of the node can connect to loopback.
func (s *Servers) add(l net.Listener, srv *http.Server) {
	srv.ReadHeaderTimeout, srv.IdleTimeout, srv.MaxHeaderBytes = headerTimeout, idleTimeout, maxHeaderBytes
	srv.ErrorLog = slog.NewLogLogger(s.log.Handler(), slog.LevelDebug)
	s.sockets = append(s.sockets, netutil.LimitListener(l, maxConnections))
	s.servers = append(s.servers, srv)
}

// Serve serves until Close.
func (s *Servers) Serve() {
	done := make(chan struct{})
	for i, srv := range s.servers {
		go func() {
			defer func() { done <- struct{}{} }()
			if err := srv.Serve(s.sockets[i]); !errors.Is(err, http.ErrServerClosed) {
				s.log.Error("metrics server failed, restart berth to serve metrics again", "address",
					s.sockets[i].Addr().String(), "error", err)
			}
		}()
	}
	for range s.servers {
		<-done
	}
}

// Close ends the servers and their connections, and removes the sockets.
func (s *Servers) Close() error {
	var err error
	for i, srv := range s.servers {
		err = errors.Join(err, srv.Close())
		if closed := s.sockets[i].Close(); !errors.Is(closed, net.ErrClosed) { // Serve may not have started
			err = errors.Join(err, closed)
		}
	}
	return err
}

func (e *Exporter) metricsHandler() *http.ServeMux {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(e.registry, promhttp.HandlerOpts{
		MaxRequestsInFlight: maxScrapes,
		DisableCompression:  true, // clients are on this node
	}))
	return mux
}

// debugHandler also serves Go's profiles. Symbols need no handler, because the profiles have them.
func (e *Exporter) debugHandler() http.Handler {
	mux := e.metricsHandler()
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
