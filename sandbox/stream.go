package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"berth/internal/errdefs"
	"berth/shim"
)

// TerminalSize is a terminal's size, in characters.
type TerminalSize = shim.Size

// Streams are a client's ends of an exec or attach. Any may be nil: the client does
// not have it.
//
// A Read from Stdin that is under way when the session is over is not waited for: the
// client's connection is closed then, which ends it. A Write that blocks holds up the
// session until the connection ends.
type Streams struct {
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	Resize         <-chan TerminalSize // ends with the session; ignored without a terminal
}

// CheckExec tells whether Exec would find a container to run a command in, and
// returns its full ID. Errors: as Exec's.
func (m *Manager) CheckExec(id string, command []string) (string, error) {
	c, err := m.execTarget(id, command)
	if err != nil {
		return "", err
	}
	return c.id, nil
}

func (m *Manager) execTarget(id string, command []string) (*container, error) {
	c, err := m.runningContainer("exec in", id)
	if err != nil {
		return nil, err
	}
	if len(command) == 0 || command[0] == "" {
		return nil, errdefs.InvalidArgument("exec in container %s: the command is empty", c.id)
	}
	return c, nil
}

// runningContainer finds a container in which something can be done now. Errors:
// NotFound, FailedPrecondition if it is not running.
func (m *Manager) runningContainer(what, id string) (*container, error) {
	c, err := m.containers.find(id)
	if err != nil {
		return nil, err
	}
	if run := c.running.Load(); run == nil || run.hasEnded() {
		return nil, errdefs.FailedPrecondition("%s container %s: it is not running", what, c.id)
	}
	return c, nil
}

// Exec runs a command in a container, connected to a client, and returns its exit
// code, 128+signal if a signal ended it. With terminal it runs in one of its own, of
// which Stdout is the output. The end of Stdin closes the command's stdin; a terminal
// has no such end.
//
// The session ends with the command, as with ExecSync: what it leaves running in the
// background is not waited for. When ctx ends, because the client is gone, or when
// Stdout or Stderr takes no more, the command and everything it has started are
// killed. (containerd and CRI-O let it run: nobody can reach it any more, and it stays
// for as long as the container. A command that is to outlive its client can be started
// in the background.)
//
// Errors: NotFound, FailedPrecondition if the container is not running,
// InvalidArgument for a command that can't be.
func (m *Manager) Exec(ctx context.Context, id string, command []string, terminal bool, s Streams) (int32, error) {
	c, err := m.execTarget(id, command)
	if err != nil {
		return 0, err
	}
	defer m.tasks.Begin("the end of an exec", c.String())()
	request := m.execRequest(c, command, terminal)
	var code int32
	if terminal {
		code, err = m.execTerminal(ctx, request, s)
	} else {
		code, err = m.execPipes(ctx, request, s)
	}
	if err != nil {
		return 0, fmt.Errorf("exec in container %s: %w", c.id, err)
	}
	return code, nil
}

// execPipes runs a command without a terminal.
func (m *Manager) execPipes(ctx context.Context, request shim.ExecRequest, s Streams) (int32, error) {
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
		if err := m.copyInput(pipes.stdin, s.Stdin); err != nil {
			return 0, err
		}
	}
	process, err := m.launchers.Exec(ctx, request)
	if err != nil {
		return 0, err
	}
	pipes.closeTheirs()
	return endExec(ctx, process, pipes.outputs...)
}

// execTerminal runs a command in a terminal.
func (m *Manager) execTerminal(ctx context.Context, request shim.ExecRequest, s Streams) (int32, error) {
	ctx, broken := context.WithCancelCause(ctx)
	defer broken(nil)
	process, err := m.launchers.Exec(ctx, request)
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
		if err := m.copyInput(keepOpen{process.Console()}, s.Stdin); err != nil {
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

// copyInput copies a client's input in a goroutine of Operations, since a Read from a
// client can't be interrupted from here. It closes to at the end. What is not taken is
// read all the same, or it would hold up everything else that the client sends.
func (m *Manager) copyInput(to io.WriteCloser, from io.Reader) error {
	spawned := m.tasks.Operations.Spawn(func() {
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

// CheckAttach tells whether Attach would find a container to attach to, and returns
// its full ID. Errors: as Attach's.
func (m *Manager) CheckAttach(id string, terminal bool) (string, error) {
	c, err := m.attachTarget(id, terminal)
	if err != nil {
		return "", err
	}
	return c.id, nil
}

func (m *Manager) attachTarget(id string, terminal bool) (*container, error) {
	c, err := m.runningContainer("attach to", id)
	if err != nil {
		return nil, err
	}
	if has := c.config.GetTty(); has != terminal {
		return nil, errdefs.InvalidArgument("attach to container %s: tty is %t, but the container was made with tty %t", c.id, terminal, has)
	}
	return c, nil
}

// Attach connects a client to a running container's own input and output, from now
// on, until the container ends or ctx does. terminal must be as in the container's
// config. Stdin is ignored if the container was made without stdin, as containerd and
// CRI-O do; its end closes the container's stdin if the config says StdinOnce.
//
// Errors: NotFound, FailedPrecondition if the container is not running,
// InvalidArgument if terminal does not match.
func (m *Manager) Attach(ctx context.Context, id string, terminal bool, s Streams) error {
	c, err := m.attachTarget(id, terminal)
	if err != nil {
		return err
	}
	session := shim.AttachIO{Stdout: s.Stdout, Stderr: s.Stderr}
	if terminal {
		session.Resize = s.Resize
	}
	if s.Stdin != nil {
		r, w := io.Pipe()
		if c.config.GetStdin() {
			session.Stdin = r
		} else if err := r.Close(); err != nil { // what is written fails, and is passed over
			return err
		}
		if err := m.copyInput(w, s.Stdin); err != nil {
			return err
		}
	}
	if err := shim.OpenMonitor(m.shimDir(c.id)).Attach(ctx, session); err != nil {
		return fmt.Errorf("container %s: %w", c.id, err)
	}
	return nil
}
