package streaming

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/moby/spdystream/spdy"
	"k8s.io/client-go/rest"
	client "k8s.io/client-go/tools/remotecommand"
	clientexec "k8s.io/client-go/util/exec"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"

	"berth/internal/testutil"
	"berth/sandbox/stream/copying"
)

// link is a TCP proxy between a client and a server. It can stop reading from the server, as a slow
// client does, and send pings in the client's name.
type link struct {
	t         *testing.T
	listener  net.Listener
	server    string
	ping      []byte
	flowing   chan struct{} // closed: the client reads
	asKubelet bool          // the end of one direction closes both connections

	running  sync.WaitGroup
	mu       sync.Mutex // guards the fields below; held while data is sent to the server
	toServer net.Conn
}

// pings are a client's ping by protocol: SPDY/3.1's number 1000001, and WebSocket's without text.
var pings = map[string][]byte{
	"SPDY":      {0x80, 3, 0, 6, 0, 0, 0, 4, 0, 15, 66, 65},
	"WebSocket": {0x89, 0x80, 0, 0, 0, 0},
}

// through puts a link between the client and the server of a session's address. If the client uses
// kubelet, another one is between them that ends as kubelet's proxy does.
func through(t *testing.T, address, protocol string, flowing, kubelet bool) (*link, *url.URL) {
	t.Helper()
	u, err := url.Parse(address)
	testutil.Must(t, err)
	if kubelet {
		u.Host = (&link{t: t, server: u.Host, asKubelet: true}).listen(true)
	}
	l := &link{t: t, server: u.Host, ping: pings[protocol]}
	u.Host = l.listen(flowing)
	return l, u
}

// listen returns the link's address.
func (l *link) listen(flowing bool) string {
	l.t.Helper()
	var err error
	l.listener, err = net.Listen("tcp", "127.0.0.1:0")
	testutil.Must(l.t, err)
	l.flowing = make(chan struct{})
	if flowing {
		close(l.flowing)
	}
	l.running.Go(l.serve)
	l.t.Cleanup(func() {
		l.listener.Close()
		l.running.Wait()
	})
	return l.listener.Addr().String()
}

func (l *link) serve() {
	toClient, err := l.listener.Accept()
	if err != nil {
		return
	}
	defer toClient.Close()
	toServer, err := net.Dial("tcp", l.server)
	if err != nil {
		l.t.Error(err)
		return
	}
	defer toServer.Close()
	l.mu.Lock()
	l.toServer = toServer
	l.mu.Unlock()
	ended := make(chan struct{}, 2)
	l.running.Go(func() { l.copy(toServer, toClient, &l.mu); ended <- struct{}{} })
	l.running.Go(func() {
		l.copy(toClient, &pausing{Conn: toServer, flowing: l.flowing, left: 2 << 10}, nil)
		ended <- struct{}{}
	})
	<-ended
	if !l.asKubelet {
		<-ended
	}
}

// copy copies one direction and its end. checklocks does not follow a lock that may be nil.
//
// +checklocksignore
func (l *link) copy(to net.Conn, from io.Reader, sending sync.Locker) {
	buffer := make([]byte, 32<<10)
	for {
		n, err := from.Read(buffer)
		if sending != nil {
			sending.Lock()
		}
		_, writeErr := to.Write(buffer[:n])
		if sending != nil {
			sending.Unlock()
		}
		if err != nil || writeErr != nil {
			_ = to.(*net.TCPConn).CloseWrite()
			return
		}
	}
}

// pausing is a connection of which the first data is read at once: the answers to the client's
// requests. The rest waits.
type pausing struct {
	net.Conn
	flowing <-chan struct{}
	left    int
}

func (p *pausing) Read(b []byte) (int, error) {
	if p.left == 0 {
		<-p.flowing
		return p.Conn.Read(b)
	}
	n, err := p.Conn.Read(b[:min(len(b), p.left)])
	p.left -= n
	return n, err
}

// untilEnd waits until the only session waits for its client or has ended.
func (s *Server) untilEnd() {
	for ended := false; !ended; runtime.Gosched() {
		s.mu.Lock()
		ended = s.lingering.Len() == len(s.sessions)
		s.mu.Unlock()
	}
}

// resume sends pings, and then lets the client read.
func (l *link) resume() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for range 100 {
		_, _ = l.toServer.Write(l.ping) // fails if the server has closed the connection
		runtime.Gosched()
	}
	close(l.flowing)
}

// executors are the clients of kubelet, crictl and kubectl.
var executors = map[string]func(*url.URL) (client.Executor, error){
	"SPDY": func(u *url.URL) (client.Executor, error) {
		return client.NewSPDYExecutor(&rest.Config{}, http.MethodPost, u)
	},
	"WebSocket": func(u *url.URL) (client.Executor, error) {
		return client.NewWebSocketExecutor(&rest.Config{}, http.MethodGet, u.String())
	},
}

// reader counts a session's output. It may read slowly.
type reader struct {
	n    int
	slow bool
}

func (r *reader) Write(p []byte) (int, error) {
	for range len(p) {
		if r.slow {
			runtime.Gosched()
		}
		r.n++
	}
	return len(p), nil
}

// zeros writes n bytes to each stream, as a command does, and then fails with code 7.
func zeros(n int, s copying.IO) error {
	for _, to := range []io.Writer{s.Stdout, s.Stderr} {
		if _, err := io.CopyN(to, repeated(0), int64(n)); err != nil {
			return err
		}
	}
	return exitError(7)
}

// ending is a session of TestClientsGetEverything.
type ending struct {
	protocol        string // key of executors
	attach          bool
	n               int
	paused, kubelet bool // the client reads only after the session has ended, and after pings
	slow            bool
	talking         bool // the client sends without end
}

func (e ending) run(t *testing.T) {
	returned := make(chan struct{})
	s := serving(t, doing{exec: func(ctx context.Context, streams copying.IO) error {
		defer close(returned)
		return zeros(e.n, streams)
	}})
	var address string
	var err error
	if e.attach {
		address, err = s.Attach(&runtimeapi.AttachRequest{Stdin: e.talking, Stdout: true, Stderr: true})
	} else {
		address, err = s.Exec(&runtimeapi.ExecRequest{Stdin: e.talking, Stdout: true, Stderr: true})
	}
	testutil.Must(t, err)
	link, u := through(t, address, e.protocol, !e.paused, e.kubelet)
	executor, err := executors[e.protocol](u)
	testutil.Must(t, err)
	stdout, stderr := &reader{slow: e.slow}, &reader{slow: e.slow}
	options := client.StreamOptions{Stdout: stdout, Stderr: stderr}
	if e.talking {
		options.Stdin = repeated('y')
	}
	if e.paused {
		link.running.Go(func() {
			<-returned
			s.untilEnd()
			link.resume()
		})
	}
	err = executor.StreamWithContext(t.Context(), options)
	if stdout.n != e.n || stderr.n != e.n {
		t.Errorf("stdout has %d and stderr %d bytes, want %d", stdout.n, stderr.n, e.n)
	}
	wantCode(t, err, 7)
}

func wantCode(t *testing.T, err error, code int) {
	t.Helper()
	if exit, ok := errors.AsType[clientexec.CodeExitError](err); !ok || exit.Code != code {
		t.Errorf("the session ended with %v, want exit code %d", err, code)
	}
}

// Every byte and the exit code arrive, however the client reads.
func TestClientsGetEverything(t *testing.T) {
	for protocol := range executors {
		for _, e := range []ending{
			{}, {n: 1}, {n: 1, attach: true},
			{n: 4 << 20}, {n: 4 << 20, attach: true},
			{n: 1 << 20, slow: true},
			{n: 100 << 10, paused: true}, {n: 100 << 10, paused: true, attach: true},
			{n: 100 << 10, paused: true, kubelet: true},
			{n: 1, talking: true}, {n: 1 << 20, talking: true}, {n: 100 << 10, talking: true, paused: true},
		} {
			e.protocol = protocol
			t.Run(fmt.Sprintf("%+v", e), e.run)
		}
	}
}

func TestClientsGetMuch(t *testing.T) {
	testutil.Long(t)
	for protocol := range executors {
		ending{protocol: protocol, n: 1 << 30}.run(t)
	}
}

// Without traffic, and when the server stops, the client of an exec gets the code of a killed
// command, and the client of an attach gets the reason. Both would take a missing result as
// success.
func TestServerEndsSessions(t *testing.T) {
	for protocol, executor := range executors {
		for reason, idle := range map[string]time.Duration{"no traffic": 100 * time.Millisecond, errStopping.Error(): time.Hour} {
			t.Run(protocol+" "+reason, func(t *testing.T) {
				began := make(chan struct{})
				s, err := Listen(Config{Address: "127.0.0.1:0", IdleTimeout: idle, Log: slog.New(slog.DiscardHandler)},
					doing{exec: func(ctx context.Context, s copying.IO) error {
						select {
						case began <- struct{}{}:
							<-ctx.Done()
						case <-ctx.Done():
						}
						return ctx.Err()
					}})
				testutil.Must(t, err)
				stop := s.start(t)
				run := func(offer func() (string, error)) <-chan error {
					for {
						address, err := offer()
						testutil.Must(t, err)
						u, err := url.Parse(address)
						testutil.Must(t, err)
						x, err := executor(u)
						testutil.Must(t, err)
						ended := make(chan error, 1)
						go func() { ended <- x.StreamWithContext(t.Context(), client.StreamOptions{Stdout: io.Discard}) }()
						select {
						case <-began:
							return ended
						case <-ended: // on a busy machine, before it began
						}
					}
				}
				exec := run(func() (string, error) { return s.Exec(&runtimeapi.ExecRequest{Stdout: true}) })
				attach := run(func() (string, error) { return s.Attach(&runtimeapi.AttachRequest{Stdout: true}) })
				if idle == time.Hour {
					stop()
				}
				wantCode(t, <-exec, killedCode)
				if err := <-attach; err == nil || !strings.Contains(err.Error(), reason) {
					t.Errorf("the attach ended with %v, want %q", err, reason)
				}
			})
		}
	}
}

// waiting starts sessions that end at once, whose clients do not close their connections.
func waiting(t *testing.T, s *Server, n int) (clients []*spdyClient) {
	t.Helper()
	for range n {
		address, err := s.Attach(&runtimeapi.AttachRequest{Stdout: true})
		testutil.Must(t, err)
		c := s.spdyClient(t, address, remotecommand.StreamProtocolV4Name)
		c.readAll(c.open(remotecommand.StreamTypeError), func() { c.open(remotecommand.StreamTypeStdout) })
		clients = append(clients, c)
	}
	return clients
}

func TestClientsThatStayAreLimited(t *testing.T) {
	s := serving(t, doing{exec: func(context.Context, copying.IO) error { return nil }})
	s.limits.waiting = 2
	clients := waiting(t, s, 5)
	for _, c := range clients[:3] {
		c.ended()
	}
	for _, c := range clients[3:] { // the server still answers
		c.send(&spdy.PingFrame{Id: 1})
		for {
			f, err := c.framer.ReadFrame()
			testutil.Must(t, err)
			if _, ok := f.(*spdy.PingFrame); ok {
				break
			}
		}
	}
}

func TestSilentClientsAreGivenUp(t *testing.T) {
	s := serving(t, doing{exec: func(context.Context, copying.IO) error { return nil }})
	s.limits.silence = time.Millisecond
	waiting(t, s, 1)[0].ended()
}
