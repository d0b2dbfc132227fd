package copying

import (
	"bytes"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"berth/internal/testutil"
)

// clientSide is a client that sends until Forward stops reading, and keeps what it gets.
type clientSide struct {
	io.Reader
	got bytes.Buffer
}

func (c *clientSide) Write(p []byte) (int, error) { return c.got.Write(p) }
func (c *clientSide) Close() error                { return nil }

type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

// What an application sends before it resets the connection arrives, even if the reset meets the
// client's data first.
func TestResetLosesNoOutput(t *testing.T) {
	var owned sync.WaitGroup
	defer owned.Wait()
	spawn := Spawn(func(f func()) bool { owned.Go(f); return true })
	l, err := net.Listen("tcp", "127.0.0.1:0")
	testutil.Must(t, err)
	defer l.Close()
	for range 50 {
		accepted := make(chan error, 1)
		go func() {
			conn, err := l.Accept()
			if err == nil {
				_, err = conn.Read(make([]byte, 1))
			}
			if err == nil {
				_ = conn.(*net.TCPConn).SetLinger(0)
				_, err = conn.Write([]byte("last words"))
				conn.Close()
			}
			accepted <- err
		}()
		c := &clientSide{Reader: endless{}}
		conn, err := net.Dial("tcp", l.Addr().String())
		testutil.Must(t, err)
		err = spawn.Forward(t.Context(), conn.(*net.TCPConn), c)
		testutil.Must(t, <-accepted)
		if c.got.String() != "last words" {
			t.Fatalf("the client got %q: %v", c.got.String(), err)
		}
	}
}

// openClient is a client that ends its side only when Forward has returned.
type openClient struct {
	*io.PipeReader
	io.Writer
}

func (openClient) Close() error { return nil }

// The pod's end ends the connection when the client has nothing more to send. It may send for as
// long as it likes.
func TestForwardEndsAfterPod(t *testing.T) {
	var owned sync.WaitGroup
	defer owned.Wait()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	testutil.Must(t, err)
	defer l.Close()
	conn, err := net.Dial("tcp", l.Addr().String())
	testutil.Must(t, err)
	pod, err := l.Accept()
	testutil.Must(t, err)
	defer pod.Close()

	read, write := io.Pipe()
	defer read.Close() // as the caller of Forward does
	ended := make(chan error, 1)
	spawn := Spawn(func(f func()) bool { owned.Go(f); return true })
	go func() { ended <- spawn.Forward(t.Context(), conn.(*net.TCPConn), openClient{read, io.Discard}) }()
	testutil.Must(t, pod.(*net.TCPConn).CloseWrite())
	for end := time.Now().Add(2 * clientRest); time.Now().Before(end); time.Sleep(clientRest / 10) {
		_, err := write.Write([]byte("x"))
		testutil.Must(t, err)
		_, err = pod.Read(make([]byte, 1))
		testutil.Must(t, err)
	}
	select {
	case err := <-ended:
		t.Fatalf("it ended while the client sent: %v", err)
	default:
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
