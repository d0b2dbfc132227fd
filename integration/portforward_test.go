package integration

import (
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"k8s.io/client-go/tools/portforward"
	clientspdy "k8s.io/client-go/transport/spdy"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// forward forwards a local port to one of the pod's, as kubectl does, until the test
// ends, and returns its address.
func (p *pod) forward(t *testing.T, port int) string {
	t.Helper()
	response, err := p.d.cri.PortForward(t.Context(), &runtimeapi.PortForwardRequest{PodSandboxId: p.id, Port: []int32{int32(port)}})
	must(t, err)
	address, err := url.Parse(response.Url)
	must(t, err)
	transport, upgrader, err := clientspdy.RoundTripperFor(plain())
	must(t, err)
	stop, ready, ended := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	dialer := clientspdy.NewDialer(upgrader, &http.Client{Transport: transport}, http.MethodPost, address)
	forwarder, err := portforward.NewOnAddresses(dialer, []string{"127.0.0.1"}, []string{fmt.Sprintf("0:%d", port)}, stop, ready, io.Discard, io.Discard)
	must(t, err)
	go func() { ended <- forwarder.ForwardPorts() }()
	select {
	case <-ready:
	case err := <-ended:
		t.Fatalf("forward port %d: %v", port, err)
	}
	t.Cleanup(func() {
		close(stop)
		<-ended
	})
	ports, err := forwarder.GetPorts()
	must(t, err)
	return fmt.Sprintf("127.0.0.1:%d", ports[0].Local)
}

func TestPortForward(t *testing.T) {
	d := startDaemon(t)
	for _, kind := range []struct {
		name string
		pod  *pod
	}{{"own network", d.runPod(t)}, {"host network", d.runPod(t, hostNetwork)}} {
		t.Run(kind.name, func(t *testing.T) {
			const port = 8391
			c := kind.pod.run(t, script(fmt.Sprintf("mkdir -p /srv && echo the page >/srv/index.html && head -c 5000000 /dev/urandom >/srv/big && exec httpd -f -p 127.0.0.1:%d -h /srv", port)))
			eventually(t, "the server listens", func() error {
				_, _, err := d.cri.ExecSync(t.Context(), c.id, []string{"wget", "-q", "-O-", fmt.Sprintf("http://127.0.0.1:%d/", port)}, 0)
				return err
			})
			address := kind.pod.forward(t, port)
			equal(t, "page", httpGet(t, "http://"+address+"/"), "the page\n")
			want := strings.Fields(c.exec(t, "sha256sum", "/srv/big"))[0]
			var running sync.WaitGroup
			for range 10 {
				running.Go(func() {
					equal(t, "checksum", fmt.Sprintf("%x", sha256.Sum256([]byte(httpGet(t, "http://"+address+"/big")))), want)
				})
			}
			running.Wait()
		})
	}
}

// A side that has said all can still listen. Localhost of a pod in the host's network
// is ours.
func TestPortForwardHalfClosed(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	server, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer server.Close()
	served := make(chan error, 1)
	go func() {
		conn, err := server.Accept()
		if err != nil {
			served <- err
			return
		}
		defer conn.Close()
		question, err := io.ReadAll(conn) // until the client's end
		if err == nil {
			_, err = fmt.Fprintf(conn, "you said %s", question)
		}
		served <- err
	}()
	conn, err := net.Dial("tcp", pod.forward(t, server.Addr().(*net.TCPAddr).Port))
	must(t, err)
	defer conn.Close()
	_, err = io.WriteString(conn, "hello")
	must(t, err)
	must(t, conn.(*net.TCPConn).CloseWrite())
	answer, err := io.ReadAll(conn)
	must(t, err)
	must(t, <-served)
	equal(t, "answer", string(answer), "you said hello")
}

// A port that nobody listens at ends the connection, and the next one is another try.
func TestPortForwardToClosedPort(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t)
	response, err := d.cri.PortForward(t.Context(), &runtimeapi.PortForwardRequest{PodSandboxId: pod.id, Port: []int32{8393}})
	must(t, err)
	address, err := url.Parse(response.Url)
	must(t, err)
	transport, upgrader, err := clientspdy.RoundTripperFor(plain())
	must(t, err)
	conn, _, err := clientspdy.NewDialer(upgrader, &http.Client{Transport: transport}, http.MethodPost, address).Dial(portforward.PortForwardProtocolV1Name)
	must(t, err)
	defer conn.Close()
	headers := http.Header{"Port": {"8393"}, "Requestid": {"1"}, "Streamtype": {"error"}}
	failure, err := conn.CreateStream(headers)
	must(t, err)
	headers.Set("streamType", "data")
	data, err := conn.CreateStream(headers)
	must(t, err)
	text, err := io.ReadAll(failure)
	must(t, err)
	for _, part := range []string{"8393", "127.0.0.1", "[::1]", "connection refused"} {
		if !strings.Contains(string(text), part) {
			t.Errorf("the error does not mention %q: %s", part, text)
		}
	}
	if n, err := data.Read(make([]byte, 1)); err == nil {
		t.Errorf("%d bytes came from a port that is closed", n)
	}
	if _, err := os.Stat(filepath.Join("/run/netns", "berth-"+pod.id)); err != nil {
		t.Error(err) // the pod is as it was
	}
}
