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
	"syscall"

	"github.com/moby/term"
	"github.com/spf13/cobra"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
	clientexec "k8s.io/client-go/util/exec"
	"k8s.io/streaming/pkg/httpstream"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/terminal"
)

// session is the common part of exec and attach: it connects a client's input and output to a
// command, at a URL from the runtime.
type session struct {
	stdin, terminal bool
	tls             rest.TLSClientConfig // for runtimes that serve sessions over TLS
	leave           func()               // called on Ctrl-P Ctrl-Q; nil: pass the keys on
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
// asks the runtime for a URL. A command that fails is an *cli.ExitStatus without a cause.
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
	if s.stdin && s.leave != nil {
		options.Stdin = &leaving{term.NewEscapeProxy(options.Stdin, leaveKeys), s.leave}
	}
	err = s.stream(ctx, offer, options)
	var exit clientexec.CodeExitError
	if errors.As(err, &exit) {
		return &cli.ExitStatus{Code: exit.Code}
	}
	return err
}

// stream runs a session over WebSocket, or over SPDY if the runtime supports only older WebSocket
// protocols. A URL is valid for one attempt.
func (s *session) stream(ctx context.Context, offer func(context.Context) (string, error),
	options remotecommand.StreamOptions) error {
	config := &rest.Config{TLSClientConfig: s.tls}
	err := streamOver(ctx, offer, options, func(address string) (remotecommand.Executor, error) {
		return remotecommand.NewWebSocketExecutor(config, http.MethodGet, address)
	})
	if !httpstream.IsUpgradeFailure(err) {
		return err
	}
	return streamOver(ctx, offer, options, func(address string) (remotecommand.Executor, error) {
		u, err := url.Parse(address)
		if err != nil {
			return nil, err
		}
		return remotecommand.NewSPDYExecutor(config, http.MethodPost, u)
	})
}

func streamOver(ctx context.Context, offer func(context.Context) (string, error), options remotecommand.StreamOptions,
	over func(address string) (remotecommand.Executor, error)) error {
	address, err := offer(ctx)
	if err != nil {
		return err
	}
	executor, err := over(address)
	if err != nil {
		return err
	}
	return executor.StreamWithContext(ctx, options)
}

// leaveKeys are Ctrl-P Ctrl-Q, as with other clients of containers.
var leaveKeys = []byte{'P' & 0x1f, 'Q' & 0x1f}

// leaving is a reader that ends at leaveKeys.
type leaving struct {
	io.Reader
	leave func()
}

func (l *leaving) Read(b []byte) (int, error) {
	n, err := l.Reader.Read(b)
	if errors.As(err, &term.EscapeError{}) {
		l.leave()
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
		if size, ok := terminal.Size(s.file); ok {
			return &remotecommand.TerminalSize{Width: size.Width, Height: size.Height}
		}
	}
}
