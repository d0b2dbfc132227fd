package streaming

import (
	"container/list"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

var errGone = errors.New("the client is gone")

// hangups tells when clients hang up. The protocols' implementation finds out by
// reading, which it does not while a command does not take its stdin; net/http gives a
// connection up when it is upgraded. One goroutine waits for all connections. (A client
// that has sent more than all buffers hold is noticed when its kernel gives up: its
// end comes after what it has sent.)
type hangups struct {
	epoll *os.File
	ended chan struct{} // closed when the goroutine has ended

	mu      sync.Mutex // guards what follows
	last    uint64
	waiting map[uint64]func()
}

func watchHangups() (*hangups, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil { // so that Go's own poller waits for it
		return nil, errors.Join(os.NewSyscallError("fcntl", err), unix.Close(fd))
	}
	h := &hangups{epoll: os.NewFile(uintptr(fd), "epoll"), ended: make(chan struct{}), waiting: map[uint64]func(){}}
	conn, err := h.epoll.SyscallConn()
	if err != nil {
		return nil, errors.Join(err, h.epoll.Close())
	}
	go func() {
		defer close(h.ended)
		_ = conn.Read(h.poll) // its error is that epoll was closed
	}()
	return h, nil
}

// Close ends the goroutine. Nobody is told any more.
func (h *hangups) Close() error {
	err := h.epoll.Close()
	<-h.ended
	return err
}

// poll tells those whose clients have hung up; never is it done.
func (h *hangups) poll(fd uintptr) (done bool) {
	var events [16]unix.EpollEvent
	for {
		n, err := unix.EpollWait(int(fd), events[:], 0)
		if err == unix.EINTR {
			continue
		}
		for _, e := range events[:max(n, 0)] {
			if gone := h.take(id(e)); gone != nil {
				gone()
			}
		}
		if n < len(events) {
			return false
		}
	}
}

func (h *hangups) take(id uint64) func() {
	h.mu.Lock()
	defer h.mu.Unlock()
	gone := h.waiting[id]
	delete(h.waiting, id)
	return gone
}

// connection is one that tells when it is closed here. A descriptor that is closed
// leaves epoll without a word, and the protocols' implementation closes it when it
// reads of the client's end, which may be before we are told.
type connection struct {
	*net.TCPConn
	gate     *gate // nil in tests
	accepted time.Time
	heard    bool          // the first bytes have been read; of Read, of which there is one at a time
	in       *list.List    // of gate's, guarded by its lock; nil: in none
	place    *list.Element // in in

	mu     sync.Mutex // guards what follows
	gone   func()     // nil: nobody waits
	closed bool
}

// Close implements net.Conn.
func (c *connection) Close() error {
	c.mu.Lock()
	gone := c.gone
	c.gone, c.closed = nil, true
	c.mu.Unlock()
	if gone != nil {
		gone()
	}
	if c.gate != nil {
		c.gate.forget(c)
	}
	return c.TCPConn.Close()
}

// onClose has gone called when the connection is closed; it is already if it was.
func (c *connection) onClose(gone func()) {
	c.mu.Lock()
	closed := c.closed
	if !closed {
		c.gone = gone
	}
	c.mu.Unlock()
	if closed && gone != nil {
		gone()
	}
}

// add calls gone, once and quickly, when conn is closed, by whomever, or lost.
func (h *hangups) add(conn *connection, gone func()) (forget func(), err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	h.mu.Lock()
	h.last++
	id := h.last
	h.waiting[id] = gone
	h.mu.Unlock()
	forget = func() {
		h.take(id)
		conn.onClose(nil)
		_ = h.control(raw, unix.EPOLL_CTL_DEL, id) // a closed descriptor has left epoll by itself
	}
	conn.onClose(func() {
		if gone := h.take(id); gone != nil {
			gone()
		}
	})
	if err := h.control(raw, unix.EPOLL_CTL_ADD, id); err != nil {
		forget()
		return nil, fmt.Errorf("watch a connection: %w", err)
	}
	return forget, nil
}

func (h *hangups) control(conn syscall.RawConn, operation int, id uint64) error {
	epoll, err := h.epoll.SyscallConn()
	if err != nil {
		return err
	}
	var ctlErr error
	err = epoll.Control(func(epfd uintptr) {
		err := conn.Control(func(fd uintptr) {
			// Hang-ups and errors are told always; once, or poll would be called without end.
			event := unix.EpollEvent{Events: unix.EPOLLRDHUP | unix.EPOLLONESHOT, Fd: int32(id), Pad: int32(id >> 32)}
			ctlErr = unix.EpollCtl(int(epfd), operation, int(fd), &event)
		})
		ctlErr = errors.Join(ctlErr, err)
	})
	return errors.Join(err, ctlErr)
}

// id is what control has put into the event.
func id(e unix.EpollEvent) uint64 { return uint64(uint32(e.Fd)) | uint64(uint32(e.Pad))<<32 }
