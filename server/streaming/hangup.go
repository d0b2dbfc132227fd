package streaming

import (
	"container/list"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

var errGone = errors.New("the client disconnected")

// hangups detects clients that disconnect. The protocols' libraries detect it only when they read,
// and they do not read while a command ignores its stdin. net/http stops watching a connection that
// is upgraded. One goroutine waits for all connections. If the client has filled all buffers, the
// end of its stream is queued behind the data. It is then detected only when the client's kernel
// gives up.
type hangups struct {
	epoll *os.File
	ended chan struct{} // closed at the goroutine's end

	mu sync.Mutex
	// +checklocks:mu
	last uint64
	// +checklocks:mu
	waiting map[uint64]func()
}

func watchHangups() (*hangups, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil { // lets Go's poller wait for the epoll descriptor
		return nil, errors.Join(os.NewSyscallError("fcntl", err), unix.Close(fd))
	}
	h := &hangups{epoll: os.NewFile(uintptr(fd), "epoll"), ended: make(chan struct{}), waiting: map[uint64]func(){}}
	conn, err := h.epoll.SyscallConn()
	if err != nil {
		return nil, errors.Join(err, h.epoll.Close())
	}
	go func() {
		defer close(h.ended)
		_ = conn.Read(h.poll) // ends with an error when epoll is closed
	}()
	return h, nil
}

// Close ends the goroutine. No callback is called afterwards.
func (h *hangups) Close() error {
	err := h.epoll.Close()
	<-h.ended
	return err
}

// poll calls the callbacks of clients that have disconnected. It always returns false, so that the
// caller's wait continues.
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

// connection also reports its own Close. A closed descriptor leaves epoll silently. The protocols'
// libraries close it when they read the client's end, which may be before epoll reports it.
type connection struct {
	*net.TCPConn
	gate     *gate // nil in tests
	accepted time.Time
	traffic  atomic.Int64  // time of the last read or write, in ns
	heard    bool          // the first bytes were read; used by Read only
	in       *list.List    // the gate's list, guarded by the gate's lock; nil: in no list
	place    *list.Element // the element of in

	mu sync.Mutex
	// +checklocks:mu
	gone func() // callback; nil: not set
	// +checklocks:mu
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
	c.discard()
	return c.TCPConn.Close()
}

// Write implements net.Conn.
func (c *connection) Write(p []byte) (int, error) {
	n, err := c.TCPConn.Write(p)
	if n > 0 {
		c.noteTraffic()
	}
	return n, err
}

// onClose calls gone when the connection is closed, or at once if it is already closed.
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

// add calls gone once, soon after either side has closed conn or conn is lost.
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
		_ = h.control(raw, unix.EPOLL_CTL_DEL, id) // fails for a closed descriptor, which has left epoll
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
			// epoll always reports hang-ups and errors. EPOLLONESHOT prevents that epoll reports
			// them endlessly.
			event := unix.EpollEvent{Events: unix.EPOLLRDHUP | unix.EPOLLONESHOT, Fd: int32(id), Pad: int32(id >> 32)}
			ctlErr = unix.EpollCtl(int(epfd), operation, int(fd), &event)
		})
		ctlErr = errors.Join(ctlErr, err)
	})
	return errors.Join(err, ctlErr)
}

// id returns the ID that control has put into the event.
func id(e unix.EpollEvent) uint64 { return uint64(uint32(e.Fd)) | uint64(uint32(e.Pad))<<32 }
