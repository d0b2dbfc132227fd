package copying

import (
	"context"
	"errors"
	"io"
	"os"
	"sync"

	"berth/internal/coded"
	"berth/shim/proto"
)

var errStopping = coded.Errorf(coded.Unavailable, "berth is stopping")

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
	// Valid until the session ends; ignored if there is no terminal.
	Resize <-chan TerminalSize
}

// Spawn starts a goroutine that reads from a client. It returns false when the program is stopping.
// The owner of the goroutines closes the clients' connections before it waits for them.
type Spawn func(func()) bool

// Process is a command that runs.
type Process interface {
	Wait(ctx context.Context) (int32, error)
	Console() *os.File
	Resize(width, height uint16) error
	Close() error // kills a command that still runs
}

// Exec connects a client to a command and returns its exit code. It takes over the process, and the
// kept ends of its pipes. With a terminal, Stdout gets its output. Otherwise the end of Stdin
// closes the command's stdin.
//
// The session ends with the command's exit, not with the end of its output. When ctx ends, or
// Stdout or Stderr fails, Exec kills the command and everything it started. The error is
// Unavailable when the program is stopping.
func (spawn Spawn) Exec(ctx context.Context, process Process, kept Pipes, s IO) (int32, error) {
	if process.Console() != nil {
		return spawn.execTerminal(ctx, process, s)
	}
	return spawn.execPipes(ctx, process, kept, s)
}

// execPipes connects a client to a command without a terminal.
func (spawn Spawn) execPipes(ctx context.Context, process Process, kept Pipes, s IO) (int32, error) {
	defer kept.Close()
	ctx, broken := context.WithCancelCause(ctx)
	defer broken(nil)
	var outputs []*output
	for i, to := range []io.Writer{s.Stdout, s.Stderr} {
		if from := kept[1+i]; from != nil {
			outputs = append(outputs, copyOutput(from, to, broken))
		}
	}
	if kept[0] != nil {
		if err := spawn.copyInput(kept[0], s.Stdin); err != nil {
			return 0, errors.Join(err, abandon(process, outputs...))
		}
	}
	return endExec(ctx, process, outputs...)
}

// execTerminal connects a client to a command in a terminal.
func (spawn Spawn) execTerminal(ctx context.Context, process Process, s IO) (int32, error) {
	ctx, broken := context.WithCancelCause(ctx)
	defer broken(nil)
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
		if err := spawn.copyInput(keepOpen{process.Console()}, s.Stdin); err != nil {
			return 0, errors.Join(err, abandon(process, screen))
		}
	}
	return endExec(ctx, process, screen)
}

// abandon ends a session whose command runs.
func abandon(process Process, outputs ...*output) error {
	for _, o := range outputs {
		o.stop()
	}
	return process.Close()
}

// keepOpen is a file that copyInput must not close.
type keepOpen struct{ *os.File }

func (keepOpen) Close() error { return nil }

// endExec waits for the exit of a command and delivers the rest of its output.
func endExec(ctx context.Context, process Process, outputs ...*output) (int32, error) {
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
func (spawn Spawn) copyInput(to io.WriteCloser, from io.Reader) error {
	spawned := spawn(func() {
		_, err := io.Copy(to, from)
		_ = to.Close() // an error means that the command has ended
		if err != nil {
			_, _ = io.Copy(io.Discard, from) // until the client closes its input
		}
	})
	if !spawned {
		return errStopping
	}
	return nil
}

// resize sets the terminal to the sizes that the client sends.
func resize(ctx context.Context, process Process, sizes <-chan TerminalSize) {
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
