package streaming

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/moby/spdystream/spdy"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/cri-streaming/pkg/streaming/portforward"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	"k8s.io/streaming/pkg/httpstream"

	"berth/internal/testutil"
	"berth/sandbox/stream/copying"
	"berth/server/sessions/wire"
)

// doing is a Runtime that runs a test's function as each session.
type doing struct {
	exec    func(context.Context, copying.IO) error
	forward func(context.Context, io.ReadWriteCloser) error

	forwardPort func(context.Context, int32, io.ReadWriteCloser) error // instead of forward
}

func (d doing) Exec(ctx context.Context, _ wire.Session, s copying.IO) (int32, error) {
	return 0, d.exec(ctx, s)
}

func (d doing) Attach(ctx context.Context, _ wire.Session, s copying.IO) error {
	return d.exec(ctx, s)
}

func (d doing) PortForward(ctx context.Context, _ wire.Session, port int32, stream io.ReadWriteCloser) error {
	if d.forwardPort != nil {
		return d.forwardPort(ctx, port, stream)
	}
	return d.forward(ctx, stream)
}

// serving returns a server. The cleanup checks that the server stops and that no goroutine remains.
func serving(t *testing.T, d doing) *Server {
	t.Helper()
	return servingOverTLS(t, d, nil)
}

// servingOverTLS is serving with TLS certificates, or without TLS if they are nil.
func servingOverTLS(t *testing.T, d doing, certificates *tls.Config) *Server {
	t.Helper()
	s, err := Listen(Config{Address: "127.0.0.1:0", TLS: certificates, IdleTimeout: time.Hour, Log: slog.New(slog.DiscardHandler)}, d)
	testutil.Must(t, err)
	s.start(t)
	return s
}

// start serves until the test ends or stop is called.
func (s *Server) start(t *testing.T) (stop func()) {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	served := make(chan error)
	go func() { served <- s.Serve(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
		waitForNoneIn(t, "spdystream")
	})
	return stop
}

// waitForNoneIn waits until no goroutine runs in a package.
func waitForNoneIn(t *testing.T, name string) {
	t.Helper()
	stacks := make([]byte, 1<<20)
	deadline := time.Now().Add(20 * time.Second)
	for {
		n := runtime.Stack(stacks, true)
		if !strings.Contains(string(stacks[:n]), name) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("goroutines are left:\n%s", stacks[:n])
		}
		runtime.Gosched()
	}
}

// spdyClient sends the frames of a test.
type spdyClient struct {
	t      *testing.T
	conn   net.Conn
	framer *spdy.Framer
	last   spdy.StreamId
}

func (s *Server) spdyClient(t *testing.T, address, protocol string) *spdyClient {
	t.Helper()
	u, err := url.Parse(address)
	testutil.Must(t, err)
	conn, err := net.Dial("tcp", u.Host)
	testutil.Must(t, err)
	t.Cleanup(func() { conn.Close() })
	fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n%s: %s\r\n\r\n", u.Path, u.Host, httpstream.HeaderProtocolVersion, protocol)
	r := bufio.NewReader(conn)
	resp, err := http.ReadResponse(r, nil) //nolint:bodyclose // the connection
	if err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("%v %v", resp, err)
	}
	framer, err := spdy.NewFramer(conn, r)
	testutil.Must(t, err)
	return &spdyClient{t: t, conn: conn, framer: framer}
}

func (s *Server) execClient(t *testing.T, req *runtimeapi.ExecRequest) *spdyClient {
	t.Helper()
	address, err := s.Exec(req)
	testutil.Must(t, err)
	return s.spdyClient(t, address, remotecommand.StreamProtocolV4Name)
}

func (s *Server) forwardClient(t *testing.T) *spdyClient {
	t.Helper()
	address, err := s.PortForward(&runtimeapi.PortForwardRequest{PodSandboxId: "pod"})
	testutil.Must(t, err)
	return s.spdyClient(t, address, portforward.ProtocolV1Name)
}

func (c *spdyClient) send(f spdy.Frame) {
	c.t.Helper()
	if err := c.framer.WriteFrame(f); err != nil {
		c.t.Fatal(err)
	}
}

func (c *spdyClient) open(kind string, more ...string) spdy.StreamId {
	c.t.Helper()
	if c.last++; c.last%2 == 0 {
		c.last++
	}
	headers := http.Header{remotecommand.StreamType: {kind}}
	for i := 0; i < len(more); i += 2 {
		headers.Set(more[i], more[i+1])
	}
	c.send(&spdy.SynStreamFrame{StreamId: c.last, Headers: headers})
	return c.last
}

// forward opens the streams of one connection.
func (c *spdyClient) forward(request int) (data spdy.StreamId) {
	c.t.Helper()
	more := []string{portforward.PortHeader, "80", portforward.PortForwardRequestIDHeader, fmt.Sprint(request)}
	c.open(portforward.StreamTypeError, more...)
	return c.open(portforward.StreamTypeData, more...)
}

// ended reads until the server closes the connection.
func (c *spdyClient) ended() {
	c.t.Helper()
	if _, err := io.Copy(io.Discard, c.conn); err != nil && !errors.Is(err, net.ErrClosed) && !strings.Contains(err.Error(), "reset by peer") {
		c.t.Error(err)
	}
}

// Without the guard spdystream would hold up to 250 frames of 16 MiB.
func TestLongDataFramesAreSplit(t *testing.T) {
	sent := make([]byte, 3*maxData+1)
	_, _ = rand.Read(sent)
	var got []byte
	done := make(chan struct{})
	s := serving(t, doing{exec: func(_ context.Context, streams copying.IO) error {
		defer close(done)
		buffer := make([]byte, 2*len(sent))
		for {
			n, err := streams.Stdin.Read(buffer) // at most one frame's data
			if n > maxData {
				t.Errorf("a frame of %d bytes was queued", n)
			}
			got = append(got, buffer[:n]...)
			if err != nil {
				return nil
			}
		}
	}})
	c := s.execClient(t, &runtimeapi.ExecRequest{Stdin: true})
	c.open(remotecommand.StreamTypeError)
	c.send(&spdy.DataFrame{StreamId: c.open(remotecommand.StreamTypeStdin), Data: sent, Flags: spdy.DataFlagFin})
	<-done
	if !bytes.Equal(got, sent) {
		t.Errorf("the command got %d bytes, which differ from the %d sent bytes", len(got), len(sent))
	}
}

// A session accepts only the streams of its kind.
func TestSessionsWithOtherStreamsEnd(t *testing.T) {
	for name, kinds := range map[string][]string{
		"one more":           {remotecommand.StreamTypeError, remotecommand.StreamTypeStdin, remotecommand.StreamTypeStdin},
		"unknown stream":     {remotecommand.StreamTypeError, "mystery"},
		"no error stream":    {remotecommand.StreamTypeStdin, remotecommand.StreamTypeStdin},
		"unrequested stream": {remotecommand.StreamTypeError, remotecommand.StreamTypeResize},
	} {
		t.Run(name, func(t *testing.T) {
			s := serving(t, doing{exec: func(_ context.Context, streams copying.IO) error {
				_, err := io.Copy(io.Discard, streams.Stdin)
				return err
			}})
			c := s.execClient(t, &runtimeapi.ExecRequest{Stdin: true})
			for _, kind := range kinds {
				c.open(kind)
			}
			c.ended()
		})
	}
}

// A port-forward's handler accepts no stream after the client has hung up.
func TestHangUpDuringNewForwardLeaksNothing(t *testing.T) {
	s := serving(t, doing{forward: func(_ context.Context, stream io.ReadWriteCloser) error {
		_, err := io.Copy(io.Discard, stream)
		return err
	}})
	s.streamsTimeout = time.Second // the limit of the wait for the second stream of a pair
	for range 50 {
		c := s.forwardClient(t)
		for i := range maxForwards / 2 {
			c.forward(i)
		}
		c.conn.Close()
	}
}

// finish finishes the client's direction of a stream.
func (c *spdyClient) finish(stream spdy.StreamId) {
	c.t.Helper()
	c.send(&spdy.DataFrame{StreamId: stream, Flags: spdy.DataFlagFin})
}

// finished reads until the server has finished one of the streams, and removes it.
func (c *spdyClient) finished(streams map[spdy.StreamId]bool) {
	c.t.Helper()
	for before := len(streams); len(streams) == before; {
		f, err := c.framer.ReadFrame()
		testutil.Must(c.t, err)
		switch f := f.(type) {
		case *spdy.RstStreamFrame:
			delete(streams, f.StreamId)
		case *spdy.DataFrame:
			if f.Flags&spdy.DataFlagFin != 0 {
				delete(streams, f.StreamId)
			}
		}
	}
}

// Open connections are limited. Further ones are refused without harm to the others. Finished ones
// make room.
func TestConcurrentForwardsAreLimited(t *testing.T) {
	s := serving(t, doing{forward: func(_ context.Context, stream io.ReadWriteCloser) error {
		_, err := io.Copy(stream, stream)
		return errors.Join(err, stream.Close())
	}})
	c := s.forwardClient(t)
	request, open := 0, map[spdy.StreamId]bool{}
	forward := func() spdy.StreamId {
		request++
		data := c.forward(request)
		c.finish(data - 2) // the error stream
		open[data] = true
		return data
	}
	for range 2 * maxForwards {
		c.finish(forward())
		c.finished(open)
	}
	for range maxForwards {
		forward()
	}
	for range maxForwardStreams {
		forward()
		c.finished(open) // one of them is refused
	}
	for len(open) > 0 {
		for data := range open {
			c.finish(data)
			break
		}
		c.finished(open)
	}
	for range maxForwardStreams + 1 {
		c.open(portforward.StreamTypeError, portforward.PortHeader, "80")
	}
	c.ended()
}

// Data for a stream without reader does not block others.
func TestUnreadDataBlocksNothing(t *testing.T) {
	s := serving(t, doing{forward: func(_ context.Context, stream io.ReadWriteCloser) error {
		_, err := io.Copy(stream, stream)
		return errors.Join(err, stream.Close())
	}})
	c := s.forwardClient(t)
	data := c.forward(1)
	for range 1000 {
		c.send(&spdy.DataFrame{StreamId: data - 2, Data: []byte("for the error stream")})
	}
	c.send(&spdy.DataFrame{StreamId: data, Data: []byte("hello")})
	for {
		f, err := c.framer.ReadFrame()
		testutil.Must(t, err)
		if d, ok := f.(*spdy.DataFrame); ok && string(d.Data) == "hello" {
			return
		}
	}
}

func TestControlFramesAreBounded(t *testing.T) {
	for name, frame := range map[string]spdy.Frame{
		"a long header": &spdy.SynStreamFrame{StreamId: 1, Headers: http.Header{remotecommand.StreamType: {strings.Repeat("x", 1<<19)}}}, // 1 KiB when compressed
		"headers later": &spdy.HeadersFrame{StreamId: 1, Headers: http.Header{}},
		"a reply":       &spdy.SynReplyFrame{StreamId: 1, Headers: http.Header{}},
		"many settings": &spdy.SettingsFrame{FlagIdValues: make([]spdy.SettingsFlagIdValue, maxControl/8)},
	} {
		t.Run(name, func(t *testing.T) {
			c := serving(t, doing{}).forwardClient(t)
			_ = c.framer.WriteFrame(frame) // the server may close the connection before it has all data
			c.ended()
		})
	}
}

// discarding is a connection that discards all data.
type discarding struct{ net.Conn }

func (discarding) Write(p []byte) (int, error) { return len(p), nil }
func (discarding) Close() error                { return nil }

// FuzzSPDYGuard checks that spdystream's parser finds only allowed frames behind the guard.
func FuzzSPDYGuard(f *testing.F) {
	f.Add(said(f, &spdy.SynStreamFrame{StreamId: 1, Headers: http.Header{remotecommand.StreamType: {"stdin"}}},
		&spdy.DataFrame{StreamId: 1, Data: make([]byte, 2*maxData+1), Flags: spdy.DataFlagFin},
		&spdy.SynStreamFrame{StreamId: 3, Headers: http.Header{remotecommand.StreamType: {"error"}}},
		&spdy.RstStreamFrame{StreamId: 3, Status: spdy.Cancel}))
	f.Add(said(f, &spdy.PingFrame{Id: 1}, &spdy.SettingsFrame{FlagIdValues: make([]spdy.SettingsFlagIdValue, 2)}, &spdy.GoAwayFrame{}))
	f.Add(append([]byte{0x80, 3, 0, 3, 0, 0, 0, 16, 0, 0, 0, 1, 0, 0, 0, 1}, 0, 0, 0, 1, 0, 255, 255, 255)) // a reset with trailing data
	f.Fuzz(func(t *testing.T, data []byte) {
		rules := commandRules(remotecommand.Options{Stdin: true}, remotecommand.StreamProtocolV4Name)
		allowed := len(rules.once)
		g, err := newSPDYGuard(discarding{}, bufio.NewReader(bytes.NewReader(data)), rules, slog.New(slog.DiscardHandler))
		testutil.Must(t, err)
		framer, err := spdy.NewFramer(g, g)
		testutil.Must(t, err)
		for {
			frame, err := framer.ReadFrame()
			if err != nil {
				return
			}
			switch frame := frame.(type) {
			case *spdy.SynStreamFrame:
				if allowed--; allowed < 0 {
					t.Fatal("more streams than expected")
				}
				testutil.Must(t, framer.WriteFrame(&spdy.SynReplyFrame{StreamId: frame.StreamId, Headers: http.Header{}}))
			case *spdy.DataFrame:
				if len(frame.Data) > maxData {
					t.Fatalf("a frame of %d bytes", len(frame.Data))
				}
			case *spdy.SynReplyFrame, *spdy.HeadersFrame:
				t.Fatalf("%T got through", frame)
			}
		}
	})
}

// said encodes the frames of a client.
func said(f *testing.F, frames ...spdy.Frame) []byte {
	f.Helper()
	var b bytes.Buffer
	framer, err := spdy.NewFramer(&b, &b)
	testutil.Must(f, err)
	for _, frame := range frames {
		testutil.Must(f, framer.WriteFrame(frame))
	}
	return b.Bytes()
}

// A client takes a reset before the answer to its stream for a refusal, and ignores the error.
func TestFailedForwardsAreAnsweredFirst(t *testing.T) {
	s := serving(t, doing{forward: func(context.Context, io.ReadWriteCloser) error { return errors.New("refused") }})
	c := s.forwardClient(t)
	for i := range 200 {
		data := c.forward(i)
		c.send(&spdy.DataFrame{StreamId: data - 2, Flags: spdy.DataFlagFin})
		for answered := false; ; {
			f, err := c.framer.ReadFrame()
			testutil.Must(t, err)
			if reply, ok := f.(*spdy.SynReplyFrame); ok && reply.StreamId == data {
				answered = true
			}
			if reset, ok := f.(*spdy.RstStreamFrame); ok && reset.StreamId == data {
				if !answered {
					t.Fatalf("connection %d is reset before it is answered", i)
				}
				break
			}
		}
	}
}
