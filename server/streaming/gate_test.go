package streaming

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"syscall"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	"k8s.io/streaming/pkg/httpstream"

	"berth/internal/testutil"
	"berth/sandbox/stream/copying"
	"berth/server/sessions/wire"
)

func TestRequested(t *testing.T) {
	for name, test := range map[string]struct{ data, kind, token string }{
		"request":          {"GET /exec/TOKEN HTTP/1.1\r\nHost: x\r\n\r\n", "exec", "TOKEN"},
		"parameters":       {"POST /attach/TOKEN?a=/b HTTP/1.1\r\n", "attach", "TOKEN"},
		"no end of line":   {"GET /exec/TOKEN HTTP/1.1", "exec", "TOKEN"},
		"other path":       {"GET /exec HTTP/1.1\r\n", "", ""},
		"longer path":      {"GET /exec/TOKEN/more HTTP/1.1\r\n", "", ""},
		"absolute address": {"GET http://x/exec/TOKEN HTTP/1.1\r\n", "", ""},
		"TLS":              {"\x16\x03\x01\x02\x00\x01\x00\x01", "", ""},
		"nothing":          {"", "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			if kind, token := requested([]byte(test.data)); kind != test.kind || token != test.token {
				t.Errorf("kind %q, token %q", kind, token)
			}
		})
	}
}

func (g *gate) unidentified() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.silent.Len() + g.spoken.Len()
}

// keep sets how many connections without a token are kept.
func (g *gate) keep(most int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.most = most
}

func dial(t *testing.T, s *Server) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", s.gate.Addr().String())
	testutil.Must(t, err)
	t.Cleanup(func() { conn.Close() })
	return conn
}

// intrude connects without a token and sends data. It returns nil if the server has already reset
// the connection, which happens on a busy machine.
func intrude(t *testing.T, s *Server, say string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", s.gate.Addr().String())
	if err == nil {
		t.Cleanup(func() { conn.Close() })
		_, err = io.WriteString(conn, say)
	}
	if errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) {
		return nil
	}
	testutil.Must(t, err)
	return conn
}

// wasReset waits until the server has reset a connection without an answer.
func wasReset(t *testing.T, conn net.Conn) {
	t.Helper()
	_ = conn.SetReadDeadline(time.Now().Add(20 * time.Second))
	if n, err := conn.Read(make([]byte, 1)); n > 0 || errors.Is(err, context.DeadlineExceeded) || isTimeout(err) {
		t.Fatalf("the connection was not reset: %d bytes, %v", n, err)
	}
}

func isTimeout(err error) bool {
	var e net.Error
	return errors.As(err, &e) && e.Timeout()
}

func idle(_ context.Context, s copying.IO) error {
	_, err := io.Copy(io.Discard, s.Stdin)
	return err
}

// Without an outstanding token no connection is accepted. Earlier connections are reset when the
// first session is offered.
func TestNoConnectionWithoutOutstandingToken(t *testing.T) {
	s := serving(t, doing{exec: idle})
	early := []net.Conn{dial(t, s), dial(t, s), dial(t, s)}
	if n := s.gate.unidentified(); n != 0 {
		t.Errorf("%d connections have been accepted", n)
	}
	s.execClient(t, &runtimeapi.ExecRequest{Stdin: true})
	for _, conn := range early {
		wasReset(t, conn)
	}
}

// A used URL gets an answer for some time.
func TestUsedTokenIsNotFound(t *testing.T) {
	s := serving(t, doing{exec: idle})
	address, err := s.Exec(&runtimeapi.ExecRequest{Stdin: true})
	testutil.Must(t, err)
	s.spdyClient(t, address, remotecommand.StreamProtocolV4Name)
	response, err := http.Get(address)
	testutil.Must(t, err)
	response.Body.Close()
	if response.StatusCode != http.StatusNotFound || !response.Close {
		t.Errorf("%s, the connection stays %t", response.Status, !response.Close)
	}
}

// Connections without a token are reset, oldest first. Clients with a token get their session.
func TestConnectionsWithoutTokenAreLimited(t *testing.T) {
	for name, say := range map[string]string{"silent": "", "half a request": "GET /exec/AAAA HTTP/1.1\r\nHost:", "not HTTP": "\x16\x03\x01"} {
		t.Run(name, func(t *testing.T) {
			s := serving(t, doing{exec: idle})
			s.gate.keep(4)
			if _, err := s.Exec(&runtimeapi.ExecRequest{Stdin: true}); err != nil { // opens the gate
				t.Fatal(err)
			}
			var others []net.Conn
			for i := range 20 {
				others = append(others, intrude(t, s, say))
				if i%5 == 4 {
					s.execClient(t, &runtimeapi.ExecRequest{Stdin: true})
				}
			}
			for _, conn := range others[:len(others)-s.gate.most] {
				if conn != nil {
					wasReset(t, conn)
				}
			}
			if n := s.gate.unidentified(); n > s.gate.most {
				t.Errorf("%d connections without a token are kept, %d is the limit", n, s.gate.most)
			}
		})
	}
}

// With TLS the gate cannot see the request. Connections with an unfinished handshake are reset,
// oldest first. A client with a token still gets its session.
func TestConnectionsWithoutTokenAreLimitedWithTLS(t *testing.T) {
	for name, say := range map[string]string{"silent": "", "half a handshake": "\x16\x03\x01\x02\x00\x01"} {
		t.Run(name, func(t *testing.T) {
			certificates, client := testTLS(t)
			s := servingOverTLS(t, doing{exec: idle}, certificates)
			s.gate.keep(4)
			if _, err := s.Exec(&runtimeapi.ExecRequest{Stdin: true}); err != nil { // opens the gate
				t.Fatal(err)
			}
			var others []net.Conn
			for i := range 12 {
				others = append(others, intrude(t, s, say))
				if i%6 == 5 {
					s.upgradeOverTLS(t, client)
				}
			}
			for _, conn := range others[:len(others)-s.gate.most] {
				if conn != nil {
					wasReset(t, conn)
				}
			}
			if n := s.gate.unidentified(); n > s.gate.most {
				t.Errorf("%d connections without a token are kept, %d is the limit", n, s.gate.most)
			}
		})
	}
}

// testTLS returns a server's certificates, and the configuration of a client that trusts them.
func testTLS(t *testing.T) (server, client *tls.Config) {
	t.Helper()
	s := httptest.NewTLSServer(http.NotFoundHandler())
	defer s.Close()
	client = s.Client().Transport.(*http.Transport).TLSClientConfig.Clone()
	client.ServerName, client.NextProtos = "example.com", nil // the certificate's
	return &tls.Config{Certificates: s.TLS.Certificates}, client
}

// upgradeOverTLS starts a session as a client with a token.
func (s *Server) upgradeOverTLS(t *testing.T, client *tls.Config) {
	t.Helper()
	address, err := s.Exec(&runtimeapi.ExecRequest{Stdin: true})
	testutil.Must(t, err)
	u, err := url.Parse(address)
	testutil.Must(t, err)
	conn, err := tls.Dial("tcp", u.Host, client)
	testutil.Must(t, err)
	t.Cleanup(func() { conn.Close() })
	fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n%s: %s\r\n\r\n", u.Path, u.Host,
		httpstream.HeaderProtocolVersion, remotecommand.StreamProtocolV4Name)
	response, err := http.ReadResponse(bufio.NewReader(conn), nil) //nolint:bodyclose // the connection
	if err != nil || response.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("%v %v", response, err)
	}
}

// A client that has sent its request is not reset, even if the server has not read it.
func TestUnreadRequestWithTokenIsKept(t *testing.T) {
	s := serving(t, doing{exec: idle})
	address, err := s.PortForward(&runtimeapi.PortForwardRequest{PodSandboxId: "pod"})
	testutil.Must(t, err)
	u, err := url.Parse(address)
	testutil.Must(t, err)
	ours, theirs := connected(t)
	s.gate.keep(1)
	s.gate.mu.Lock()
	ours.gate, ours.in, ours.place = s.gate, &s.gate.silent, s.gate.silent.PushBack(ours)
	s.gate.mu.Unlock()
	if _, err := fmt.Fprintf(theirs, "GET %s HTTP/1.1\r\n", u.Path); err != nil {
		t.Fatal(err)
	}
	for s.gate.unidentified() > 0 { // until the data has arrived
		if victim, _ := s.gate.surplus(); victim != nil && len(victim.peek()) > 0 {
			t.Fatal("the connection was not reset")
		}
	}
	buffer := make([]byte, 3)
	if _, err := io.ReadFull(ours, buffer); err != nil || string(buffer) != "GET" {
		t.Errorf("%q, %v", buffer, err)
	}
}

// A token identifies one connection. Other connections with the same request do not count as
// clients.
func TestTokenIsClaimedOnce(t *testing.T) {
	var all tokens
	token, err := all.add(wire.Session{Kind: wire.Exec})
	testutil.Must(t, err)
	if all.claim("attach", token) || all.claim("exec", "another") {
		t.Error("another token was claimed")
	}
	if !all.claim("exec", token) || all.claim("exec", token) {
		t.Error("a token is not claimed exactly once")
	}
	if _, ok := all.take("exec", token); !ok {
		t.Error("a claimed token is not valid")
	}
}

// Connections do not use the reserved descriptors. A client gets through when other descriptors are
// free again.
func TestConnectionsLeaveDescriptors(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	testutil.Must(t, err)
	defer listener.Close()
	var all tokens
	g, err := newGate(listener.(*net.TCPListener), &all, false, slog.New(slog.DiscardHandler))
	testutil.Must(t, err)
	if _, err := g.offer(func() (string, error) { return all.add(wire.Session{Kind: wire.Exec}) }); err != nil {
		t.Fatal(err)
	}
	connect := func() (ours *connection, theirs net.Conn) {
		theirs, err := net.Dial("tcp", listener.Addr().String())
		testutil.Must(t, err)
		t.Cleanup(func() { theirs.Close() })
		accepted, err := g.listener.AcceptTCP()
		testutil.Must(t, err)
		return g.admit(accepted), theirs
	}
	enough := g.quota
	g.quota = copying.FDQuota{}
	ours, theirs := connect()
	if ours != nil {
		t.Error("a reserved descriptor is used")
	}
	wasReset(t, theirs)
	g.quota = enough
	if ours, _ = connect(); ours == nil {
		t.Fatal("a connection was reset despite free descriptors")
	}
	if err := ours.Close(); err != nil || g.unidentified() != 0 {
		t.Errorf("%d connections remain after all were closed: %v", g.unidentified(), err)
	}
}
