package copying

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// pipeEnd selects the end of a pipe that this process keeps. The command gets the other end.
type pipeEnd int

const (
	reading pipeEnd = iota
	writing
)

// pipe creates a pipe whose kept end is non-blocking. Commands expect their end to block.
func pipe(ours pipeEnd) (r, w *os.File, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, fmt.Errorf("create pipe: %w", err)
	}
	if err := unix.SetNonblock(fds[ours], true); err != nil {
		return nil, nil, errors.Join(fmt.Errorf("create pipe: %w", err), unix.Close(fds[0]), unix.Close(fds[1]))
	}
	return os.NewFile(uintptr(fds[0]), "exec pipe"), os.NewFile(uintptr(fds[1]), "exec pipe"), nil
}

// Pipes are the ends of a command's stdin, stdout and stderr. nil stands for /dev/null.
type Pipes [3]*os.File

// Close closes the pipes.
func (p Pipes) Close() {
	for _, f := range p {
		if f != nil {
			_ = f.Close() // no data is lost, or it is closed already
		}
	}
}

// OpenPipes creates the pipes of a command. The command gets theirs. The caller closes both.
func OpenPipes(stdin, stdout, stderr bool) (theirs, kept Pipes, err error) {
	for i, wanted := range []bool{stdin, stdout, stderr} {
		if !wanted {
			continue
		}
		ours := reading
		if i == 0 {
			ours = writing
		}
		r, w, err := pipe(ours)
		if err != nil {
			theirs.Close()
			kept.Close()
			return Pipes{}, Pipes{}, err
		}
		theirs[i], kept[i] = w, r
		if i == 0 {
			theirs[i], kept[i] = r, w
		}
	}
	return theirs, kept, nil
}

// output copies the output of a command from a pipe or terminal to a writer. finish and stop end
// its goroutine and wait for it.
type output struct {
	r       *os.File
	to      io.Writer
	done    chan struct{} // closed when the goroutine has returned
	stopped sync.Once
	err     error // owned by the goroutine until done is closed, then by the caller of stop
}

// copyOutput starts copying. It calls broken when the writer fails.
func copyOutput(r *os.File, to io.Writer, broken context.CancelCauseFunc) *output {
	o := &output{r: r, to: to, done: make(chan struct{})}
	go func() {
		defer close(o.done)
		if o.err = o.copy(); o.err != nil {
			broken(o.err)
		}
	}()
	return o
}

func (o *output) copy() error {
	buf := make([]byte, 32<<10)
	for {
		n, err := o.r.Read(buf)
		if writeErr := o.deliver(buf[:n]); writeErr != nil {
			return writeErr
		}
		switch {
		case err == nil:
		case err == io.EOF, errors.Is(err, os.ErrDeadlineExceeded):
			return nil
		case errors.Is(err, unix.EIO): // no process has the terminal open
			return nil
		default:
			return fmt.Errorf("read command output: %w", err)
		}
	}
}

func (o *output) deliver(data []byte) error {
	if len(data) == 0 {
		return nil
	}
	if _, err := o.to.Write(data); err != nil {
		return fmt.Errorf("write command output to client: %w", err)
	}
	return nil
}

// stop ends the goroutine.
func (o *output) stop() {
	o.stopped.Do(func() {
		if err := o.r.SetReadDeadline(time.Unix(1, 0)); err != nil {
			_ = o.r.Close() // always ends the read
			<-o.done
			o.err = errors.Join(o.err, fmt.Errorf("stop reading output: %w", err))
			return
		}
		<-o.done
	})
}

// finish delivers all output that was written before the command exited, including the rest in the
// pipe. It does not wait for other processes that have the pipe open.
func (o *output) finish() error {
	o.stop()
	if o.err != nil {
		return o.err
	}
	conn, err := o.r.SyscallConn()
	if err != nil {
		return fmt.Errorf("read command output: %w", err)
	}
	buf := make([]byte, 64<<10)
	// A pipe holds 64 KiB by default and 1 MiB at most (fs.pipe-max-size). The limit stops this
	// loop even if a background process keeps writing.
	for left := 1 << 20; left > 0; {
		n := 0
		var readErr error
		err := conn.Control(func(fd uintptr) { n, readErr = unix.Read(int(fd), buf) })
		switch {
		case err != nil:
			return fmt.Errorf("read command output: %w", err)
		case readErr == unix.EINTR:
			continue
		case readErr == unix.EAGAIN, readErr == unix.EIO, readErr == nil && n == 0:
			return nil
		case readErr != nil:
			return fmt.Errorf("read command output: %w", readErr)
		}
		if err := o.deliver(buf[:n]); err != nil {
			return err
		}
		left -= n
	}
	return nil
}
