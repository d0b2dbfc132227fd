package process

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"berth/internal/failpoint"
	"berth/server/sessions/certs"
	"berth/server/sessions/wire"
	"berth/server/streaming"
	"berth/shim/proto"
)

// ListenerFD is the descriptor of the unix socket that the process inherits.
const ListenerFD = 3

// Main runs the program until it has nothing to do. It returns the exit code.
func Main(stderr io.Writer) int {
	// The process must survive a log without a reader.
	signal.Notify(make(chan os.Signal, 1), unix.SIGPIPE)
	klog.SetLogger(klog.Logger{}) // the libraries report each connection that fails
	if err := becomeKillable(); err != nil {
		fmt.Fprintln(stderr, "berth-stream:", err)
	}
	if err := run(context.Background(), stderr); err != nil {
		fmt.Fprintln(stderr, "berth-stream:", err)
		return 1
	}
	return 0
}

// becomeKillable replaces the daemon's oom_score_adj, because clients decide how much memory the
// process needs.
func becomeKillable() error {
	const file = "/proc/self/oom_score_adj"
	data, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if own, err := strconv.Atoi(strings.TrimSpace(string(data))); err != nil || own >= 0 {
		return err
	}
	return os.WriteFile(file, []byte("0"), 0)
}

func run(ctx context.Context, stderr io.Writer) error {
	file := os.NewFile(ListenerFD, "socket of the daemon")
	listener, err := net.FileListener(file)
	if err := errors.Join(err, file.Close()); err != nil {
		return fmt.Errorf("berth starts berth-stream; it does not work by hand: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	p := &program{link: newLink(), ctx: ctx, stderr: stderr, failed: make(chan error, 1), starting: make(chan struct{}, 1)}
	p.owned.Go(func() { p.accept(listener) })
	err = p.awaitEnd()
	cancel()
	err = errors.Join(err, listener.Close())
	p.owned.Wait()
	return err
}

// program has the process's state.
type program struct {
	*link
	ctx    context.Context
	stderr io.Writer
	owned  sync.WaitGroup
	failed chan error // capacity 1: the server cannot work
	// starting has capacity 1. It is full while the server starts.
	starting chan struct{}

	mu sync.Mutex // taken for the fields below only
	// +checklocks:mu
	settings wire.Settings
	// +checklocks:mu
	server *streaming.Server // nil before the first daemon's Hello
	// +checklocks:mu
	retired bool

	offering sync.Mutex // held while a URL is made, so that none is made at the end
	// +checklocks:offering
	ended bool
}

const (
	// endPeriod is the time between two checks whether the process has something to do.
	endPeriod = time.Second
	// idleTime is how long the process stays without a session. The next one may follow soon.
	idleTime = 10 * time.Second
	// listenTime is how long the process keeps a listener without a daemon and an unused URL. A
	// daemon of an earlier version listens by itself.
	listenTime = 5 * time.Second
)

// awaitEnd returns when the process has had nothing to do for a while.
func (p *program) awaitEnd() error {
	check := time.NewTicker(endPeriod)
	defer check.Stop()
	for busy := time.Now(); ; {
		select {
		case err := <-p.failed:
			return err
		case now := <-check.C:
			idle, patience := p.isIdle()
			if !idle {
				busy = now
			} else if now.Sub(busy) >= patience && p.end() {
				return nil
			}
		}
	}
}

// end ends the offers, unless a client may begin a session.
func (p *program) end() bool {
	server, _ := p.current()
	p.offering.Lock()
	defer p.offering.Unlock()
	p.ended = server == nil || server.Idle()
	return p.ended
}

// isIdle reports whether the process has nothing to do, and how long it waits for more.
func (p *program) isIdle() (idle bool, patience time.Duration) {
	daemon, _, lost := p.link.state()
	server, retired := p.current()
	alone := daemon == nil && time.Since(lost) > daemonTimeout
	switch {
	case server == nil:
		return alone, 0
	case daemon == nil && time.Since(lost) > listenTime && !retired && (alone || !server.Offers()):
		if f, _, err := p.retire(); err == nil {
			_ = f.Close() // another process may listen
		}
	}
	if daemon == nil || retired {
		return server.Idle(), 0
	}
	return server.Idle(), idleTime
}

func (p *program) current() (server *streaming.Server, retired bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.server, p.retired
}

// accept serves daemons, one after the other.
func (p *program) accept(listener net.Listener) {
	for {
		c, err := listener.Accept()
		if err != nil {
			return // closed at the end
		}
		conn, err := connectionOf(c.(*net.UnixConn))
		if err != nil {
			fmt.Fprintln(p.stderr, "berth-stream: accept a daemon:", err)
			continue
		}
		p.owned.Go(func() {
			defer context.AfterFunc(p.ctx, func() { _ = conn.Interrupt() })()
			if err := p.serveDaemon(conn); err != nil && p.ctx.Err() == nil {
				fmt.Fprintln(p.stderr, "berth-stream: serve the daemon:", err)
			}
		})
	}
}

// connectionOf returns the connection of a daemon, which must be root. It takes over c.
func connectionOf(c *net.UnixConn) (*proto.Conn, error) {
	f, err := c.File()
	if err := errors.Join(err, c.Close()); err != nil {
		return nil, err
	}
	cred, err := unix.GetsockoptUcred(int(f.Fd()), unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err == nil && cred.Uid != 0 {
		err = fmt.Errorf("the client has user ID %d", cred.Uid)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return proto.NewConn(f)
}

// serveDaemon serves a daemon until its end.
func (p *program) serveDaemon(conn *proto.Conn) error {
	defer conn.Close()
	var hello wire.Hello
	files, err := conn.Receive(&hello)
	if err != nil {
		return err
	}
	if err := p.start(hello, files); err != nil {
		sent := conn.Send(wire.Welcome{Error: err.Error()})
		p.fail(err)
		return sent
	}
	_, retired := p.current()
	defer p.drop(conn)
	if err := p.welcome(conn, wire.Welcome{Settings: p.knownSettings(), Retired: retired}); err != nil {
		return err
	}
	for {
		request, reply, err := wire.Receive(conn)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		// The daemon may have given up.
		if err := errors.Join(p.answer(request, reply), reply.Close()); err != nil {
			fmt.Fprintln(p.stderr, "berth-stream: answer the daemon:", err)
		}
	}
}

func (p *program) knownSettings() wire.Settings {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.settings
}

// answer answers a request of the daemon.
func (p *program) answer(r wire.Request, reply *proto.Conn) error {
	server, _ := p.current()
	switch {
	case r.Offer != nil:
		return p.offer(server, *r.Offer, reply)
	case r.Retire:
		failpoint.Reach("stream.retire")
		listener, tokens, err := p.retire()
		if err != nil {
			return reply.Send(wire.Answer{Error: wire.ErrorOf(err)})
		}
		failpoint.Reach("stream.retired")
		return errors.Join(reply.Send(wire.Answer{Tokens: tokens}, listener), listener.Close())
	}
	return nil // of a later version: the end of the reply refuses it
}

// offer answers with the URL of a session. Without an answer the daemon asks another process.
func (p *program) offer(server *streaming.Server, s wire.Session, reply *proto.Conn) error {
	p.offering.Lock()
	defer p.offering.Unlock()
	if _, retired := p.current(); p.ended || retired {
		return nil
	}
	address, err := server.Offer(s)
	return reply.Send(wire.Answer{URL: address, Error: wire.ErrorOf(err)})
}

// retire gives up the listener and the tokens.
func (p *program) retire() (listener *os.File, tokens []wire.Token, err error) {
	server, _ := p.current()
	listener, tokens, err = server.HandOver()
	if err != nil {
		return nil, nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.retired = true
	return listener, tokens, nil
}

// fail ends the process.
func (p *program) fail(err error) {
	select {
	case p.failed <- err:
	default: // it ends already
	}
}

// start starts the server with the first daemon's settings.
func (p *program) start(hello wire.Hello, files []*os.File) error {
	p.starting <- struct{}{}
	defer func() { <-p.starting }()
	if server, _ := p.current(); server != nil {
		return wire.CloseAll(files)
	}
	log, err := newLogger(hello.Settings, p.stderr)
	if err != nil {
		return errors.Join(err, wire.CloseAll(files))
	}
	spawn := func(f func()) bool { p.owned.Go(f); return true }
	cfg := streaming.Config{Address: hello.Settings.Address, IdleTimeout: hello.Settings.IdleTimeout, Log: log,
		Tokens: hello.Tokens}
	if len(files) > 0 {
		cfg.Listener, err = net.FileListener(files[0])
	}
	if err := errors.Join(err, wire.CloseAll(files)); err != nil {
		return err
	}
	pairs, err := certs.Open(hello.Settings.TLS, hello.PEM, log)
	if err != nil {
		return err
	}
	cfg.TLS = pairs.Config()
	server, err := streaming.Listen(cfg, runtime{p.link, spawn, log})
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.settings, p.server = hello.Settings, server
	p.owned.Go(func() {
		if err := server.Serve(p.ctx); err != nil && p.ctx.Err() == nil {
			p.fail(err)
		}
	})
	return nil
}

// newLogger returns a logger in the daemon's format.
func newLogger(s wire.Settings, w io.Writer) (*slog.Logger, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(s.LogLevel)); err != nil {
		return nil, fmt.Errorf("log level: %w", err)
	}
	options := slog.HandlerOptions{Level: level}
	if s.LogFormat == "json" {
		return slog.New(slog.NewJSONHandler(w, &options)), nil
	}
	return slog.New(slog.NewTextHandler(w, &options)), nil
}
