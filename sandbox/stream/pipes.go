package stream

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

// execPipes holds the pipes of one command. The zero value has none.
type execPipes struct {
	theirs  []*os.File
	stdin   *os.File // the kept end
	outputs []*output
}

// output creates a pipe that is copied to a writer, and returns the command's end. If there is no
// writer, it returns nil, which means /dev/null.
func (p *execPipes) output(to io.Writer, broken context.CancelCauseFunc) (*os.File, error) {
	if to == nil {
		return nil, nil
	}
	r, w, err := pipe(reading)
	if err != nil {
		return nil, err
	}
	p.outputs = append(p.outputs, copyOutput(r, to, broken))
	p.theirs = append(p.theirs, w)
	return w, nil
}

// input creates the pipe for stdin and returns the command's end.
func (p *execPipes) input() (*os.File, error) {
	r, w, err := pipe(writing)
	if err != nil {
		return nil, err
	}
	p.stdin, p.theirs = w, append(p.theirs, r)
	return r, nil
}

// closeTheirs closes the command's ends after the command has inherited them. Otherwise neither
// side would see that the other has closed the pipe.
func (p *execPipes) closeTheirs() {
	for _, f := range p.theirs {
		_ = f.Close() // no data is lost
	}
	p.theirs = nil
}

// close closes all pipes.
func (p *execPipes) close() {
	p.closeTheirs()
	for _, o := range p.outputs {
		o.close()
	}
	if p.stdin != nil {
		_ = p.stdin.Close() // copyInput may have closed it already
	}
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

// close ends the goroutine and closes the pipe.
func (o *output) close() {
	o.stop()
	_ = o.r.Close() // no data is lost
}
