package streaming

import (
	"context"
	"errors"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	"k8s.io/streaming/pkg/httpstream/wsstream"
	utilexec "k8s.io/utils/exec"

	"berth/sandbox/stream/copying"
	"berth/server/sessions/wire"
)

// killedCode is the exit code of a command that was killed at the end of its session.
const killedCode = 128 + 9

func (s *Server) serveExec(w http.ResponseWriter, r *http.Request, session wire.Session) {
	s.serveCommand(w, r, session, func(ctx context.Context, streams copying.IO) error {
		code, err := s.runtime.Exec(ctx, session, streams)
		switch {
		case ctx.Err() != nil:
			return exitError(killedCode)
		case err != nil:
			return err
		case code != 0:
			return exitError(int(code))
		}
		return nil
	})
}

func exitError(code int) error {
	return utilexec.CodeExitError{Err: errors.New("command terminated with a non-zero exit code"), Code: code}
}

func (s *Server) serveAttach(w http.ResponseWriter, r *http.Request, session wire.Session) {
	s.serveCommand(w, r, session, func(ctx context.Context, streams copying.IO) error {
		err := s.runtime.Attach(ctx, session, streams)
		switch cause := context.Cause(ctx); {
		case errors.Is(cause, errGone): // no client to report to
			return nil
		case cause != nil:
			return cause
		}
		return err
	})
}

// serveCommand serves an exec or attach in the protocol that the client chose.
func (s *Server) serveCommand(w http.ResponseWriter, r *http.Request, session wire.Session,
	run func(context.Context, copying.IO) error) {
	options := remotecommand.Options{Stdin: session.Stdin, Stdout: session.Stdout, Stderr: session.Stderr,
		TTY: session.TTY}
	c := &command{options: options, run: run}
	defer c.sizes.Wait()
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	r = r.WithContext(ctx)
	if wsstream.IsWebSocketRequest(r) {
		s.serveWebSocket(w, r, c)
		return
	}
	var guard atomic.Pointer[spdyGuard] // only PortForward needs it
	w = s.guardSPDY(w, func(protocol string) streamRules { return commandRules(options, protocol) }, &guard)
	s.serveSPDY(w, r, c)
}

// command is the session of an exec or attach. It implements remotecommand.Executor and Attacher.
type command struct {
	options remotecommand.Options
	run     func(context.Context, copying.IO) error
	sizes   sync.WaitGroup // goroutines that pass on terminal sizes, until the request's context ends
}

// ExecInContainer implements remotecommand.Executor. It uses the command and container of the
// session.
func (c *command) ExecInContainer(ctx context.Context, _, _, _ string, _ []string, in io.Reader,
	out, err io.WriteCloser, _ bool, resize <-chan remotecommand.TerminalSize, _ time.Duration) error {
	var streams copying.IO
	// WebSocket opens all streams, even if they were not requested.
	if c.options.Stdin {
		streams.Stdin = in
	}
	if c.options.Stdout {
		streams.Stdout = out
	}
	if c.options.Stderr {
		streams.Stderr = err
	}
	if c.options.TTY && resize != nil {
		streams.Resize = c.passSizes(ctx, resize)
	}
	return c.run(ctx, streams)
}

// AttachContainer implements remotecommand.Attacher. See ExecInContainer.
func (c *command) AttachContainer(ctx context.Context, _, _, _ string, in io.Reader, out, err io.WriteCloser,
	terminal bool, resize <-chan remotecommand.TerminalSize) error {
	return c.ExecInContainer(ctx, "", "", "", nil, in, out, err, terminal, resize, 0)
}

// passSizes converts terminal sizes until ctx or the client's stream ends.
func (c *command) passSizes(ctx context.Context, from <-chan remotecommand.TerminalSize) <-chan copying.TerminalSize {
	to := make(chan copying.TerminalSize)
	c.sizes.Go(func() {
		defer close(to)
		for size := range from {
			select {
			case to <- copying.TerminalSize{Width: size.Width, Height: size.Height}:
			case <-ctx.Done():
				return
			}
		}
	})
	return to
}
