package streaming

import (
	"context"
	"errors"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/cri-streaming/pkg/streaming/portforward"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	"k8s.io/streaming/pkg/httpstream/wsstream"
	utilexec "k8s.io/utils/exec"

	"berth/sandbox/stream"
)

// killedCode is the exit code of a command that was killed at the end of its session.
const killedCode = 128 + 9

func (s *Server) serveExec(w http.ResponseWriter, r *http.Request, req *runtimeapi.ExecRequest,
	execOptions stream.ExecOptions) {
	command := stream.Command{Args: req.GetCmd(), Terminal: req.GetTty(), Options: execOptions}
	options := remotecommand.Options{
		Stdin:  req.GetStdin(),
		Stdout: req.GetStdout(),
		Stderr: req.GetStderr(),
		TTY:    req.GetTty(),
	}
	s.serveCommand(w, r, options, func(ctx context.Context, streams stream.IO) error {
		code, err := s.runtime.Exec(ctx, req.GetContainerId(), command, streams)
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

func (s *Server) serveAttach(w http.ResponseWriter, r *http.Request, req *runtimeapi.AttachRequest) {
	options := remotecommand.Options{
		Stdin:  req.GetStdin(),
		Stdout: req.GetStdout(),
		Stderr: req.GetStderr(),
		TTY:    req.GetTty(),
	}
	s.serveCommand(w, r, options, func(ctx context.Context, streams stream.IO) error {
		err := s.runtime.Attach(ctx, req.GetContainerId(), req.GetTty(), streams)
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
func (s *Server) serveCommand(w http.ResponseWriter, r *http.Request, options remotecommand.Options,
	run func(context.Context, stream.IO) error) {
	c := &command{options: options, run: run}
	defer c.sizes.Wait()
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	r = r.WithContext(ctx)
	if wsstream.IsWebSocketRequest(r) {
		serveWebSocket(s.guardWebSocket(w), r, c, s.cfg.IdleTimeout)
		return
	}
	w = s.guardSPDY(w, func(protocol string) streamRules { return commandRules(options, protocol) })
	serveSPDY(w, r, c, s.patience, s.cfg.IdleTimeout)
}

// command is the session of an exec or attach. It implements remotecommand.Executor and Attacher.
type command struct {
	options remotecommand.Options
	run     func(context.Context, stream.IO) error
	sizes   sync.WaitGroup // goroutines that pass on terminal sizes, until the request's context ends
}

// ExecInContainer implements remotecommand.Executor. It uses the command and container of the
// session.
func (c *command) ExecInContainer(ctx context.Context, _, _, _ string, _ []string, in io.Reader,
	out, err io.WriteCloser, _ bool, resize <-chan remotecommand.TerminalSize, _ time.Duration) error {
	var streams stream.IO
	// WebSocket opens all streams, even without a request for them.
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
func (c *command) passSizes(ctx context.Context, from <-chan remotecommand.TerminalSize) <-chan stream.TerminalSize {
	to := make(chan stream.TerminalSize)
	c.sizes.Go(func() {
		defer close(to)
		for size := range from {
			select {
			case to <- stream.TerminalSize{Width: size.Width, Height: size.Height}:
			case <-ctx.Done():
				return
			}
		}
	})
	return to
}

// pairTime bounds the time between the two streams of a forwarded connection. The library waits
// that long even if the client has disconnected.
const pairTime = 10 * time.Second

func (s *Server) servePortForward(w http.ResponseWriter, r *http.Request, req *runtimeapi.PortForwardRequest) {
	if wsstream.IsWebSocketRequest(r) {
		w = s.guardWebSocket(w)
	} else {
		w = s.guardSPDY(w, func(string) streamRules { return forwardRules() })
	}
	f := forwarder{ctx: r.Context(), runtime: s.runtime, pod: req.GetPodSandboxId()}
	portforward.ServePortForward(w, r, f, f.pod, "", &portforward.V4Options{Ports: req.GetPort()}, s.cfg.IdleTimeout,
		min(s.patience, pairTime), portforward.SupportedProtocols)
}

// forwarder is a portforward.PortForwarder with the session's context, which the library does not
// pass on.
type forwarder struct {
	ctx     context.Context
	runtime Runtime
	pod     string
}

// PortForward implements portforward.PortForwarder.
func (f forwarder) PortForward(_ context.Context, _, _ string, port int32, stream io.ReadWriteCloser) error {
	client := &forwardClient{ReadWriteCloser: stream}
	err := f.runtime.PortForward(f.ctx, f.pod, port, client)
	if client.left.Load() {
		err = nil
	}
	s, ok := stream.(interface{ Reset() error })
	switch {
	case !ok: // WebSocket
	case err != nil:
		// The library resets the stream, possibly before it answers the stream, and the client
		// would then ignore the error. A write waits for the answer.
		_, _ = stream.Write(nil) // fails only if the client has disconnected
	default:
		// Both sides know the end of the stream. Further data from the client has no reader and
		// would block the client's other connections.
		_ = s.Reset() // fails only if the client has disconnected
	}
	return err
}

// forwardClient is the client's side of a forwarded connection. It records a reset by the client. A
// reset is no failure, because clients reset all other connections after an error in one.
type forwardClient struct {
	io.ReadWriteCloser
	left atomic.Bool
}

// Read implements io.Reader.
func (c *forwardClient) Read(p []byte) (int, error) {
	n, err := c.ReadWriteCloser.Read(p)
	return n, c.note(err)
}

// Write implements io.Writer.
func (c *forwardClient) Write(p []byte) (int, error) {
	n, err := c.ReadWriteCloser.Write(p)
	return n, c.note(err)
}

// Close implements io.Closer.
func (c *forwardClient) Close() error { return c.note(c.ReadWriteCloser.Close()) }

func (c *forwardClient) note(err error) error {
	if err != nil && !errors.Is(err, io.EOF) {
		c.left.Store(true)
	}
	return err
}
