// Package streaming serves the sessions of CRI's Exec, Attach and PortForward over HTTP: SPDY and
// WebSocket, as kubelet, crictl and kubectl speak them.
//
// # Contract
//
// The RPC gives out a URL with a token that is good for one connection within a minute; who has it
// has the session. Tokens are in no log and no error text.
//
// The protocols are k8s.io/cri-streaming's. Its server is not used: it gives port-forwards no
// context, does not know WebSocket's v5.channel.k8s.io (which can close stdin), and can't end
// connections that have been upgraded. Here a session's context ends when the client's connection
// does, whoever reads it, or when the server stops; and Serve returns when all sessions have ended.
//
// Any process of the node may connect. Connections are accepted while a token is outstanding, those
// that show none are few and short, and none takes the daemon's last descriptors (gate.go).
package streaming

import (
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
	"sync"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/sandbox/stream"
)

// Runtime runs sessions. See package sandbox for the methods' contracts.
type Runtime interface {
	Exec(ctx context.Context, id string, command []string, terminal bool, s stream.IO) (int32, error)
	Attach(ctx context.Context, id string, terminal bool, s stream.IO) error
	PortForward(ctx context.Context, podID string, port int32, stream io.ReadWriteCloser) error
}

// Config is where and how sessions are served.
type Config struct {
	Address     string        // IP:port; port 0: any
	TLS         *tls.Config   // nil: plain HTTP
	IdleTimeout time.Duration // a session in which nothing is sent for so long is ended
	Log         *slog.Logger
}

const (
	// requestTimeout is how long a client may take for the TLS handshake, and to say what it wants.
	requestTimeout = 10 * time.Second
	// streamsTimeout is how long a client may take to open its streams.
	streamsTimeout = 30 * time.Second
	// maxRequest bounds the headers of a request. apiserver and kubelet pass on those of their
	// clients.
	maxRequest = 64 << 10
)

// Server gives out URLs and serves them. Make one with Listen.
type Server struct {
	cfg      Config
	runtime  Runtime
	base     url.URL
	tokens   tokens
	gate     *gate
	http     *http.Server
	hangups  *hangups
	patience time.Duration // how long a client may take to open its streams; tests have less

	mu       sync.Mutex // guards what follows
	sessions map[*connection]context.CancelCauseFunc
	closed   bool
	running  sync.WaitGroup // handlers; added to under mu while not closed
}

// Listen makes a server that has its port. Serve must be called.
func Listen(cfg Config, runtime Runtime) (*Server, error) {
	listener, err := net.Listen("tcp", cfg.Address)
	if err != nil {
		return nil, fmt.Errorf("serve streaming sessions: %w", err)
	}
	s := &Server{cfg: cfg, runtime: runtime, patience: streamsTimeout, sessions: map[*connection]context.CancelCauseFunc{}}
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
	protocols.SetHTTP1(true) // HTTP/2 can't be upgraded
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

// reachable is an address for URLs: those who ask for them are on this node.
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

// Serve serves sessions until ctx ends or the listener fails. It returns when every
// session has ended; nil if it was told to stop.
func (s *Server) Serve(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { _ = s.http.Close() }) // it fails only for the listener, which is closed then
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
	for conn, cancel := range s.sessions {
		cancel(errStopping) // before the connection tells that it is closed
		_ = conn.Close()    // it may be
	}
	s.mu.Unlock()
	s.running.Wait()
}

type connKey struct{}

// withConnection lets a request's handler know its connection.
func withConnection(ctx context.Context, c net.Conn) context.Context {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	return context.WithValue(ctx, connKey{}, c)
}

func connectionOf(r *http.Request) *connection { return r.Context().Value(connKey{}).(*connection) }

// closing ends a connection after its first request. Those for sessions set the header anew.
func closing(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Connection", "close")
		h.ServeHTTP(w, r)
	})
}

// serve handles one connection: the session that its token stands for.
func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	serve, ok := s.tokens.take(r.PathValue("kind"), r.PathValue("token"))
	if !ok {
		http.NotFound(w, r)
		return
	}
	s.gate.used()
	s.gate.forget(connectionOf(r))
	w.Header().Del("Connection")
	ctx, end, err := s.begin(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	defer end()
	serve(w, r.WithContext(ctx))
}

// begin makes a session's context. end closes the connection, which ends whatever the
// protocols' implementation has left running.
func (s *Server) begin(r *http.Request) (_ context.Context, end func(), err error) {
	conn := connectionOf(r)
	ctx, cancel := context.WithCancelCause(r.Context())
	forget, err := s.hangups.add(conn, func() { cancel(errGone) })
	if err != nil {
		cancel(err)
		return nil, nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		forget()
		cancel(errStopping)
		return nil, nil, errStopping
	}
	s.sessions[conn] = cancel
	s.running.Add(1)
	return ctx, func() {
		defer s.running.Done()
		forget()
		cancel(nil)
		_ = conn.Close() // mostly it is
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.sessions, conn)
	}, nil
}

// Exec returns the URL of a session that runs a command. The caller has checked the
// request. ResourceExhausted if too many URLs have not been used.
func (s *Server) Exec(req *runtimeapi.ExecRequest) (string, error) {
	return s.offer("exec", func(w http.ResponseWriter, r *http.Request) { s.serveExec(w, r, req) })
}

// Attach returns the URL of a session that is attached to a container. See Exec.
func (s *Server) Attach(req *runtimeapi.AttachRequest) (string, error) {
	return s.offer("attach", func(w http.ResponseWriter, r *http.Request) { s.serveAttach(w, r, req) })
}

// PortForward returns the URL of a session that forwards ports. See Exec. InvalidArgument for more ports than WebSocket can
// have channels for: there each has two, whose numbers are bytes.
func (s *Server) PortForward(req *runtimeapi.PortForwardRequest) (string, error) {
	if n := len(req.GetPort()); n > maxForwards {
		return "", errdefs.InvalidArgument("forward %d ports of pod sandbox %s: %d is the limit", n, req.GetPodSandboxId(), maxForwards)
	}
	return s.offer("portforward", func(w http.ResponseWriter, r *http.Request) { s.servePortForward(w, r, req) })
}

func (s *Server) offer(kind string, serve http.HandlerFunc) (string, error) {
	token, err := s.gate.offer(func() (string, error) { return s.tokens.add(kind, serve) })
	if err != nil {
		return "", err
	}
	return s.base.JoinPath(kind, token).String(), nil
}
