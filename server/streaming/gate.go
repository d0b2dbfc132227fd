package streaming

import (
	"bytes"
	"container/list"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/lograte"
	"berth/sandbox/stream/copying"
)

const (
	// maxUnidentified bounds the connections that have not shown a token. If each has a header of
	// 64 KiB, they take 16 MiB.
	maxUnidentified = 256
	// silentTime is how long a silent connection is kept when there are too many. It is short,
	// because other clients wait in the kernel's queue, and a full queue drops them.
	silentTime = 5 * time.Millisecond
	// handshakeTimeout is how long a connection that has sent data without a token is kept when
	// there are too many. The data may be a TLS handshake.
	handshakeTimeout = 250 * time.Millisecond
	// lateTime is how long connections are accepted after a token was used. A client that uses a
	// URL twice gets a 404.
	lateTime = 5 * time.Second
	// maxQueue exceeds the kernel's queue of a listener (net.core.somaxconn; Go uses 16 bits of
	// it).
	maxQueue = 1 << 16
)

// gate is a listener that limits the resources of connections without a token. Any process of the
// node may connect to the port, and the kernel does not report which user owns a TCP connection. So
// the gate
//   - accepts only while a token is outstanding, and resets earlier connections, because at that
//     time no client had a URL
//   - keeps few connections without a token. It resets the oldest surplus connections, those
//     with data but no token first. A connection whose request names a token does not count,
//     even if the server has not read the request. With TLS the request is not visible. Then
//     silent connections are reset first, and the client must finish its handshake and its
//     request in time
//   - leaves descriptors for other uses (copying.FDQuota)
//
// The gate keeps listening while it does not accept. If it closed the port, another process could
// take the port (SO_REUSEADDR) and receive tokens.
type gate struct {
	listener  *net.TCPListener
	tokens    *tokens
	quota     copying.FDQuota
	most      int           // limit of the connections that have not shown a token
	handshake time.Duration // handshakeTimeout with TLS; 0 otherwise, because the first data shows the token
	log       *slog.Logger
	warned    lograte.Limiter

	closed chan struct{}
	close  sync.Once
	given  atomic.Bool   // another process has the listener
	wake   chan struct{} // signalled when a first token is offered

	mu sync.Mutex // taken before tokens' lock
	// +checklocks:mu
	late time.Time // until then, connections are accepted even if no token is outstanding
	// +checklocks:mu
	silent list.List // of *connection without data, oldest first
	// +checklocks:mu
	spoken list.List // of *connection with data but no token
}

func newGate(listener *net.TCPListener, tokens *tokens, overTLS bool, log *slog.Logger) (*gate, error) {
	quota, err := copying.NewFDQuota()
	if err != nil {
		return nil, err
	}
	g := &gate{
		listener: listener,
		tokens:   tokens,
		quota:    quota,
		most:     max(1, min(quota.Limit()/4, maxUnidentified)),
		log:      log,
		closed:   make(chan struct{}),
		wake:     make(chan struct{}, 1),
	}
	if overTLS {
		g.handshake = handshakeTimeout
	}
	return g, nil
}

// offer adds a token. If no token is outstanding it resets all connections in the kernel's queue,
// so that the queue is empty when the token's client connects.
func (g *gate) offer(add func() (string, error)) (string, error) {
	token, drained, err := g.offerDrained(add)
	if drained > 0 {
		g.warned.Warn(g.log, "reset connections to the streaming server that arrived before any session was offered",
			"connections", drained)
	}
	return token, err
}

func (g *gate) offerDrained(add func() (string, error)) (token string, drained int, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.openLocked() {
		token, err = add()
		return token, 0, err
	}
	drained = g.drain() // no client has a token yet
	token, err = add()
	select {
	case g.wake <- struct{}{}:
	default:
	}
	return token, drained, err
}

// drain resets the connections that the kernel has queued. It does not wait.
func (g *gate) drain() (drained int) {
	raw, err := g.listener.SyscallConn()
	if err != nil {
		return 0 // closed
	}
	_ = raw.Control(func(fd uintptr) { // fails only for a closed listener
		for range maxQueue {
			conn, _, err := unix.Accept4(int(fd), unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK)
			if err == unix.EINTR || err == unix.ECONNABORTED {
				continue
			}
			if err != nil {
				return
			}
			_ = unix.SetsockoptLinger(conn, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
			_ = unix.Close(conn)
			drained++
		}
	})
	return drained
}

// used records that a token has been used.
func (g *gate) used() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.late = time.Now().Add(lateTime)
}

// openLocked reports whether connections are accepted.
//
// +checklocks:g.mu
func (g *gate) openLocked() bool {
	now := time.Now()
	return now.Before(g.late) || g.tokens.outstanding(now)
}

func (g *gate) open() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.openLocked()
}

// Accept implements net.Listener.
func (g *gate) Accept() (net.Conn, error) {
	for {
		if err := g.waitOpen(); err != nil {
			return nil, err
		}
		if err := g.makeRoom(); err != nil {
			return nil, err
		}
		conn, err := g.listener.AcceptTCP()
		if err != nil && g.given.Load() {
			<-g.closed
			return nil, net.ErrClosed
		}
		if err != nil {
			return nil, err
		}
		if c := g.admit(conn); c != nil {
			return c, nil
		}
	}
}

// waitOpen waits until connections are accepted.
func (g *gate) waitOpen() error {
	for !g.open() {
		select {
		case <-g.wake:
		case <-g.closed:
			return net.ErrClosed
		}
	}
	return nil
}

// admit adds a connection without a token. It returns nil if it reset the connection.
func (g *gate) admit(conn *net.TCPConn) *connection {
	if fd := descriptorOf(conn); !g.quota.Allows(fd) {
		reset(conn)
		g.warned.Warn(g.log, "reset connections to the streaming server, because the remaining file descriptors are reserved",
			"descriptor", fd)
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.openLocked() { // the last token was used while Accept waited
		reset(conn)
		return nil
	}
	c := &connection{TCPConn: conn, gate: g, accepted: time.Now()}
	c.in, c.place = &g.silent, g.silent.PushBack(c)
	return c
}

// reset closes a connection without leaving state in the kernel.
func reset(conn *net.TCPConn) {
	_ = conn.SetLinger(0) // fails only for a lost connection
	_ = conn.Close()
}

func descriptorOf(conn *net.TCPConn) (number int) {
	raw, err := conn.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) { number = int(fd) })
	}
	if err != nil {
		return -1 // closed
	}
	return number
}

// makeRoom resets connections until there is room for another one without a token.
func (g *gate) makeRoom() error {
	for {
		victim, wait := g.surplus()
		switch {
		case victim == nil:
			return nil
		case wait > 0:
			timer := time.NewTimer(wait)
			select {
			case <-timer.C:
			case <-g.closed:
				timer.Stop()
				return net.ErrClosed
			}
		default:
			g.warned.Warn(g.log, "reset connections to the streaming server, because too many show no token", "most", g.most)
			_ = victim.SetLinger(0) // as in reset
			_ = victim.Close()
		}
	}
}

// surplus returns the connection to reset next and the time to wait before the reset. It returns
// nil if there is room.
func (g *gate) surplus() (victim *connection, wait time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.fullLocked() && g.handshake == 0 && g.spoken.Len() > 0 { // its first data had no token, so it is no client
		return g.spoken.Front().Value.(*connection), 0
	}
	for g.fullLocked() && g.silent.Len() > 0 {
		c := g.silent.Front().Value.(*connection)
		data := c.peek()
		if len(data) == 0 {
			return c, silentTime - time.Since(c.accepted)
		}
		g.heardLocked(c, data) // moves the connection out of silent
	}
	if !g.fullLocked() {
		return nil, 0
	}
	c := g.spoken.Front().Value.(*connection)
	return c, g.handshake - time.Since(c.accepted)
}

// fullLocked reports whether the maximum number of connections without a token is reached.
//
// +checklocks:g.mu
func (g *gate) fullLocked() bool { return g.silent.Len()+g.spoken.Len() >= g.most }

// heardLocked classifies a connection by its first bytes. A connection that names a token is not
// counted any more.
//
// +checklocks:g.mu
func (g *gate) heardLocked(c *connection, data []byte) {
	if c.in != &g.silent {
		return
	}
	kind, token := requested(data)
	g.forgetLocked(c)
	if g.tokens.claim(kind, token) {
		return
	}
	c.in, c.place = &g.spoken, g.spoken.PushBack(c)
}

// forget removes a connection that has shown a token or is closed.
func (g *gate) forget(c *connection) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.forgetLocked(c)
}

// +checklocks:g.mu
func (g *gate) forgetLocked(c *connection) {
	if c.in != nil {
		c.in.Remove(c.place)
		c.in, c.place = nil, nil
	}
}

// requested parses the first line of an HTTP request for a session's kind and token, by the pattern
// in server.go.
func requested(data []byte) (kind, token string) {
	line, _, _ := bytes.Cut(data, []byte("\r\n"))
	_, target, _ := bytes.Cut(line, []byte(" "))
	target, _, _ = bytes.Cut(target, []byte(" "))
	target, _, _ = bytes.Cut(target, []byte("?"))
	parts := bytes.Split(target, []byte("/"))
	if len(parts) != 3 || len(parts[0]) != 0 {
		return "", ""
	}
	return string(parts[1]), string(parts[2])
}

// Close implements net.Listener.
func (g *gate) Close() error {
	g.close.Do(func() { close(g.closed) })
	if g.given.Load() {
		return nil
	}
	return g.listener.Close()
}

// give returns the listener's socket for another process, and stops accepting.
func (g *gate) give() (*os.File, error) {
	f, err := g.listener.File()
	if err != nil {
		return nil, fmt.Errorf("give up the listener: %w", err)
	}
	g.given.Store(true)
	if err := g.listener.Close(); err != nil {
		return nil, errors.Join(fmt.Errorf("give up the listener: %w", err), f.Close())
	}
	return f, nil
}

// Addr implements net.Listener.
func (g *gate) Addr() net.Addr { return g.listener.Addr() }

// maxFirstLine exceeds the length of a session's request line.
const maxFirstLine = 256

// peek returns data that the client has sent and the server has not read. It returns no data if the
// client has disconnected.
func (c *connection) peek() []byte {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil
	}
	data, n := make([]byte, maxFirstLine), 0
	err = raw.Control(func(fd uintptr) {
		n, _, _ = unix.Recvfrom(int(fd), data, unix.MSG_PEEK|unix.MSG_DONTWAIT)
	})
	if err != nil {
		return nil
	}
	return data[:max(n, 0)]
}

// Read implements net.Conn. It reads and examines the first bytes under the gate's lock. Otherwise
// the gate could see an empty buffer between the two steps and reset the connection as silent.
func (c *connection) Read(p []byte) (n int, err error) {
	if c.heard || c.gate == nil || len(p) == 0 {
		n, err := c.TCPConn.Read(p)
		if n > 0 {
			c.noteTraffic()
		}
		return n, err
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	var readErr error
	err = raw.Read(func(fd uintptr) (done bool) {
		c.gate.mu.Lock()
		defer c.gate.mu.Unlock()
		n, _, readErr = unix.Recvfrom(int(fd), p, unix.MSG_DONTWAIT)
		if readErr == unix.EAGAIN || readErr == unix.EINTR {
			return false
		}
		if n > 0 {
			c.gate.heardLocked(c, p[:n])
		}
		return true
	})
	switch {
	case err != nil:
		return 0, err
	case readErr != nil:
		return 0, &net.OpError{Op: "read", Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(),
			Err: os.NewSyscallError("recvfrom", readErr)}
	case n == 0:
		return 0, io.EOF
	}
	c.heard = true
	return n, nil
}
