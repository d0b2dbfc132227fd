package streaming

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"testing"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	clientspdy "k8s.io/client-go/transport/spdy"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"

	"berth/internal/testutil"
)

// forwardLocally forwards local ports to ports of a pod. It returns their addresses, and the session's
// end.
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

func (s *Server) forwardURL(t *testing.T, ports ...int32) string {
	t.Helper()
	address, err := s.PortForward(&runtimeapi.PortForwardRequest{PodSandboxId: "pod", Port: ports})
	testutil.Must(t, err)
	return address
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
