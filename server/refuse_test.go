package server

import (
	"bytes"
	"context"
	"net"
	"path/filepath"
	"sync/atomic"
	"testing"

	"golang.org/x/net/http2"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/testutil"
)

// heldSocket returns a function that makes listeners of one socket, at which connections wait while
// no server runs.
func heldSocket(t *testing.T) (listen func() net.Listener) {
	held, err := Listen(filepath.Join(t.TempDir(), "berth.sock"))
	testutil.Must(t, err)
	file, err := held.(*net.UnixListener).File()
	testutil.Must(t, err)
	t.Cleanup(func() {
		testutil.Must(t, held.Close())
		testutil.Must(t, file.Close())
	})
	return func() net.Listener {
		l, err := net.FileListener(file)
		testutil.Must(t, err)
		return l
	}
}

// When a server stops, a call that it cuts succeeds at the next server. Its client sees no error.
func TestStoppedCallsAreRefused(t *testing.T) {
	listen := heldSocket(t)
	begun := make(chan struct{})
	first := startOn(t, listen(), testConfig, &fakePods{hook: func(ctx context.Context, method string) error {
		if method != "StopContainer" {
			return nil
		}
		close(begun)
		<-ctx.Done() // the stop of the server
		return ctx.Err()
	}}, &fakeImages{})
	stopped := make(chan error, 1)
	go func() {
		_, err := first.runtime.StopContainer(context.Background(), &runtimeapi.StopContainerRequest{ContainerId: "c"})
		stopped <- err
	}()
	<-begun
	testutil.Must(t, first.stop())
	startOn(t, listen(), testConfig, &fakePods{}, &fakeImages{})
	if err := <-stopped; err != nil {
		t.Errorf("the client sees %v", err)
	}
}

// Calls that arrive while a server stops wait for the next server.
func TestCallsDuringStopReachNextServer(t *testing.T) {
	listen := heldSocket(t)
	h := startOn(t, listen(), testConfig, &fakePods{}, &fakeImages{})
	ctx, cancel := context.WithCancel(t.Context())
	calling := make(chan error, 1)
	client := h.runtime
	var answered atomic.Int64
	go func() {
		var err error
		for ctx.Err() == nil && err == nil {
			_, err = client.Version(context.WithoutCancel(ctx), &runtimeapi.VersionRequest{})
			answered.Add(1)
		}
		calling <- err
	}()
	for range 20 {
		testutil.Must(t, h.stop())
		h = startOn(t, listen(), testConfig, &fakePods{}, &fakeImages{})
		// gRPC repeats a call once, so no call may meet two stops.
		before := answered.Load()
		testutil.Eventually(t, "the next server answers", func() bool { return answered.Load() > before+1 || len(calling) > 0 })
	}
	cancel()
	if err := <-calling; err != nil {
		t.Errorf("the client sees %v", err)
	}
}

// written is a connection that keeps what is written.
type written struct {
	net.Conn
	bytes.Buffer
}

func (w *written) Write(b []byte) (int, error) { return w.Buffer.Write(b) }
func (w *written) Read(b []byte) (int, error)  { return w.Buffer.Read(b) }

// However the frames are divided into writes, a refusal stands between two frames.
func TestRefusalsStandBetweenFrames(t *testing.T) {
	var frames bytes.Buffer
	framer := http2.NewFramer(&frames, nil)
	testutil.Must(t, framer.WriteSettings())
	testutil.Must(t, framer.WriteData(1, false, make([]byte, 300)))
	testutil.Must(t, framer.WriteData(3, true, nil))
	for at := range frames.Len() + 1 {
		out := &written{}
		c := newRefusingConn(out)
		_, err := c.Write(frames.Bytes()[:at])
		testutil.Must(t, err)
		c.refuse(5)
		_, err = c.Write(frames.Bytes()[at:])
		testutil.Must(t, err)
		refused := 0
		for reader := http2.NewFramer(nil, out); out.Len() > 0; {
			frame, err := reader.ReadFrame()
			if err != nil {
				t.Fatalf("divided at %d: %v", at, err)
			}
			if reset, ok := frame.(*http2.RSTStreamFrame); ok && reset.StreamID == 5 && reset.ErrCode == http2.ErrCodeRefusedStream {
				refused++
			}
		}
		if refused != 1 {
			t.Errorf("divided at %d: %d refusals", at, refused)
		}
	}
}
