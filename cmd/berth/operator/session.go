package operator

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/moby/term"
	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/httpstream"
	protocols "k8s.io/apimachinery/pkg/util/remotecommand"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/transport/spdy"
	clientexec "k8s.io/client-go/util/exec"

	"berth/cmd/berth/cli"
)

// session connects this program's input and output to a command, at a URL from the runtime.
type session struct {
	stdin, terminal bool
	tls             rest.TLSClientConfig // for runtimes that serve sessions over TLS
}

func (s *session) addFlags(cmd *cobra.Command) {
	cmd.Flags().BoolVarP(&s.stdin, "stdin", "i", false, "connect standard input")
	cmd.Flags().BoolVarP(&s.terminal, "tty", "t", false, "allocate a terminal")
	addTLSFlags(cmd, &s.tls)
}

func addTLSFlags(cmd *cobra.Command, tls *rest.TLSClientConfig) {
	cmd.Flags().
		StringVar(&tls.CAFile, "tls-ca", "", "file with CA certificates for the runtime's streaming server, if it serves https (default: the system's)")
	cmd.Flags().StringVar(&tls.CertFile, "tls-cert", "", "client certificate file for the runtime's streaming server")
	cmd.Flags().StringVar(&tls.KeyFile, "tls-key", "", "key file of --tls-cert")
}

// run connects the command's input and output until the session or ctx ends. offer
// asks the runtime for a URL. If the command fails, the error is a *cli.ExitStatus without a cause.
func (s *session) run(ctx context.Context, cmd *cobra.Command,
	offer func(context.Context) (string, error)) (err error) {
	options := remotecommand.StreamOptions{Stdout: cmd.OutOrStdout(), Tty: s.terminal}
	if !s.terminal {
		options.Stderr = cmd.ErrOrStderr()
	}
	if s.stdin {
		options.Stdin = cmd.InOrStdin()
	}
	if s.terminal {
		screen, restore, err := openScreen(cmd.OutOrStdout(), options.Stdin)
		if err != nil {
			return err
		}
		defer restore()
		if screen != nil {
			options.TerminalSizeQueue = screen
		}
	}
	err = s.stream(ctx, offer, options)
	var exit clientexec.CodeExitError
	if errors.As(err, &exit) {
		return &cli.ExitStatus{Code: exit.Code}
	}
	return err
}

// errNoResult is the error of a session whose connection was lost. client-go treats a missing
// result as success.
var errNoResult = errors.New("the connection ended before the result arrived")

// stream runs a session over SPDY. client-go's WebSocket fails if its output is not read for a
// minute.
func (s *session) stream(ctx context.Context, offer func(context.Context) (string, error),
	options remotecommand.StreamOptions) error {
	address, err := offer(ctx)
	if err != nil {
		return err
	}
	u, err := url.Parse(address)
	if err != nil {
		return err
	}
	transport, upgrader, err := spdy.RoundTripperFor(&rest.Config{TLSClientConfig: s.tls})
	if err != nil {
		return err
	}
	result := &resultUpgrader{Upgrader: upgrader}
	executor, err := remotecommand.NewSPDYExecutorForProtocols(transport, result, http.MethodPost, u,
		protocols.StreamProtocolV4Name)
	if err != nil {
		return err
	}
	err = executor.StreamWithContext(ctx, options)
	switch {
	case err == nil && !result.arrived.Load():
		return errNoResult
	case err != nil && !result.arrived.Load() && ctx.Err() != nil:
		return ctx.Err() // client-go drops it during the handshake
	}
	return err
}

// resultUpgrader notes whether a session's result arrives, which is data on its error stream. Since
// version 4 of the protocol, a successful session also sends a result.
type resultUpgrader struct {
	spdy.Upgrader
	arrived atomic.Bool
}

// NewConnection implements spdy.Upgrader.
func (u *resultUpgrader) NewConnection(r *http.Response) (httpstream.Connection, error) {
	c, err := u.Upgrader.NewConnection(r)
	return resultConnection{c, u}, err
}

type resultConnection struct {
	httpstream.Connection
	u *resultUpgrader
}

// CreateStream implements httpstream.Connection.
func (c resultConnection) CreateStream(headers http.Header) (httpstream.Stream, error) {
	stream, err := c.Connection.CreateStream(headers)
	if err != nil || headers.Get(corev1.StreamType) != corev1.StreamTypeError {
		return stream, err
	}
	return resultStream{stream, c.u}, nil
}

type resultStream struct {
	httpstream.Stream
	u *resultUpgrader
}

// Read implements io.Reader.
func (s resultStream) Read(p []byte) (int, error) {
	n, err := s.Stream.Read(p)
	if n > 0 {
		s.u.arrived.Store(true)
	}
	return n, err
}

// isTerminal reports whether a stream of this command is a terminal.
func isTerminal(stream any) bool {
	f, ok := stream.(*os.File)
	return ok && term.IsTerminal(f.Fd())
}

// screen is the terminal of this command. It implements remotecommand.TerminalSizeQueue.
type screen struct {
	file    *os.File
	changed chan os.Signal // SIGWINCH
	ended   chan struct{}  // closed by restore
}

// openScreen sets the terminal to raw mode and follows its size. s is nil if out is not a terminal.
// The caller must call restore.
func openScreen(out io.Writer, in io.Reader) (s *screen, restore func(), err error) {
	undo := func() {}
	if f, ok := in.(*os.File); ok && term.IsTerminal(f.Fd()) {
		state, err := term.SetRawTerminal(f.Fd())
		if err != nil {
			return nil, nil, err
		}
		undo = func() { _ = term.RestoreTerminal(f.Fd(), state) } // it fails if the terminal was closed
	}
	f, ok := out.(*os.File)
	if !ok || !term.IsTerminal(f.Fd()) {
		return nil, undo, nil
	}
	s = &screen{file: f, changed: make(chan os.Signal, 1), ended: make(chan struct{})}
	signal.Notify(s.changed, syscall.SIGWINCH)
	s.changed <- syscall.SIGWINCH // the size that it has
	return s, sync.OnceFunc(func() {
		signal.Stop(s.changed)
		close(s.ended)
		undo()
	}), nil
}

// Next implements remotecommand.TerminalSizeQueue.
func (s *screen) Next() *remotecommand.TerminalSize {
	for {
		select {
		case <-s.ended:
			return nil
		case <-s.changed:
		}
		if size, ok := cli.Size(s.file); ok {
			return &remotecommand.TerminalSize{Width: size.Width, Height: size.Height}
		}
	}
}
