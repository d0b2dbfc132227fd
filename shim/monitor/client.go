package main

import (
	"errors"
	"os"
	"runtime"
	"runtime/debug"

	"golang.org/x/sys/unix"

	"berth/shim/wire"
)

var (
	errNoTerminal = errors.New("the container has no terminal")
	errBadRequest = errors.New("unknown request")
)

const (
	// maxQueued is how many bytes may wait for all clients together; then the one that
	// most of them wait for is dropped. A burst of output is faster than any reader,
	// but those that do not read must not cost more, however many they are.
	maxQueued = 4 << 20
	// muchQueued is from when on memory that clients have used is given back to the
	// kernel at once, and not when the runtime comes to it.
	muchQueued = 256 << 10
	// maxClients bounds what connections can cost.
	maxClients = 64
)

// client is one connection to Dir/sock.
type client struct {
	fd       int
	in       []byte   // received, not yet carried out
	queue    [][]byte // to be sent
	queued   int      // bytes in queue
	wants    wire.Streams
	attached bool
	ended    bool // it sends nothing any more
	gone     bool // it has hung up
	dead     bool // to be swept away
}

// accept takes one connection, if it is root's or our own user's.
func (m *monitor) accept() {
	fd, _, err := unix.Accept4(m.params.Listen, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
	if err != nil {
		return
	}
	peer, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	allowed := err == nil && (peer.Uid == 0 || int(peer.Uid) == os.Geteuid())
	if allowed && len(m.clients) >= maxClients {
		m.evict()
	}
	if !allowed || len(m.clients) >= maxClients || m.watch(fd, unix.EPOLLIN) != nil {
		_ = unix.Close(fd)
		return
	}
	m.clients = append(m.clients, &client{fd: fd})
}

// evict makes room, or a container that never reads its stdin would keep its log
// from being rotated: the oldest client that has hung up, else the oldest of all.
func (m *monitor) evict() {
	victim := m.clients[0]
	for _, c := range m.clients {
		if c.gone {
			victim = c
			break
		}
	}
	victim.dead = true
	m.sweep()
}

// serve handles what epoll says about a client.
func (m *monitor) serve(c *client, events uint32) {
	if events&unix.EPOLLOUT != 0 {
		m.sendQueue(c)
	}
	if events&(unix.EPOLLHUP|unix.EPOLLERR) != 0 {
		c.lost()
		c.gone = true
	}
	if !c.ended && events&(unix.EPOLLIN|unix.EPOLLHUP|unix.EPOLLERR) != 0 {
		m.receive(c)
	}
	m.carryOut(c)
}

// receive reads at most what one frame takes, so that a client cannot fill memory.
func (m *monitor) receive(c *client) {
	const room = wire.HeaderSize + wire.MaxPayload
	if len(c.in) >= room {
		return
	}
	n, err := unix.Read(c.fd, frame[:room-len(c.in)])
	switch {
	case err == unix.EAGAIN || err == unix.EINTR:
	case n <= 0:
		c.ended = true
	default:
		c.in = append(c.in, frame[:n]...)
	}
}

// carryOut executes the requests received, until one has to wait.
func (m *monitor) carryOut(c *client) {
	done := 0
	for !c.dead {
		f, size, err := wire.Next(c.in[done:])
		if err != nil {
			c.dead = true
			return
		}
		if size == 0 || f.Type == wire.Stdin && m.mustWait() {
			break
		}
		m.request(c, f)
		done += size
	}
	c.in = c.in[:copy(c.in, c.in[done:])]
	if c.ended && !m.waits(c) {
		c.dead = true
	}
	m.watchClient(c)
}

// mustWait tells whether the container has not taken earlier input yet.
func (m *monitor) mustWait() bool { return len(m.stdin.pending) > 0 }

// waits tells whether the client's next request is complete, but has to wait.
func (m *monitor) waits(c *client) bool {
	_, size, err := wire.Next(c.in)
	return size > 0 && err == nil && m.mustWait()
}

func (m *monitor) request(c *client, f wire.Frame) {
	switch f.Type {
	case wire.Stdin:
		if c.wants&wire.WantStdin != 0 {
			m.writeStdin(f.Payload)
		}
	case wire.StdinEOF:
		m.stdinLeft(c)
	case wire.Attach:
		m.answer(c, c.attach(f.Payload))
	case wire.Resize:
		m.answer(c, m.resize(f.Payload))
	case wire.Reopen:
		m.answer(c, m.reopenLog())
	case wire.CloseStdin:
		m.closeStdin()
		m.answer(c, nil)
	default:
		m.answer(c, errBadRequest)
	}
}

func (c *client) attach(payload []byte) error {
	if len(payload) != 1 || c.attached {
		return errBadRequest
	}
	c.attached, c.wants = true, wire.Streams(payload[0])
	return nil
}

// stdinLeft notes that a client gives no input any more.
func (m *monitor) stdinLeft(c *client) {
	if c.wants&wire.WantStdin == 0 {
		return
	}
	c.wants &^= wire.WantStdin
	if m.params.StdinOnce {
		m.closeStdin()
	}
}

func (m *monitor) answer(c *client, err error) {
	if err != nil {
		text := err.Error()
		m.send(c, wire.Append(nil, wire.Error, []byte(text[:min(len(text), wire.MaxPayload)])))
		return
	}
	m.send(c, wire.Append(nil, wire.OK, nil))
}

// broadcast sends a frame of output to everybody who wants it.
func (m *monitor) broadcast(t wire.Type, frame []byte) {
	want := wire.WantStdout
	if t == wire.Stderr {
		want = wire.WantStderr
	}
	for _, c := range m.clients {
		if c.wants&want != 0 && !c.dead {
			m.send(c, frame)
		}
	}
}

// send sends data, which is the caller's, or queues a copy of what cannot be sent.
func (m *monitor) send(c *client, data []byte) {
	if len(c.queue) == 0 {
		n, err := write(c.fd, data)
		if err != nil {
			c.lost()
			return
		}
		data = data[n:]
	}
	if len(data) == 0 {
		return
	}
	for m.queued()+len(data) > maxQueued {
		slowest := m.slowest()
		slowest.lost()
		slowest.dead = true
		if slowest == c || c.dead {
			return
		}
	}
	c.queue = append(c.queue, append([]byte(nil), data...))
	c.queued += len(data)
	m.mostQueued = max(m.mostQueued, m.queued())
	m.watchClient(c)
}

// queued is how many bytes wait for clients.
func (m *monitor) queued() int {
	n := 0
	for _, c := range m.clients {
		n += c.queued
	}
	return n
}

// slowest returns the client for which most bytes wait.
func (m *monitor) slowest() *client {
	slowest := m.clients[0]
	for _, c := range m.clients {
		if c.queued > slowest.queued {
			slowest = c
		}
	}
	return slowest
}

func (m *monitor) sendQueue(c *client) {
	for len(c.queue) > 0 {
		n, err := write(c.fd, c.queue[0])
		if err != nil {
			c.lost()
			return
		}
		c.queued -= n
		if n < len(c.queue[0]) {
			c.queue[0] = c.queue[0][n:]
			return
		}
		c.queue = c.queue[1:]
	}
	c.queue = nil
}

// lost notes that nothing can be sent to a client. What it sent before it went
// still counts.
func (c *client) lost() {
	c.wants &^= wire.WantStdout | wire.WantStderr
	c.queue, c.queued = nil, 0
}

// write sends what the socket takes now.
func write(fd int, data []byte) (int, error) {
	n, err := unix.SendmsgN(fd, data, nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	if err == unix.EAGAIN || err == unix.EINTR {
		return 0, nil
	}
	return n, err
}

// watchClient waits for input unless an earlier request is waiting, and for room
// if something is queued.
func (m *monitor) watchClient(c *client) {
	if c.dead {
		return
	}
	var events uint32
	if !c.ended && !m.waits(c) {
		events |= unix.EPOLLIN
	}
	if len(c.queue) > 0 {
		events |= unix.EPOLLOUT
	}
	if events == 0 {
		m.forget(c.fd) // epoll would report its hang-up again and again
		return
	}
	_ = m.watch(c.fd, events)
}

// resumeClients goes on with requests that waited for the container.
func (m *monitor) resumeClients() {
	for _, c := range m.clients {
		if !c.dead {
			m.carryOut(c)
		}
	}
}

// sweep removes dead clients.
func (m *monitor) sweep() {
	for i := 0; i < len(m.clients); {
		c := m.clients[i]
		if !c.dead {
			i++
			continue
		}
		m.stdinLeft(c)
		_ = unix.Close(c.fd)
		m.clients = append(m.clients[:i], m.clients[i+1:]...)
		if len(m.clients) == 0 {
			m.clients = nil
			runtime.GC() // back to what a monitor costs that nobody is attached to
		}
	}
	if m.mostQueued > muchQueued && m.queued() == 0 {
		m.mostQueued = 0
		debug.FreeOSMemory()
	}
}
