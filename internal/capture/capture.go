// Package capture reads the complete output of a program.
//
// # Contract
//
// It keeps the output that the program wrote before its exit, up to a limit, even if this process
// is busy. A child that has inherited the output does not delay the end. os/exec's pipes cannot do
// both. After WaitDelay they are closed, even if their content was not read. This happened at a
// load of 28 on two CPUs, with a delay of 500 ms.
package capture

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Output captures one output stream of one program. Its methods are for one goroutine.
type Output struct {
	max         int
	kept        bytes.Buffer
	total       int
	read, write *os.File
	stopped     chan struct{} // closed when the reader has stopped; until then the reader owns kept and total
}

// New returns an empty output that keeps limit bytes. It holds two descriptors until Started, and
// one until End.
func New(limit int) (*Output, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("create a pipe for output: %w", err)
	}
	o := &Output{max: limit, read: r, write: w, stopped: make(chan struct{})}
	go o.follow()
	return o, nil
}

// File returns the file to pass to the program. It is valid until Started.
func (o *Output) File() *os.File { return o.write }

// Started closes this process's copy of the file. Call it after the program has started. A caller
// that does not call Started must call End.
func (o *Output) Started() error {
	w := o.write
	o.write = nil
	return w.Close()
}

// follow reads until End, so that the program never blocks on a full pipe.
func (o *Output) follow() {
	defer close(o.stopped)
	buf := make([]byte, 4<<10)
	for {
		n, err := o.read.Read(buf)
		o.keep(buf[:n])
		if err != nil { // all writers have closed the pipe, or End was called
			return
		}
	}
}

// maxLeft limits how many bytes End reads. It is the size of the largest pipe. A surviving child
// could write forever.
const maxLeft = 1 << 20

// End reads the remaining output without waiting for more, and closes everything. The program must
// have exited, or must not have been started.
func (o *Output) End() error {
	err := o.read.SetReadDeadline(time.Unix(1, 0))
	if err == nil {
		<-o.stopped
		err = errors.Join(o.read.SetReadDeadline(time.Time{}), o.drain())
	}
	if o.write != nil {
		err = errors.Join(err, o.write.Close())
	}
	return errors.Join(err, o.read.Close())
}

func (o *Output) drain() error {
	conn, err := o.read.SyscallConn()
	if err != nil {
		return err
	}
	var readErr error
	err = conn.Read(func(fd uintptr) bool {
		readErr = o.drainFrom(int(fd))
		return true
	})
	return errors.Join(err, readErr)
}

// drainFrom reads a non-blocking pipe.
func (o *Output) drainFrom(fd int) error {
	buf := make([]byte, 4<<10)
	for left := maxLeft; left > 0; {
		n, err := unix.Read(fd, buf)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			return nil
		case err != nil:
			return fmt.Errorf("read output: %w", err)
		case n == 0:
			return nil
		}
		o.keep(buf[:n])
		left -= n
	}
	return nil
}

func (o *Output) keep(b []byte) {
	o.total += len(b)
	o.kept.Write(b[:min(len(b), o.max-o.kept.Len())])
}

// Bytes returns the kept beginning of the output. Valid after End.
func (o *Output) Bytes() []byte { return o.kept.Bytes() }

// Total returns how many bytes the program has written. Valid after End.
func (o *Output) Total() int { return o.total }
