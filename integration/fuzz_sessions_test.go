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

// sessionTime is how long a client of the fuzzer's stays, at most: some sessions have no end.
const sessionTime = 300 * time.Millisecond

// Ports that a client of a port-forward may ask for when it is connected.
var oddPorts = []string{"8080", "0", "-1", "65536", "4294967376", "http", "", "80 ", "0x50", strings.Repeat("9", 500)}

// useURL uses a URL of the daemon in a more or less valid way. The answer must be HTTP without a
// server error. The leak check at the end of the test covers leftovers.
func (w *world) useURL(t *testing.T, address string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), sessionTime)
	defer cancel()
	odd := strings.ToValidUTF8(pick(w.r, oddStrings), "?")
	switch w.r.IntN(6) {
	case 0: // no connection
	case 1:
		stream(ctx, sessions.Spdy, address, w.streamOptions(odd))
	case 2:
		stream(ctx, sessions.WebSocket, address, w.streamOptions(odd))
	case 3:
		w.speakSPDY(address, odd)
	case 4:
		w.forwardWebSocket(ctx, address, odd)
	case 5:
		w.plainRequests(ctx, t, address, odd)
	}
}

// streamOptions may differ from the options of the RPC.
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

// stream runs a session. It ends with the command or the deadline.
func stream(ctx context.Context, p sessions.Protocol, address string, o remotecommand.StreamOptions) {
	_, _ = p.Stream(ctx, sessions.Plain(), address, o)
}

// speakSPDY opens any session's streams with odd headers, without waiting to be answered. The
// server may refuse whatever it likes.
func (w *world) speakSPDY(address, odd string) {
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
		headers := http.Header{"Port": {pick(w.r, oddPorts)}, "Requestid": {pick(w.r, []string{fmt.Sprint(request), odd})}}
		// The streams of a port-forward come in pairs. The server would wait for the second stream
		// of a pair, and so would this test.
		for _, kind := range pick(w.r, [][]string{{"error", "data"}, {"error", "data"}, {"error", "stdin"}, {"error", "stdout", "resize"}, {odd}}) {
			headers.Set("streamType", kind)
			_ = framer.WriteFrame(&spdy.SynStreamFrame{StreamId: id, Headers: headers})
			_ = framer.WriteFrame(&spdy.DataFrame{StreamId: id, Data: []byte(odd), Flags: spdy.DataFlags(w.r.IntN(2))})
			id += 2
		}
	}
	_, _ = io.Copy(io.Discard, conn)
}

// headerText makes a string valid for the client library's headers.
func headerText(s string) string { return fmt.Sprintf("%q", s) }

// forwardWebSocket opens any session as if it were a port-forward, and sends odd messages.
func (w *world) forwardWebSocket(ctx context.Context, address, odd string) {
	dialer := websocket.Dialer{Subprotocols: []string{pick(w.r, []string{"v4.channel.k8s.io", "v5.channel.k8s.io", "base64.channel.k8s.io", "portforward.k8s.io", "none"})}}
	query := url.Values{"port": {pick(w.r, oddPorts), odd}, "command": {odd}, "tty": {odd}}
	conn, answer, err := dialer.DialContext(ctx, "ws"+strings.TrimPrefix(address, "http")+"?"+query.Encode(), nil)
	if err != nil {
		return
	}
	defer conn.Close()
	defer answer.Body.Close()
	for _, channel := range []byte{byte(w.r.IntN(6)), 255} {
		kind := pick(w.r, []int{websocket.BinaryMessage, websocket.TextMessage, websocket.PingMessage})
		if conn.WriteMessage(kind, append([]byte{channel}, odd[:min(len(odd), 100)]...)) != nil {
			return
		}
	}
}

// plainRequests are no sessions at all.
func (w *world) plainRequests(ctx context.Context, t *testing.T, address, odd string) {
	t.Helper()
	for _, address := range []string{address + "x", address + "?" + url.Values{"port": {odd}, "command": {odd}}.Encode(), address} {
		method := pick(w.r, []string{http.MethodGet, http.MethodPost, http.MethodPut, "ODD"})
		request, err := http.NewRequestWithContext(ctx, method, address, bytes.NewBufferString(odd))
		harness.Must(t, err)
		request.Header.Set("Connection", "Upgrade")
		request.Header.Set("Upgrade", pick(w.r, []string{"SPDY/3.1", "websocket", "h2c", headerText(odd)}))
		request.Header.Set("X-Stream-Protocol-Version", headerText(odd))
		answer, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(request)
		if err != nil {
			continue // its time was over
		}
		if answer.StatusCode >= http.StatusInternalServerError {
			t.Errorf("%s with %q: %s", method, request.Header, answer.Status)
		}
		_ = answer.Body.Close()
	}
}
