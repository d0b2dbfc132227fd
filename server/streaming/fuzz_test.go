package streaming

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/moby/spdystream/spdy"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/cri-streaming/pkg/streaming/portforward"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"

	"berth/internal/testutil"
	"berth/sandbox/stream/copying"
	"berth/server/sessions/wire"
)

// counted runs sessions that accept any input, and counts them.
type counted struct {
	sessions atomic.Int32
	badPort  atomic.Int32
}

func (c *counted) Exec(_ context.Context, _ wire.Session, s copying.IO) (int32, error) {
	c.sessions.Add(1)
	if s.Stdin != nil {
		_, _ = io.Copy(io.Discard, s.Stdin)
	}
	if s.Stdout != nil {
		_, _ = io.WriteString(s.Stdout, "output")
	}
	return 3, nil
}

func (c *counted) Attach(ctx context.Context, session wire.Session, s copying.IO) error {
	_, err := c.Exec(ctx, session, s)
	return err
}

func (c *counted) PortForward(_ context.Context, _ wire.Session, port int32, stream io.ReadWriteCloser) error {
	if port < 1 || port > 65535 {
		c.badPort.Store(port)
	}
	_, err := io.Copy(stream, stream)
	return err
}

// FuzzConnections sends arbitrary bytes to the server, with or without the path of a session. Only
// the token starts a session, once, and the connection ends after the client's data.
func FuzzConnections(f *testing.F) {
	runtime := &counted{}
	s, err := Listen(Config{Address: "127.0.0.1:0", IdleTimeout: time.Hour, Log: slog.New(slog.DiscardHandler)}, runtime)
	testutil.Must(f, err)
	s.streamsTimeout = time.Hour // no session ends by this timeout
	ctx, stop := context.WithCancel(context.Background())
	served := make(chan error)
	go func() { served <- s.Serve(ctx) }()
	f.Cleanup(func() {
		stop()
		if err := <-served; err != nil {
			f.Error(err)
		}
	})

	const headers = "Connection: Upgrade\r\nUpgrade: %s\r\nX-Stream-Protocol-Version: %s\r\nSec-WebSocket-Protocol: %s\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
	streams := said(f, &spdy.SynStreamFrame{StreamId: 1, Headers: http.Header{remotecommand.StreamType: {"error"}}},
		&spdy.SynStreamFrame{StreamId: 3, Headers: http.Header{remotecommand.StreamType: {"stdin"}}},
		&spdy.DataFrame{StreamId: 3, Data: []byte("x"), Flags: spdy.DataFlagFin})
	pair := http.Header{portforward.PortHeader: {"-1"}, portforward.PortForwardRequestIDHeader: {"0"}, remotecommand.StreamType: {"error"}}
	forward := said(f, &spdy.SynStreamFrame{StreamId: 1, Headers: pair})
	f.Add(uint8(0), true, "POST", "", fmt.Sprintf(headers, "SPDY/3.1", remotecommand.StreamProtocolV4Name, ""), streams)
	f.Add(uint8(1), true, "POST", "", fmt.Sprintf(headers, "SPDY/3.1", remotecommand.StreamProtocolV1Name, ""), streams[:20])
	f.Add(uint8(2), true, "POST", "?port=99999", fmt.Sprintf(headers, "SPDY/3.1", portforward.ProtocolV1Name, ""), forward)
	f.Add(uint8(0), true, "GET", "", fmt.Sprintf(headers, "websocket", "", remotecommand.StreamProtocolV5Name), []byte("\x82\x83\x00\x00\x00\x00\x00hi\x88\x80\x00\x00\x00\x00"))
	f.Add(uint8(1), true, "GET", "", fmt.Sprintf(headers, "websocket", "", "base64.channel.k8s.io"), []byte("\x81\x83\x00\x00\x00\x000!!"))
	f.Add(uint8(2), true, "GET", "?port=0&port=x", fmt.Sprintf(headers, "websocket", "", "v4.channel.k8s.io"), []byte("\x82\xff"))
	f.Add(uint8(0), false, "GET", "/exec/../exec/AAAA", "Content-Length: 5\r\n", []byte("xGET / HTTP/1.1\r\n\r\n"))
	f.Fuzz(func(t *testing.T, kind uint8, known bool, method, more, header string, body []byte) {
		target := more
		if offered := s.offered(t, kind); known { // without a token the server accepts no connection
			target = offered + more
		}
		runtime.sessions.Store(0)
		exchange(t, s.gate.Addr().String(), bytes.Join([][]byte{[]byte(method + " " + target + " HTTP/1.1\r\nHost: x\r\n" + header + "\r\n"), body}, nil))
		if n := runtime.sessions.Load(); n > 1 || n == 1 && !known {
			t.Errorf("%d sessions", n)
		}
		if port := runtime.badPort.Swap(0); port != 0 {
			t.Errorf("port %d", port)
		}
	})
}

// offered returns the path of a session.
func (s *Server) offered(t *testing.T, kind uint8) string {
	t.Helper()
	var address string
	var err error
	switch kind % 3 {
	case 0:
		address, err = s.Exec(&runtimeapi.ExecRequest{Stdin: true, Cmd: []string{"x"}})
	case 1:
		address, err = s.Attach(&runtimeapi.AttachRequest{Stdin: true, Stdout: true, Tty: true})
	case 2:
		address, err = s.PortForward(&runtimeapi.PortForwardRequest{PodSandboxId: "pod", Port: []int32{80}})
	}
	if err != nil && strings.Contains(err.Error(), "are unused") { // too many unused tokens of earlier inputs
		s.tokens.forgetAll()
		return s.offered(t, kind)
	}
	testutil.Must(t, err)
	u, err := url.Parse(address)
	testutil.Must(t, err)
	return u.Path
}

func (t *tokens) forgetAll() {
	t.mu.Lock()
	defer t.mu.Unlock()
	clear(t.waiting)
}

// exchange sends data and waits for the end of the connection.
func exchange(t *testing.T, address string, data []byte) {
	t.Helper()
	conn, err := net.Dial("tcp", address)
	testutil.Must(t, err)
	defer conn.Close()
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		_, _ = conn.Write(data) // the server may close the connection before it has all data
		_ = conn.(*net.TCPConn).CloseWrite()
	}()
	_ = conn.SetReadDeadline(time.Now().Add(9 * time.Second)) // the fuzzer's limit is ten
	if _, err := io.Copy(io.Discard, conn); err != nil && !strings.Contains(err.Error(), "reset") {
		t.Errorf("the connection does not end: %v", err)
	}
	<-sent
}
