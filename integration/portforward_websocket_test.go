package integration

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"strings"
	"testing"

	"github.com/gorilla/websocket"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
)

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
