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

// TerminalSize is a terminal's size, in characters.
type TerminalSize = proto.TerminalSize

// IO are a client's ends of an exec or attach. Any may be nil: the client does
// not have it.
//
// A Read from Stdin that is under way when the session is over is not waited for: the
// client's connection is closed then, which ends it. A Write that blocks holds up the
// session until the connection ends.
type IO struct {
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	Resize         <-chan TerminalSize // ends with the session; ignored without a terminal
}

// runner runs sessions.
type runner struct {
	Launchers *shim.Launchers
	dials     *dialLimiter
	outputs   *outputBudget
	// Spawn starts the goroutines that read from clients, and false means that none is started any
	// more. Their owner ends the clients' connections before it waits for them.
	Spawn func(func()) bool
}

// Exec runs a command, connected to a client, and returns its exit code. It runs in a
// terminal of its own, of which Stdout is the output, if its process has one. The end of
// Stdin closes the command's stdin; a terminal has no such end.
//
// The end of the command is its exit, not the end of its output. When ctx ends, or Stdout or
// Stderr takes no more, the command and all it has started are killed. request's
// Stdin, Stdout and Stderr are made here. Unavailable if berth is stopping.
func (r runner) Exec(ctx context.Context, request *proto.Exec, s IO) (int32, error) {
	if request.Process.Terminal {
		return r.execTerminal(ctx, request, s)
	}
	return r.execPipes(ctx, request, s)
}

// Result is what a command left.
type Result struct {
	Stdout, Stderr []byte
	ExitCode       int32
}

// ExecSync runs a command as Exec does, without a client, and returns its output, see MaxOutput. ResourceExhausted if all ExecSyncs
// together have more than they may; the command is killed then.
func (r runner) ExecSync(ctx context.Context, request *proto.Exec) (*Result, error) {
	kept := newCapture(r.outputs)
	defer kept.release()
	code, err := r.execPipes(ctx, request, IO{Stdout: kept.writer(0), Stderr: kept.writer(1)})
	if err != nil {
		return nil, err
	}
	return &Result{ExitCode: code, Stdout: kept.data[0], Stderr: kept.data[1]}, nil
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
		s.Stdout = io.Discard // somebody has to read, or the command would block
	}
	screen := copyOutput(process.Console(), s.Stdout, broken)
	var resizing sync.WaitGroup
	defer resizing.Wait()
	defer broken(nil)
	if s.Resize != nil {
		resizing.Go(func() { resize(ctx, process, s.Resize) })
	}
	if s.Stdin != nil {
		// The end of input is nothing that a terminal has; the client's end is ctx's.
		if err := r.copyInput(keepOpen{process.Console()}, s.Stdin); err != nil {
			screen.stop()
			return 0, errors.Join(err, process.Close())
		}
	}
	return endExec(ctx, process, screen)
}

// keepOpen is a file that others close.
type keepOpen struct{ *os.File }

func (keepOpen) Close() error { return nil }

// endExec waits for the end of a command, and delivers the output that it has left.
func endExec(ctx context.Context, process *shim.Exec, outputs ...*output) (int32, error) {
	code, err := process.Wait(ctx)
	for _, o := range outputs {
		if err == nil {
			err = o.finish()
		} else {
			o.stop()
		}
	}
	return code, errors.Join(err, process.Close()) // Close kills what has not ended
}

// copyInput copies a client's input in a goroutine of its own, since a Read from a
// client can't be interrupted from here. It closes to at the end. What is not taken is
// read all the same, or it would hold up everything else that the client sends.
func (r runner) copyInput(to io.WriteCloser, from io.Reader) error {
	spawned := r.Spawn(func() {
		_, err := io.Copy(to, from)
		_ = to.Close() // the command is told, or has gone
		if err != nil {
			_, _ = io.Copy(io.Discard, from) // until the client ends it
		}
	})
	if !spawned {
		return errdefs.Unavailable("berth is stopping")
	}
	return nil
}

// resize gives a terminal the sizes that its client sends.
func resize(ctx context.Context, process *shim.Exec, sizes <-chan TerminalSize) {
	for {
		select {
		case <-ctx.Done():
			return
		case size, ok := <-sizes:
			if !ok {
				return
			}
			_ = process.Resize(size.Width, size.Height) // it fails when the process has ended
		}
	}
}
