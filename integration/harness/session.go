package harness

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Protocol is a way in which clients have sessions.
type Protocol struct {
	Name     string
	executor func(*rest.Config, string) (remotecommand.Executor, error)
}

var (
	// spdy is what kubelet speaks.
	Spdy = Protocol{"SPDY", func(c *rest.Config, address string) (remotecommand.Executor, error) {
		u, err := url.Parse(address)
		if err != nil {
			return nil, err
		}
		return remotecommand.NewSPDYExecutor(c, http.MethodPost, u)
	}}
	// webSocket is version 5.
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
	if code := ExitCode(err); code >= 0 {
		return code, nil
	}
	return 0, err
}

// Plain is a client without TLS.
func Plain() *rest.Config { return &rest.Config{} }

// ExecURL asks for a session that runs a command.
func (c *Container) ExecURL(t *testing.T, o remotecommand.StreamOptions, cmd ...string) string {
	t.Helper()
	response, err := c.Pod.D.Cri.Exec(t.Context(), &runtimeapi.ExecRequest{ContainerId: c.Id, Cmd: cmd,
		Tty: o.Tty, Stdin: o.Stdin != nil, Stdout: o.Stdout != nil, Stderr: o.Stderr != nil})
	Must(t, err)
	return response.Url
}

// AttachURL asks for a session with a container.
func (c *Container) AttachURL(t *testing.T, o remotecommand.StreamOptions) string {
	t.Helper()
	response, err := c.Pod.D.Cri.Attach(t.Context(), &runtimeapi.AttachRequest{ContainerId: c.Id,
		Tty: o.Tty, Stdin: o.Stdin != nil, Stdout: o.Stdout != nil, Stderr: o.Stderr != nil})
	Must(t, err)
	return response.Url
}

// Screen is a buffer that may be read while it is written.
type Screen struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *Screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *Screen) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func (s *Screen) WaitFor(t *testing.T, text string) {
	t.Helper()
	Eventually(t, fmt.Sprintf("the session shows %q", text), func() error {
		if out := s.String(); !strings.Contains(out, text) {
			return fmt.Errorf("it shows %q", out)
		}
		return nil
	})
}

// Sizes is a terminal that is resized when next is sent to.
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
