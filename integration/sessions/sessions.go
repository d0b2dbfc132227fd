// Package sessions implements the client's side of exec, attach and port-forward: protocols, output
// buffers and terminal sizes.
package sessions

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"berth/integration/harness"
	"berth/internal/testutil"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/tools/remotecommand"
	clientspdy "k8s.io/client-go/transport/spdy"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Protocol is a client protocol of sessions.
type Protocol struct {
	Name     string
	executor func(*rest.Config, string) (remotecommand.Executor, error)
}

var (
	// Spdy is the protocol of kubelet.
	Spdy = Protocol{"SPDY", func(c *rest.Config, address string) (remotecommand.Executor, error) {
		u, err := url.Parse(address)
		if err != nil {
			return nil, err
		}
		return remotecommand.NewSPDYExecutor(c, http.MethodPost, u)
	}}
	// WebSocket is version 5.
	WebSocket = Protocol{"WebSocket", func(c *rest.Config, address string) (remotecommand.Executor, error) {
		return remotecommand.NewWebSocketExecutor(c, http.MethodGet, address)
	}}
	Protocols = []Protocol{Spdy, WebSocket}
)

// Stream runs a session to its end and returns the command's exit code.
func (p Protocol) Stream(ctx context.Context, c *rest.Config, address string, options remotecommand.StreamOptions) (int, error) {
	executor, err := p.executor(c, address)
	if err != nil {
		return -1, err
	}
	err = executor.StreamWithContext(ctx, options)
	if code := harness.ExitCode(err); code >= 0 {
		return code, nil
	}
	return 0, err
}

// Plain is a client without TLS.
func Plain() *rest.Config { return &rest.Config{} }

// Screen is a buffer that may be read while it is written.
type Screen struct{ testutil.Buffer }

func (s *Screen) WaitFor(t *testing.T, text string) {
	t.Helper()
	harness.EventuallyGot(t, fmt.Sprintf("the session shows %q", text), func() (bool, any) {
		out := s.String()
		return strings.Contains(out, text), out
	})
}

// Sizes is a terminal whose size changes with each value sent to next.
type Sizes struct {
	Resized chan remotecommand.TerminalSize
}

func (s Sizes) Next() *remotecommand.TerminalSize {
	size, ok := <-s.Resized
	if !ok {
		return nil
	}
	return &size
}

// Attachment is an attach session in the background.
type Attachment struct {
	Typing         *io.PipeWriter
	Stdout, Stderr Screen
	HangUp         context.CancelFunc
	Ended          chan error
}

// Attach attaches to a container. It has all streams and no terminal, unless change sets others.
func Attach(t *testing.T, c *harness.Container, p Protocol, change ...func(*remotecommand.StreamOptions)) *Attachment {
	t.Helper()
	ctx, hangUp := context.WithCancel(t.Context())
	input, typing := io.Pipe()
	a := &Attachment{Typing: typing, HangUp: hangUp, Ended: make(chan error, 1)}
	o := remotecommand.StreamOptions{Stdin: input, Stdout: &a.Stdout, Stderr: &a.Stderr}
	for _, f := range change {
		f(&o)
	}
	address := c.AttachURL(t, o)
	go func() {
		_, err := p.Stream(ctx, Plain(), address, o)
		input.Close()
		a.Ended <- err
	}()
	return a
}

// Send types text.
func (a *Attachment) Send(t *testing.T, text string) {
	t.Helper()
	_, err := io.WriteString(a.Typing, text)
	harness.Must(t, err)
}

// ForwardPort forwards a local port to a port of the pod, as kubectl does, until the test ends. It
// returns the local address.
func ForwardPort(t *testing.T, p *harness.Pod, port int) string {
	t.Helper()
	response := harness.Get(p.D.Cri.PortForward(t.Context(), &runtimeapi.PortForwardRequest{PodSandboxId: p.Id, Port: []int32{int32(port)}}))(t)
	address := harness.Get(url.Parse(response.Url))(t)
	transport, upgrader, err := clientspdy.RoundTripperFor(Plain())
	harness.Must(t, err)
	stop, ready, ended := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	dialer := clientspdy.NewDialer(upgrader, &http.Client{Transport: transport}, http.MethodPost, address)
	forwarder := harness.Get(portforward.NewOnAddresses(dialer, []string{"127.0.0.1"}, []string{fmt.Sprintf("0:%d", port)}, stop, ready, io.Discard, io.Discard))(t)
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
	ports := harness.Get(forwarder.GetPorts())(t)
	return fmt.Sprintf("127.0.0.1:%d", ports[0].Local)
}
