// Package sessions implements the client's side of exec and attach: protocols, output buffers and
// terminal sizes.
package sessions

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"berth/integration/harness"
	"berth/internal/testutil"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
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
