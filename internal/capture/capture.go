// Package output keeps what a program prints, to the last byte.
//
// # Contract
//
// What the program has written when it ends is kept, up to a limit, however busy this process is; and who has inherited the output, a
// child in the background for one, keeps nobody waiting. With os/exec's own pipes it is one or the other: after WaitDelay they
// are closed, whether or not what is in them was read (seen at a load of 28 on two CPUs, with a delay of 500 ms).
package capture

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Output is what one program prints to one of its files. Its methods are for one goroutine.
type Output struct {
	max         int
	kept        bytes.Buffer
	total       int
	read, write *os.File
	stopped     chan struct{} // closed when nobody reads; before that, kept and total are the reader's
}

// New returns an empty output of which limit bytes are kept. It has two descriptors until Started, and one until End.
func New(limit int) (*Output, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("make a pipe for output: %w", err)
	}
	o := &Output{max: limit, read: r, write: w, stopped: make(chan struct{})}
	go o.follow()
	return o, nil
}

// File is what the program gets, until Started.
func (o *Output) File() *os.File { return o.write }

// Started is to be called when the program has the file. Who does not call it calls End.
func (o *Output) Started() error {
	w := o.write
	o.write = nil
	return w.Close()
}

// follow reads until End, so that the program never waits for somebody to read.
func (o *Output) follow() {
	defer close(o.stopped)
	buf := make([]byte, 4<<10)
	for {
		n, err := o.read.Read(buf)
		o.keep(buf[:n])
		if err != nil { // all writers have gone, or End
			return
		}
	}
}

// maxLeft bounds what End reads, in bytes: the largest pipe. Whoever still writes could go on for ever.
const maxLeft = 1 << 20

// End reads what is there still, without waiting for more, and closes all. The program has ended, or was not started.
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

// drainFrom reads a pipe that does not block.
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

// Bytes is the beginning of what was printed, as much as is kept. Only after End.
func (o *Output) Bytes() []byte { return o.kept.Bytes() }

// Total is how many bytes were printed. Only after End.
func (o *Output) Total() int { return o.total }
