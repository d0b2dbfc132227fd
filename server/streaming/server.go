// Package streaming serves the sessions of CRI's Exec, Attach and PortForward over HTTP. It
// supports SPDY and WebSocket as kubelet, crictl and kubectl use them.
//
// # Contract
//
// An RPC returns a URL with a token that allows one connection within a minute. The token is the
// only credential. It appears in no log and no error text.
//
// k8s.io/cri-streaming implements the protocols, but its server is not used. That server passes no
// context to port-forwards, and cannot end upgraded connections. It lacks WebSocket's
// v5.channel.k8s.io, which can close stdin. Here a session's context ends when the client's
// connection ends, the session has no traffic for too long, or the server stops. Serve returns
// after all sessions have ended.
//
// A client gets all output and the exit code, even if it reads slowly (ending.go). If an attached
// client blocks its container for too long it gets an error (shim.Monitor.Attach).
//
// Any process of the node can connect. Connections are accepted only while a token is outstanding.
// Connections that have no token are few and short, and cannot use up the descriptors (gate.go).
//
// The program berth-stream serves the sessions, so the package links no gRPC.
package streaming

import (
	"container/list"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"berth/internal/coded"
	"berth/sandbox/stream/copying"
	"berth/server/sessions/wire"
)

// Runtime runs sessions. Package sandbox documents the contracts. PortForward uses stream only
// after the port has accepted the connection.
type Runtime interface {
	Exec(ctx context.Context, session wire.Session, s copying.IO) (int32, error)
	Attach(ctx context.Context, session wire.Session, s copying.IO) error
	PortForward(ctx context.Context, session wire.Session, port int32, stream io.ReadWriteCloser) error
}

// Config has the server's address and limits.
type Config struct {
	Address     string        // IP:port; port 0: any
	TLS         *tls.Config   // nil: plain HTTP
	IdleTimeout time.Duration // time after which a session with no traffic ends
	Log         *slog.Logger

	Listener net.Listener // of an earlier process; nil: Listen opens Address
	Tokens   []wire.Token // of an earlier process
}

const (
	// requestTimeout bounds the TLS handshake and the request.
	requestTimeout = 10 * time.Second
	// streamsTimeout bounds how long a client takes to open its streams.
	streamsTimeout = 30 * time.Second
	// maxRequest bounds the headers of a request. apiserver and kubelet pass on their clients'
	// headers.
	maxRequest = 64 << 10
)

// Server issues URLs and serves them. Use Listen.
type Server struct {
	cfg            Config
	runtime        Runtime
	base           url.URL
	tokens         tokens
	gate           *gate
	http           *http.Server
	hangups        *hangups
	streamsTimeout time.Duration // the constant, shorter in tests
	limits         endLimits     // of ending sessions
	handling       atomic.Int32  // requests

	mu sync.Mutex
	// +checklocks:mu
	sessions map[*connection]*session
	// +checklocks:mu
	lingering list.List // of *session that wait for their clients' end, oldest first
	// +checklocks:mu
	closed  bool
	running sync.WaitGroup // handlers of sessions; grows under mu, until closed
}

// Listen opens the port and returns a server. The caller must call Serve.
func Listen(cfg Config, runtime Runtime) (*Server, error) {
	listener := cfg.Listener
	if listener == nil {
		var err error
		if listener, err = net.Listen("tcp", cfg.Address); err != nil {
			return nil, fmt.Errorf("serve streaming sessions: %w", err)
		}
	}
	s := &Server{cfg: cfg, runtime: runtime, streamsTimeout: streamsTimeout, limits: defaultEndLimits,
		sessions: map[*connection]*session{}}
	s.tokens.restore(cfg.Tokens)
	var err error
	s.gate, err = newGate(listener.(*net.TCPListener), &s.tokens, cfg.TLS != nil, cfg.Log)
	if err == nil {
		s.hangups, err = watchHangups()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("serve streaming sessions: %w", err), listener.Close())
	}
	s.base = url.URL{Scheme: "http", Host: reachable(listener.Addr())}
	if cfg.TLS != nil {
		s.base.Scheme = "https"
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/{kind}/{token}", s.serve)
	var protocols http.Protocols
	protocols.SetHTTP1(true) // HTTP/2 cannot be upgraded
	s.http = &http.Server{
		Handler:           closing(mux),
		TLSConfig:         cfg.TLS,
		Protocols:         &protocols,
		ReadHeaderTimeout: requestTimeout,
		IdleTimeout:       requestTimeout,
		MaxHeaderBytes:    maxRequest,
		ErrorLog:          slog.NewLogLogger(cfg.Log.Handler(), slog.LevelDebug),
		ConnContext:       withConnection,
	}
	return s, nil
}

// reachable returns the address for URLs, whose clients are on this node.
func reachable(addr net.Addr) string {
	a, err := netip.ParseAddrPort(addr.String())
	if err != nil || !a.Addr().IsUnspecified() {
		return addr.String()
	}
	if a.Addr().Is4() {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), a.Port()).String()
	}
	return netip.AddrPortFrom(netip.IPv6Loopback(), a.Port()).String()
}

var errStopping = errors.New("berth is stopping")

// Serve serves sessions until ctx ends or the listener fails. It returns after all sessions have
// ended. The error is nil if ctx ended.
func (s *Server) Serve(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { _ = s.http.Close() }) // fails only for the listener, which is closed then
	defer stop()
	var err error
	if s.cfg.TLS != nil {
		err = s.http.ServeTLS(s.gate, "", "")
	} else {
		err = s.http.Serve(s.gate)
	}
	if errors.Is(err, http.ErrServerClosed) && ctx.Err() != nil {
		err = nil
	}
	s.endSessions()
	return errors.Join(err, s.http.Close(), s.hangups.Close())
}

// endSessions ends all sessions and waits for them.
func (s *Server) endSessions() {
	s.mu.Lock()
	s.closed = true
	for _, session := range s.sessions {
		session.cancel(errStopping)
	}
	s.mu.Unlock()
	s.running.Wait()
}

type connKey struct{}

// withConnection adds a request's connection to its context.
func withConnection(ctx context.Context, c net.Conn) context.Context {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	return context.WithValue(ctx, connKey{}, c)
}

func connectionOf(r *http.Request) *connection { return r.Context().Value(connKey{}).(*connection) }

// closing ends a connection after its first request. Handlers of sessions overwrite the header.
func closing(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Connection", "close")
		h.ServeHTTP(w, r)
	})
}

// serve handles one connection, which is the session of its token.
func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	s.handling.Add(1)
	defer s.handling.Add(-1)
	x, ok := s.tokens.take(r.PathValue("kind"), r.PathValue("token"))
	if !ok {
		http.NotFound(w, r)
		return
	}
	s.gate.used()
	s.gate.forget(connectionOf(r))
	w.Header().Del("Connection")
	session, err := s.begin(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	defer s.end(session)
	serve := map[string]func(http.ResponseWriter, *http.Request, wire.Session){
		wire.Exec: s.serveExec, wire.Attach: s.serveAttach, wire.PortForward: s.servePortForward,
	}[x.Kind]
	serve(w, r.WithContext(session.ctx), x)
}

// Offer returns the URL of a session that a client may begin. The caller has checked the request.
// The error is ResourceExhausted if too many URLs are unused, and InvalidArgument for too many
// ports. In a WebSocket each port needs two channels, and channel numbers are bytes.
func (s *Server) Offer(session wire.Session) (string, error) {
	if n := len(session.Ports); n > maxForwards {
		return "", coded.Errorf(coded.InvalidArgument, "forward %d ports of pod sandbox %s: %d is the limit",
			n, session.ID, maxForwards)
	}
	token, err := s.gate.offer(func() (string, error) { return s.tokens.add(session) })
	if err != nil {
		return "", err
	}
	return s.base.JoinPath(session.Kind, token).String(), nil
}

// HandOver returns the listener and the unused tokens, for another process. The server continues
// its sessions, and those of connections that it has accepted.
func (s *Server) HandOver() (listener *os.File, unused []wire.Token, err error) {
	listener, err = s.gate.give()
	return listener, s.tokens.takeAll(), err
}

// Offers reports whether a URL is unused.
func (s *Server) Offers() bool { return s.tokens.outstanding(time.Now()) }

// Idle reports whether the server has no session and no unused URL.
func (s *Server) Idle() bool {
	return !s.gate.open() && s.handling.Load() == 0
}
