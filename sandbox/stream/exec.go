package stream

import (
	"context"
	"errors"
	"io"
	"os"
	"sync"

	"berth/internal/errdefs"
	"berth/shim"
	"berth/shim/proto"
)

// TerminalSize is the size of a terminal in characters.
type TerminalSize = proto.TerminalSize

// IO holds the client's streams of an exec or attach. Each may be nil.
//
// A session does not wait for a pending Read from Stdin. The caller closes the client's connection
// after the session, which ends the Read. A Write that blocks delays the session until the
// connection ends.
type IO struct {
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	Resize         <-chan TerminalSize // valid until the session ends; ignored if there is no terminal
}

// runner runs sessions.
type runner struct {
	Launchers *shim.Launchers
	dials     *dialLimiter
	outputs   *outputBudget
	// Spawn starts a goroutine that reads from a client. It returns false when berth is stopping.
	// The owner of the goroutines closes the clients' connections before it waits for them.
	Spawn func(func()) bool
}

// Exec runs a command, connected to a client, and returns its exit code. With a terminal, Stdout
// gets its output. Otherwise the end of Stdin closes the command's stdin. Exec sets request's
// Stdin, Stdout and Stderr.
//
// The session ends with the command's exit, not with the end of its output. When ctx ends, or
// Stdout or Stderr fails, Exec kills the command and everything it started. The error is
// Unavailable when berth is stopping.
func (r runner) Exec(ctx context.Context, request *proto.Exec, s IO) (int32, error) {
	if request.Process.Terminal {
		return r.execTerminal(ctx, request, s)
	}
	return r.execPipes(ctx, request, s)
}

// Result is the result of ExecSync.
type Result struct {
	Stdout, Stderr []byte
	ExitCode       int32
}

// ExecSync runs a command without a client and returns its output, up to MaxOutput. When all
// ExecSyncs exceed their shared budget, it kills the command and returns ResourceExhausted.
func (r runner) ExecSync(ctx context.Context, request *proto.Exec) (*Result, error) {
	output := newCapture(r.outputs)
	defer output.release()
	code, err := r.execPipes(ctx, request, IO{Stdout: output.writer(0), Stderr: output.writer(1)})
	if err != nil {
		return nil, err
	}
	stdout, stderr := output.kept()
	return &Result{ExitCode: code, Stdout: stdout, Stderr: stderr}, nil
}

// execPipes runs a command without a terminal.
func (r runner) execPipes(ctx context.Context, request *proto.Exec, s IO) (int32, error) {
	ctx, broken := context.WithCancelCause(ctx)
	defer broken(nil)
	var pipes execPipes
	defer pipes.close()
	var err error
	if request.Stdout, err = pipes.output(s.Stdout, broken); err != nil {
		return 0, err
	}
	if request.Stderr, err = pipes.output(s.Stderr, broken); err != nil {
		return 0, err
	}
	if s.Stdin != nil {
		if request.Stdin, err = pipes.input(); err != nil {
			return 0, err
		}
		if err := r.copyInput(pipes.stdin, s.Stdin); err != nil {
			return 0, err
		}
	}
	process, err := r.Launchers.Exec(ctx, request)
	if err != nil {
		return 0, err
	}
	pipes.closeTheirs()
	return endExec(ctx, process, pipes.outputs...)
}

// execTerminal runs a command in a terminal.
func (r runner) execTerminal(ctx context.Context, request *proto.Exec, s IO) (int32, error) {
	ctx, broken := context.WithCancelCause(ctx)
	defer broken(nil)
	process, err := r.Launchers.Exec(ctx, request)
	if err != nil {
		return 0, err
	}
	if s.Stdout == nil {
		s.Stdout = io.Discard // if nobody read its output, the command would block
	}
	screen := copyOutput(process.Console(), s.Stdout, broken)
	var resizing sync.WaitGroup
	defer resizing.Wait()
	defer broken(nil)
	if s.Resize != nil {
		resizing.Go(func() { resize(ctx, process, s.Resize) })
	}
	if s.Stdin != nil {
		// A terminal has no end of input. When the client leaves, ctx ends.
		if err := r.copyInput(keepOpen{process.Console()}, s.Stdin); err != nil {
			screen.stop()
			return 0, errors.Join(err, process.Close())
		}
	}
	return endExec(ctx, process, screen)
}

// keepOpen is a file that copyInput must not close.
type keepOpen struct{ *os.File }

func (keepOpen) Close() error { return nil }

// endExec waits for the exit of a command and delivers the rest of its output.
func endExec(ctx context.Context, process *shim.Exec, outputs ...*output) (int32, error) {
	code, err := process.Wait(ctx)
	for _, o := range outputs {
		if err == nil {
			err = o.finish()
		} else {
			o.stop()
		}
	}
	return code, errors.Join(err, process.Close()) // Close kills a command that still runs
}

// copyInput copies a client's input to the writer to, and closes the writer at the end. It uses a
// goroutine, because a Read from a client cannot be interrupted. If to accepts no more input, the
// goroutine keeps reading, because unread input would block all other data of the client.
func (r runner) copyInput(to io.WriteCloser, from io.Reader) error {
	spawned := r.Spawn(func() {
		_, err := io.Copy(to, from)
		_ = to.Close() // an error means that the command has ended
		if err != nil {
			_, _ = io.Copy(io.Discard, from) // until the client closes its input
		}
	})
	if !spawned {
		return errdefs.Unavailable("berth is stopping")
	}
	return nil
}

// resize sets the terminal to the sizes that the client sends.
func resize(ctx context.Context, process *shim.Exec, sizes <-chan TerminalSize) {
	for {
		select {
		case <-ctx.Done():
			return
		case size, ok := <-sizes:
			if !ok {
				return
			}
			_ = process.Resize(size.Width, size.Height) // fails after the process has exited
		}
	}
}
