package integration

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
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

	"github.com/gorilla/websocket"
	"k8s.io/client-go/tools/portforward"
	clientspdy "k8s.io/client-go/transport/spdy"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/sessions"
)

func TestPortForward(t *testing.T) {
	d := harness.StartDaemon(t)
	for _, kind := range []struct {
		name string
		pod  *harness.Pod
	}{{"pod network", d.RunPod(t)}, {"host network", d.RunPod(t, harness.HostNetwork)}} {
		t.Run(kind.name, func(t *testing.T) {
			const port = 8391
			c := kind.pod.Run(t, harness.Script(fmt.Sprintf("mkdir -p /srv && echo the page >/srv/index.html && head -c 5000000 /dev/urandom >/srv/big && exec httpd -f -p 127.0.0.1:%d -h /srv", port)))
			harness.Eventually(t, "the server listens", func() error {
				_, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"wget", "-q", "-O-", fmt.Sprintf("http://127.0.0.1:%d/", port)}, 0)
				return err
			})
			address := sessions.ForwardPort(t, kind.pod, port)
			harness.Equal(t, "page", httpGet(t, "http://"+address+"/"), "the page\n")
			want := strings.Fields(c.Exec(t, "sha256sum", "/srv/big"))[0]
			var running sync.WaitGroup
			for range 10 {
				running.Go(func() {
					harness.Equal(t, "checksum", fmt.Sprintf("%x", sha256.Sum256([]byte(httpGet(t, "http://"+address+"/big")))), want)
				})
			}
			running.Wait()
		})
	}
}

// A side that has closed its direction can still receive. A pod on the host's network uses the
// machine's localhost.
func TestPortForwardHalfClosed(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	server, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Must(t, err)
	defer server.Close()
	served := make(chan error, 1)
	go func() {
		conn, err := server.Accept()
		if err != nil {
			served <- err
			return
		}
		defer conn.Close()
		question, err := io.ReadAll(conn) // until the client closes its direction
		if err == nil {
			_, err = fmt.Fprintf(conn, "you said %s", question)
		}
		served <- err
	}()
	conn := harness.Get(net.Dial("tcp", sessions.ForwardPort(t, pod, server.Addr().(*net.TCPAddr).Port)))(t)
	defer conn.Close()
	_, err = io.WriteString(conn, "hello")
	harness.Must(t, err)
	harness.Must(t, conn.(*net.TCPConn).CloseWrite())
	answer := harness.Get(io.ReadAll(conn))(t)
	harness.Must(t, <-served)
	harness.Equal(t, "answer", string(answer), "you said hello")
}

// A port without a listener ends the connection. The next connection works again.
func TestPortForwardToClosedPort(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t)
	response := harness.Get(d.Cri.PortForward(t.Context(), &runtimeapi.PortForwardRequest{PodSandboxId: pod.Id, Port: []int32{8393}}))(t)
	address := harness.Get(url.Parse(response.Url))(t)
	transport, upgrader, err := clientspdy.RoundTripperFor(sessions.Plain())
	harness.Must(t, err)
	conn, _, err := clientspdy.NewDialer(upgrader, &http.Client{Transport: transport}, http.MethodPost, address).Dial(portforward.PortForwardProtocolV1Name)
	harness.Must(t, err)
	defer conn.Close()
	headers := http.Header{"Port": {"8393"}, "Requestid": {"1"}, "Streamtype": {"error"}}
	failure := harness.Get(conn.CreateStream(headers))(t)
	headers.Set("streamType", "data")
	data := harness.Get(conn.CreateStream(headers))(t)
	text, err := io.ReadAll(failure)
	harness.Must(t, err)
	harness.WantText(t, "error", string(text), "8393", "127.0.0.1", "[::1]", "connection refused")
	if n, err := data.Read(make([]byte, 1)); err == nil {
		t.Errorf("read %d bytes from a closed port, want none", n)
	}
	if _, err := os.Stat(filepath.Join("/run/netns", "berth-"+pod.Id)); err != nil {
		t.Error(err) // the pod still works
	}
}

// forwardWebSocket opens a WebSocket session (v4.channel.k8s.io) for one port. It sends text, and
// returns the data and errors that arrive until the session ends.
func forwardWebSocket(t *testing.T, p *harness.Pod, port uint16, text string) (data, failure string) {
	t.Helper()
	response := harness.Get(p.D.Cri.PortForward(t.Context(), &runtimeapi.PortForwardRequest{PodSandboxId: p.Id, Port: []int32{int32(port)}}))(t)
	dialer := websocket.Dialer{Subprotocols: []string{"v4.channel.k8s.io"}}
	conn, answer, err := dialer.DialContext(t.Context(), "ws"+strings.TrimPrefix(response.Url, "http"), nil)
	harness.Must(t, err)
	defer conn.Close()
	defer answer.Body.Close()
	harness.Equal(t, "protocol", conn.Subprotocol(), "v4.channel.k8s.io")
	harness.Must(t, conn.WriteMessage(websocket.BinaryMessage, append([]byte{0}, text...)))
	var channels [2]bytes.Buffer // data, error
	for {
		_, message, err := conn.ReadMessage()
		if err != nil {
			break // the session has ended
		}
		if len(message) == 0 || int(message[0]) >= len(channels) {
			t.Fatalf("message for an unknown channel: %q", message)
		}
		channels[message[0]].Write(message[1:])
	}
	for i := range channels { // each channel begins with its port
		harness.Equal(t, fmt.Sprintf("port of channel %d", i), binary.LittleEndian.Uint16(append(channels[i].Next(2), 0, 0)), port)
	}
	return channels[0].String(), channels[1].String()
}

func TestPortForwardByWebSocket(t *testing.T) {
	const port = 8397
	d := harness.StartDaemon(t)
	pod := d.RunPod(t)
	c := pod.Run(t, harness.Script(fmt.Sprintf("mkdir -p /srv && head -c 300000 /dev/zero | tr '\\0' x >/srv/big && exec httpd -f -p 127.0.0.1:%d -h /srv", port)))
	harness.Eventually(t, "the server listens", func() error {
		_, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"wget", "-q", "-O", "/dev/null", fmt.Sprintf("http://127.0.0.1:%d/big", port)}, 0)
		return err
	})
	data, failure := forwardWebSocket(t, pod, port, "GET /big HTTP/1.0\r\n\r\n")
	harness.Equal(t, "error", failure, "")
	head, body, _ := strings.Cut(data, "\r\n\r\n")
	if !strings.Contains(head, " 200 OK") || body != strings.Repeat("x", 300000) {
		t.Errorf("the answer has the head %q and %d bytes", head, len(body))
	}
	data, failure = forwardWebSocket(t, pod, port+1, "nobody listens")
	harness.Equal(t, "data", data, "")
	if !strings.Contains(failure, "connection refused") || !strings.Contains(failure, fmt.Sprint(port+1)) {
		t.Errorf("the error of a closed port: %q", failure)
	}
}
