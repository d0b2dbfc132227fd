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

// pipeEnd says which end of a pipe is ours; the other is a command's.
type pipeEnd int

const (
	reading pipeEnd = iota
	writing
)

// pipe makes a pipe of which only our end is non-blocking: commands expect theirs to
// block.
func pipe(ours pipeEnd) (r, w *os.File, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, fmt.Errorf("make pipe: %w", err)
	}
	if err := unix.SetNonblock(fds[ours], true); err != nil {
		return nil, nil, errors.Join(fmt.Errorf("make pipe: %w", err), unix.Close(fds[0]), unix.Close(fds[1]))
	}
	return os.NewFile(uintptr(fds[0]), "exec pipe"), os.NewFile(uintptr(fds[1]), "exec pipe"), nil
}

// execPipes are the pipes of one command. Its zero value has none.
type execPipes struct {
	theirs  []*os.File
	stdin   *os.File // our end
	outputs []*output
}

// output makes a pipe of which everything goes to a writer, and returns the command's
// end; nil, which is /dev/null, if there is no writer.
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

// input makes the pipe for stdin, and returns the command's end.
func (p *execPipes) input() (*os.File, error) {
	r, w, err := pipe(writing)
	if err != nil {
		return nil, err
	}
	p.stdin, p.theirs = w, append(p.theirs, r)
	return r, nil
}

// closeTheirs closes the command's ends, when it has its own: it is to see that the
// client has closed its input, and we that it has closed its.
func (p *execPipes) closeTheirs() {
	for _, f := range p.theirs {
		_ = f.Close() // nothing to lose
	}
	p.theirs = nil
}

// close gives everything up.
func (p *execPipes) close() {
	p.closeTheirs()
	for _, o := range p.outputs {
		o.close()
	}
	if p.stdin != nil {
		_ = p.stdin.Close() // whoever copies to it may have done it before
	}
}

// output copies what a command writes, into a pipe or a terminal, to a writer. Its
// goroutine ends by finish or stop, which wait for it.
type output struct {
	r       *os.File
	to      io.Writer
	done    chan struct{} // closed when the goroutine has ended
	stopped sync.Once
	err     error // of the goroutine, and after it of whoever stopped it
}

// copyOutput begins to copy. broken is told when to takes no more, which is the
// output's end.
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
		case err == io.EOF, errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, unix.EIO): // EIO: nobody has the terminal open
			return nil
		default:
			return fmt.Errorf("read output of the command: %w", err)
		}
	}
}

func (o *output) deliver(data []byte) error {
	if len(data) == 0 {
		return nil
	}
	if _, err := o.to.Write(data); err != nil {
		return fmt.Errorf("deliver output of the command: %w", err)
	}
	return nil
}

// stop ends the goroutine.
func (o *output) stop() {
	o.stopped.Do(func() {
		if err := o.r.SetReadDeadline(time.Unix(1, 0)); err != nil {
			_ = o.r.Close() // ends the read for certain
			<-o.done
			o.err = errors.Join(o.err, fmt.Errorf("stop reading output: %w", err))
			return
		}
		<-o.done
	})
}

// finish delivers all output that was written before the command exited: what the
// goroutine has read, and what is in the pipe still. Whoever else has the pipe open is
// not waited for.
func (o *output) finish() error {
	o.stop()
	if o.err != nil {
		return o.err
	}
	conn, err := o.r.SyscallConn()
	if err != nil {
		return fmt.Errorf("read output of the command: %w", err)
	}
	buf := make([]byte, 64<<10)
	// A pipe holds 64 KiB by default, 1 MiB at most (fs.pipe-max-size): a background
	// process that goes on writing cannot keep us here.
	for left := 1 << 20; left > 0; {
		n := 0
		var readErr error
		err := conn.Control(func(fd uintptr) { n, readErr = unix.Read(int(fd), buf) })
		switch {
		case err != nil:
			return fmt.Errorf("read output of the command: %w", err)
		case readErr == unix.EINTR:
			continue
		case readErr == unix.EAGAIN, readErr == unix.EIO, readErr == nil && n == 0:
			return nil
		case readErr != nil:
			return fmt.Errorf("read output of the command: %w", readErr)
		}
		if err := o.deliver(buf[:n]); err != nil {
			return err
		}
		left -= n
	}
	return nil
}

// close ends the goroutine and gives the pipe up.
func (o *output) close() {
	o.stop()
	_ = o.r.Close() // nothing to lose
}
