package streaming

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"testing"

	"github.com/moby/spdystream/spdy"
	"golang.org/x/sys/unix"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	clientspdy "k8s.io/client-go/transport/spdy"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"

	"berth/internal/errdefs"
	"berth/internal/testutil"
)

// Ports of a pod whose applications behave differently.
const (
	echoes       = iota + 1 // returns what it gets
	resets                  // sends some data and resets the connection
	resetsAtOnce            // resets each connection that it has accepted
	refuses
)

// pod is a pod with these ports.
func pod(ctx context.Context, port int32, client io.ReadWriteCloser) error {
	switch port {
	case echoes:
		_, err := io.Copy(client, client)
		return errors.Join(err, client.Close())
	case resets:
		_, _ = client.Write([]byte("some"))
		return errors.New("connection reset by peer")
	case resetsAtOnce: // before anything is read or written
		return errdefs.Internal("forward: %w", &net.OpError{Op: "read", Err: os.NewSyscallError("read", unix.ECONNRESET)})
	}
	return errors.New("connection refused")
}

// forwardLocally forwards local ports to ports of a pod. It returns their addresses, and the
// session's end.
func forwardLocally(t *testing.T, u *url.URL, ports ...int) (local []string, ended <-chan error) {
	t.Helper()
	transport, upgrader, err := clientspdy.RoundTripperFor(&rest.Config{})
	testutil.Must(t, err)
	dialer := clientspdy.NewDialer(upgrader, &http.Client{Transport: transport}, http.MethodPost, u)
	var pairs []string
	for _, port := range ports {
		pairs = append(pairs, fmt.Sprintf("0:%d", port))
	}
	ready, done := make(chan struct{}), make(chan error, 1)
	f, err := portforward.NewOnAddresses(dialer, []string{"127.0.0.1"}, pairs, t.Context().Done(), ready, io.Discard, io.Discard)
	testutil.Must(t, err)
	go func() { done <- f.ForwardPorts() }()
	select {
	case <-ready:
	case err := <-done:
		t.Fatal(err)
	}
	forwarded, err := f.GetPorts()
	testutil.Must(t, err)
	for _, port := range forwarded {
		local = append(local, fmt.Sprintf("127.0.0.1:%d", port.Local))
	}
	return local, done
}

func connect(t *testing.T, address string) *net.TCPConn {
	t.Helper()
	conn, err := net.Dial("tcp", address)
	testutil.Must(t, err)
	t.Cleanup(func() { conn.Close() })
	return conn.(*net.TCPConn)
}

// wantEcho sends data and waits for it.
func wantEcho(t *testing.T, conn io.ReadWriter) {
	t.Helper()
	sent, got := []byte("hello"), make([]byte, 5)
	_, err := conn.Write(sent)
	testutil.Must(t, err)
	if _, err := io.ReadFull(conn, got); err != nil || string(got) != string(sent) {
		t.Fatalf("%q, %v", got, err)
	}
}

func (s *Server) forwardURL(t *testing.T, ports ...int32) string {
	t.Helper()
	address, err := s.PortForward(&runtimeapi.PortForwardRequest{PodSandboxId: "pod", Port: ports})
	testutil.Must(t, err)
	return address
}

// A connection that fails ends no other one of its session, and later ones work.
func TestForwardsFailAlone(t *testing.T) {
	s := serving(t, doing{forwardPort: pod})
	u, err := url.Parse(s.forwardURL(t))
	testutil.Must(t, err)
	local, ended := forwardLocally(t, u, echoes, resets, refuses)
	first := connect(t, local[0])
	wantEcho(t, first)
	for range 3 {
		for failing, want := range map[string]string{local[1]: "some", local[2]: ""} {
			if got, err := io.ReadAll(connect(t, failing)); err != nil || string(got) != want {
				t.Errorf("%q, %v, want %q", got, err, want)
			}
		}
		wantEcho(t, first)
		wantEcho(t, connect(t, local[0]))
	}
	select {
	case err := <-ended:
		t.Errorf("the session ended: %v", err)
	default:
	}
}

// The same for the ports of a WebSocket, each of which has a channel for its error.
func TestWebSocketForwardsFailAlone(t *testing.T) {
	s := serving(t, doing{forwardPort: pod})
	c := dialWebSocket(t, s.forwardURL(t, echoes, resets, refuses), remotecommand.StreamProtocolV4Name)
	data := [6]string{}
	hear := func() {
		_, message, err := c.conn.ReadMessage()
		testutil.Must(t, err)
		data[message[0]] += string(message[1:])
	}
	for data[3] == "" || data[5] == "" || len(data[3]) <= 2 || len(data[5]) <= 2 { // behind the port
		hear()
	}
	c.say(0, []byte("hello"))
	for data[0][2:] != "hello" {
		hear()
	}
	if data[2][2:] != "some" || data[4][2:] != "" {
		t.Errorf("the other ports sent %q and %q", data[2], data[4])
	}
}

// An application that resets its first connection has accepted it, so the session goes on.
func TestFirstForwardIsReset(t *testing.T) {
	s := serving(t, doing{forwardPort: pod})
	u, err := url.Parse(s.forwardURL(t))
	testutil.Must(t, err)
	local, ended := forwardLocally(t, u, resetsAtOnce, echoes)
	if got, err := io.ReadAll(connect(t, local[0])); err != nil || len(got) > 0 {
		t.Errorf("%q, %v", got, err)
	}
	wantEcho(t, connect(t, local[1]))
	select {
	case err := <-ended:
		t.Errorf("the session ended: %v", err)
	default:
	}
}

// A session whose first connection fails is of no use. The client gets the reason.
func TestFirstForwardFails(t *testing.T) {
	s := serving(t, doing{forwardPort: pod})
	u, err := url.Parse(s.forwardURL(t))
	testutil.Must(t, err)
	local, ended := forwardLocally(t, u, refuses)
	connect(t, local[0])
	if err := <-ended; !errors.Is(err, portforward.ErrLostConnectionToPod) {
		t.Errorf("the session ended with %v", err)
	}
}

// A pod that sends without end does not send to a client that has left.
func TestForwardEndsWithItsClient(t *testing.T) {
	ended := make(chan error, 1)
	s := serving(t, doing{forward: func(ctx context.Context, stream io.ReadWriteCloser) error {
		for ctx.Err() == nil {
			if _, err := stream.Write(make([]byte, 1<<10)); err != nil {
				break
			}
		}
		ended <- ctx.Err()
		return ctx.Err()
	}})
	c := s.forwardClient(t)
	go func() { _, _ = io.Copy(io.Discard, c.conn) }()
	c.send(&spdy.RstStreamFrame{StreamId: c.forward(1), Status: spdy.Cancel})
	if err := <-ended; err == nil {
		t.Error("the pod's data was refused in another way")
	}
}

// Every byte of a connection arrives, although the client reads only after the pod has closed it.
func TestForwardsAreComplete(t *testing.T) {
	const n = 100 << 10
	for _, kubelet := range []bool{false, true} {
		for _, protocol := range []string{"SPDY", "WebSocket"} {
			t.Run(fmt.Sprintf("%s, kubelet %t", protocol, kubelet), func(t *testing.T) {
				returned := make(chan struct{})
				s := serving(t, doing{forward: func(_ context.Context, stream io.ReadWriteCloser) error {
					defer close(returned)
					_, err := io.CopyN(stream, repeated('x'), n)
					return errors.Join(err, stream.Close())
				}})
				link, u := through(t, s.forwardURL(t, 80), protocol, false, kubelet)
				link.running.Go(func() {
					<-returned
					if protocol == "WebSocket" {
						s.untilEnd() // all ports have ended, and so has the session
					}
					link.resume()
				})
				var got int
				if protocol == "SPDY" {
					local, _ := forwardLocally(t, u, 80)
					data, err := io.ReadAll(connect(t, local[0]))
					testutil.Must(t, err)
					got = len(data)
				} else {
					c := dialWebSocket(t, u.String(), remotecommand.StreamProtocolV4Name)
					got = len(c.hear()[0]) - 2 // the port
				}
				if got != n {
					t.Errorf("got %d bytes, want %d", got, n)
				}
			})
		}
	}
}
