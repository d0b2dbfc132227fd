package streaming

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/gorilla/websocket"
	"google.golang.org/grpc/codes"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"

	"berth/internal/errdefs"
	"berth/internal/testutil"
	"berth/sandbox/stream/copying"
)

// webSocketProtocols are all protocols over WebSocket.
var webSocketProtocols = []string{"", binaryV1, base64V1, remotecommand.StreamProtocolV4Name, base64V4, remotecommand.StreamProtocolV5Name}

// webSocketClient sends the messages of a test.
type webSocketClient struct {
	t        *testing.T
	conn     *websocket.Conn
	protocol string
}

func dialWebSocket(t *testing.T, address, protocol string) *webSocketClient {
	t.Helper()
	dialer := websocket.Dialer{WriteBufferSize: 2 * maxFrame} // so that a message is one frame
	if protocol != "" {
		dialer.Subprotocols = []string{protocol}
	}
	conn, answer, err := dialer.DialContext(t.Context(), "ws"+strings.TrimPrefix(address, "http"), nil)
	if err != nil {
		t.Fatalf("%q: %v", protocol, err)
	}
	t.Cleanup(func() { conn.Close() })
	answer.Body.Close()
	return &webSocketClient{t: t, conn: conn, protocol: protocol}
}

func (c *webSocketClient) text() bool { return strings.Contains(c.protocol, "base64") }

// say sends a message. It ignores errors, since the server may have closed the connection.
func (c *webSocketClient) say(channel byte, data []byte) {
	kind, message := websocket.BinaryMessage, append([]byte{channel}, data...)
	if c.text() {
		kind, message = websocket.TextMessage, append([]byte{channel + '0'}, base64.StdEncoding.EncodeToString(data)...)
	}
	_ = c.conn.WriteMessage(kind, message)
}

// hear returns the server's data by channel, until the connection ends.
func (c *webSocketClient) hear() (said [5]string) {
	c.t.Helper()
	for {
		_, message, err := c.conn.ReadMessage()
		if err != nil {
			return said
		}
		channel, data := message[0], message[1:]
		if c.text() {
			channel -= '0'
			if data, err = base64.StdEncoding.DecodeString(string(data)); err != nil {
				c.t.Fatal(err)
			}
		}
		said[channel] += string(data)
	}
}

// All versions transfer the same input and output. Their formats of the result differ.
func TestWebSocketProtocols(t *testing.T) {
	failure := errors.New("no such thing")
	for _, protocol := range webSocketProtocols {
		for _, result := range []error{nil, failure} {
			s := serving(t, doing{exec: func(_ context.Context, streams copying.IO) error {
				input := make([]byte, 5)
				if _, err := io.ReadFull(streams.Stdin, input); err != nil {
					return err
				}
				size := <-streams.Resize
				_, err := streams.Stdout.Write(append(input, byte(size.Width), byte(size.Height)))
				return errors.Join(err, result)
			}})
			address, err := s.Exec(&runtimeapi.ExecRequest{Stdin: true, Stdout: true, Tty: true})
			testutil.Must(t, err)
			c := dialWebSocket(t, address, protocol)
			c.say(remotecommand.StreamStdIn, []byte("hello"))
			c.say(remotecommand.StreamResize, []byte(`{"Width":65,"Height":66}`))
			said := c.hear()
			if got := said[remotecommand.StreamStdOut]; got != "helloAB" {
				t.Errorf("%q: the output is %q", protocol, got)
			}
			reported := said[remotecommand.StreamErr]
			if !strings.HasPrefix(protocol, "v") {
				if want := map[error]string{nil: "", failure: "no such thing"}[result]; reported != want {
					t.Errorf("%q reports %q, want %q", protocol, reported, want)
				}
				continue
			}
			var status metav1.Status
			if err := json.Unmarshal([]byte(reported), &status); err != nil || (status.Status == metav1.StatusSuccess) != (result == nil) {
				t.Errorf("%q reports %q: %v", protocol, reported, err)
			}
		}
	}
}

// A frame of the maximum length passes. A longer frame ends the session in every protocol.
func TestWebSocketFramesAreBounded(t *testing.T) {
	for _, protocol := range webSocketProtocols {
		got := make(chan int, 1)
		s := serving(t, doing{exec: func(ctx context.Context, streams copying.IO) error {
			n, _ := io.Copy(io.Discard, streams.Stdin)
			got <- int(n)
			<-ctx.Done()
			return nil
		}})
		address, err := s.Exec(&runtimeapi.ExecRequest{Stdin: true})
		testutil.Must(t, err)
		c := dialWebSocket(t, address, protocol)
		allowed := maxFrame - 1 // and the channel
		if c.text() {
			allowed = allowed / 4 * 3
		}
		c.say(remotecommand.StreamStdIn, make([]byte, allowed))
		c.say(remotecommand.StreamStdIn, make([]byte, allowed+3))
		c.hear() // the end
		if n := <-got; n != allowed {
			t.Errorf("%q: the command got %d bytes, want the %d of the first frame", protocol, n, allowed)
		}
	}
}

// Frames of port-forwards are bounded too, and the number of ports by the number of channels.
func TestWebSocketForwardsAreBounded(t *testing.T) {
	got := make(chan int, 1)
	s := serving(t, doing{forward: func(ctx context.Context, stream io.ReadWriteCloser) error {
		n, _ := io.Copy(io.Discard, stream)
		got <- int(n)
		return nil
	}})
	address, err := s.PortForward(&runtimeapi.PortForwardRequest{PodSandboxId: "pod", Port: []int32{80}})
	testutil.Must(t, err)
	c := dialWebSocket(t, address, remotecommand.StreamProtocolV4Name)
	c.say(0, make([]byte, maxFrame-1))
	c.say(0, make([]byte, maxFrame))
	if n := <-got; n != maxFrame-1 {
		t.Errorf("the pod got %d bytes", n)
	}
	if _, err := s.PortForward(&runtimeapi.PortForwardRequest{PodSandboxId: "pod", Port: make([]int32, maxForwards+1)}); errdefs.Code(err) != codes.InvalidArgument {
		t.Errorf("with too many ports: %v", err)
	}
}

// An endless size uses little memory, and later data is read.
func TestSizesAreBounded(t *testing.T) {
	decode := func(from io.Reader) (widths []uint16) {
		to := make(chan remotecommand.TerminalSize)
		go decodeSizes(t.Context(), from, to)
		for size := range to {
			widths = append(widths, size.Width)
		}
		return widths
	}
	if got := decode(strings.NewReader("{\"Width\":1,\"Height\":2}\n{\"Width\":3}{\"Width\":4} ")); !slices.Equal(got, []uint16{1, 3, 4}) {
		t.Errorf("widths %v", got)
	}
	endless := io.MultiReader(strings.NewReader(`{"Width":7}{"Width":`), io.LimitReader(repeated('1'), 64<<20))
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if got := decode(endless); !slices.Equal(got, []uint16{7}) {
		t.Errorf("widths %v", got)
	}
	runtime.ReadMemStats(&after)
	if used := after.TotalAlloc - before.TotalAlloc; used > 4<<20 {
		t.Errorf("a size of 64 MiB took %d bytes", used)
	}
}

// repeated is an endless reader of one byte.
type repeated byte

func (b repeated) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = byte(b)
	}
	return len(p), nil
}

// FuzzWebSocketGuard checks that the guard passes the client's data unchanged up to a frame that is
// too long, for any sizes of reads.
func FuzzWebSocketGuard(f *testing.F) {
	f.Add([]byte{0x82, 0x83, 1, 2, 3, 4, 5, 6, 7, 0x88, 0x80, 0, 0, 0, 0}, uint8(3))
	f.Add(append([]byte{0x82, 126, 1, 0}, make([]byte, 256)...), uint8(200))
	f.Add([]byte{0x82, 0xff, 0x80, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 9}, uint8(0)) // a length of 2^63+1
	f.Fuzz(func(t *testing.T, data []byte, piece uint8) {
		g := &webSocketGuard{Conn: discarding{}, frames: frames{from: bufio.NewReader(bytes.NewReader(data))}, log: slog.New(slog.DiscardHandler), ending: new(atomic.Bool)}
		var out []byte
		buffer := make([]byte, int(piece)+1)
		for {
			n, err := g.Read(buffer)
			out = append(out, buffer[:n]...)
			if err != nil {
				break
			}
			if g.body > maxFrame || g.body < 0 {
				t.Fatalf("a frame of %d bytes", g.body)
			}
		}
		if !bytes.HasPrefix(data, out) {
			t.Fatalf("passed on %x of %x", out, data)
		}
	})
}

// Sizes for a session without terminal do not block other channels.
func TestSizesWithoutTerminal(t *testing.T) {
	for _, protocol := range webSocketProtocols {
		s := serving(t, doing{exec: func(_ context.Context, streams copying.IO) error {
			input := make([]byte, 5)
			_, err := io.ReadFull(streams.Stdin, input)
			return err
		}})
		address, err := s.Exec(&runtimeapi.ExecRequest{Stdin: true, Stdout: true})
		testutil.Must(t, err)
		c := dialWebSocket(t, address, protocol)
		for range 3 {
			c.say(remotecommand.StreamResize, []byte(`{"Width":65,"Height":66}`))
		}
		c.say(remotecommand.StreamStdIn, []byte("hello"))
		if reported := c.hear()[remotecommand.StreamErr]; strings.Contains(reported, metav1.StatusFailure) {
			t.Errorf("%q reports %q", protocol, reported)
		}
	}
}
