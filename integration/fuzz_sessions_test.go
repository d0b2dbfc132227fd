package integration

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/gorilla/websocket"
	"github.com/moby/spdystream/spdy"
	"k8s.io/client-go/tools/remotecommand"

	"berth/integration/harness"
	"berth/integration/sessions"
)

// sessionTime limits a session of the fuzzer, because some sessions never end.
const sessionTime = 300 * time.Millisecond

// unusualPorts are ports that a client may request after it has connected for a port-forward.
var unusualPorts = []string{"8080", "0", "-1", "65536", "4294967376", "http", "", "80 ", "0x50", strings.Repeat("9", 500)}

// useURL uses a session URL of the daemon in a more or less valid way. The answer must be HTTP
// without a server error. The leak check at the end of the test finds leftovers.
func (w *world) useURL(t *testing.T, address string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), sessionTime)
	defer cancel()
	text := strings.ToValidUTF8(pick(w.r, unusualStrings), "?")
	switch w.r.IntN(6) {
	case 0: // no connection
	case 1:
		stream(ctx, sessions.Spdy, address, w.streamOptions(text))
	case 2:
		stream(ctx, sessions.WebSocket, address, w.streamOptions(text))
	case 3:
		w.speakSPDY(address, text)
	case 4:
		w.forwardWebSocket(ctx, address, text)
	case 5:
		w.plainRequests(ctx, t, address, text)
	}
}

// streamOptions returns options that may differ from the options of the RPC.
func (w *world) streamOptions(input string) remotecommand.StreamOptions {
	o := remotecommand.StreamOptions{Tty: w.r.IntN(3) == 0}
	if w.r.IntN(2) == 0 {
		o.Stdin = strings.NewReader(input)
	}
	if w.r.IntN(3) > 0 {
		o.Stdout = io.Discard
	}
	if w.r.IntN(3) == 0 {
		o.Stderr = io.Discard
	}
	return o
}

// stream runs a session until its command or the deadline ends it.
func stream(ctx context.Context, p sessions.Protocol, address string, o remotecommand.StreamOptions) {
	_, _ = p.Stream(ctx, sessions.Plain(), address, o)
}

// speakSPDY opens streams of any session with unusual headers, without waiting for answers. The
// server may refuse them.
func (w *world) speakSPDY(address, text string) {
	u, err := url.Parse(address)
	if err != nil {
		return
	}
	conn, err := net.DialTimeout("tcp", u.Host, sessionTime)
	if err != nil {
		return
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(sessionTime))
	protocol := pick(w.r, []string{"portforward.k8s.io", "v4.channel.k8s.io", "v2.channel.k8s.io", "none"})
	fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: %s\r\n\r\n", u.Path, u.Host, protocol)
	answer, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil || answer.StatusCode != http.StatusSwitchingProtocols {
		return
	}
	framer, err := spdy.NewFramer(conn, conn)
	if err != nil {
		return
	}
	id := spdy.StreamId(1)
	for request := range 1 + w.r.IntN(3) {
		headers := http.Header{"Port": {pick(w.r, unusualPorts)}, "Requestid": {pick(w.r, []string{fmt.Sprint(request), text})}}
		// The streams of a port-forward come in pairs. After the first stream of a pair the server
		// waits for the second, and so would this test.
		for _, kind := range pick(w.r, [][]string{{"error", "data"}, {"error", "data"}, {"error", "stdin"}, {"error", "stdout", "resize"}, {text}}) {
			headers.Set("streamType", kind)
			_ = framer.WriteFrame(&spdy.SynStreamFrame{StreamId: id, Headers: headers})
			_ = framer.WriteFrame(&spdy.DataFrame{StreamId: id, Data: []byte(text), Flags: spdy.DataFlags(w.r.IntN(2))})
			id += 2
		}
	}
	_, _ = io.Copy(io.Discard, conn)
}

// headerText quotes a string so that the client library accepts it as a header.
func headerText(s string) string { return fmt.Sprintf("%q", s) }

// forwardWebSocket opens any session as if it were a port-forward, and sends unusual messages.
func (w *world) forwardWebSocket(ctx context.Context, address, text string) {
	dialer := websocket.Dialer{Subprotocols: []string{pick(w.r, []string{"v4.channel.k8s.io", "v5.channel.k8s.io", "base64.channel.k8s.io", "portforward.k8s.io", "none"})}}
	query := url.Values{"port": {pick(w.r, unusualPorts), text}, "command": {text}, "tty": {text}}
	conn, answer, err := dialer.DialContext(ctx, "ws"+strings.TrimPrefix(address, "http")+"?"+query.Encode(), nil)
	if err != nil {
		return
	}
	defer conn.Close()
	defer answer.Body.Close()
	for _, channel := range []byte{byte(w.r.IntN(6)), 255} {
		kind := pick(w.r, []int{websocket.BinaryMessage, websocket.TextMessage, websocket.PingMessage})
		if conn.WriteMessage(kind, append([]byte{channel}, text[:min(len(text), 100)]...)) != nil {
			return
		}
	}
}

// plainRequests sends requests that start no session.
func (w *world) plainRequests(ctx context.Context, t *testing.T, address, text string) {
	t.Helper()
	for _, address := range []string{address + "x", address + "?" + url.Values{"port": {text}, "command": {text}}.Encode(), address} {
		method := pick(w.r, []string{http.MethodGet, http.MethodPost, http.MethodPut, "ODD"})
		request := harness.Get(http.NewRequestWithContext(ctx, method, address, bytes.NewBufferString(text)))(t)
		request.Header.Set("Connection", "Upgrade")
		request.Header.Set("Upgrade", pick(w.r, []string{"SPDY/3.1", "websocket", "h2c", headerText(text)}))
		request.Header.Set("X-Stream-Protocol-Version", headerText(text))
		answer, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(request)
		if err != nil {
			continue // the deadline has passed
		}
		if answer.StatusCode >= http.StatusInternalServerError {
			t.Errorf("%s with %q: %s", method, request.Header, answer.Status)
		}
		_ = answer.Body.Close()
	}
}
