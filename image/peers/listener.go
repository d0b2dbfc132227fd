package peers

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"

	"berth/internal/fair"
	"berth/internal/lograte"
	"berth/internal/task"
)

const (
	// maxHandshakes limits the connections whose TLS handshake is not complete. A handshake takes a
	// goroutine and about 30 KB.
	maxHandshakes = 256
	// acceptPause is the time between two attempts to accept a connection while descriptors lack.
	acceptPause = 100 * time.Millisecond
)

// memberListener accepts connections whose client has shown a certificate of the CA. Only such
// connections take places of the server, and certificates share the places fairly.
//
// Anyone can connect, and be silent. So the time and the number of handshakes are limited. If there
// are too many, a new handshake ends the oldest one. At 200 connections a second a handshake still
// has more than a second, and it takes milliseconds. Connections from addresses of members are
// ended last.
type memberListener struct {
	net.Listener
	config   *tls.Config
	timeout  time.Duration // of a handshake
	places   *fair.Slots   // of connections after the handshake, by certificate
	known    func(net.Addr) bool
	life     *task.Lifetime
	log      *slog.Logger
	full     lograte.Limiter
	refused  lograte.Limiter // by the kernel, in Accept
	accepted chan net.Conn
	closed   chan struct{} // by Close
	closing  sync.Once

	mu sync.Mutex
	// +checklocks:mu
	pending []*handshake
}

// handshake is a connection whose TLS handshake is not complete.
type handshake struct {
	net.Conn
	known bool // it comes from the address of a member
}

// newMemberListener returns a listener whose goroutines end with life. known reports whether an
// address belongs to a member.
func newMemberListener(of net.Listener, config *tls.Config, timeout time.Duration, places int,
	known func(net.Addr) bool, life *task.Lifetime, log *slog.Logger) *memberListener {
	return &memberListener{Listener: of, config: config, timeout: timeout, places: fair.NewSlots(places), known: known,
		life: life,
		log:  log, accepted: make(chan net.Conn), closed: make(chan struct{})}
}

// run begins handshakes until the listener is closed.
func (m *memberListener) run() {
	defer m.endAll()
	for {
		conn, err := m.Listener.Accept()
		switch {
		case err == nil:
			m.begin(conn)
		case errors.Is(err, net.ErrClosed):
			return
		default: // no descriptor is free, or the connection has ended already
			m.refused.Warn(m.log, "accept a connection for peers; another attempt follows", "error", err)
			select {
			case <-time.After(acceptPause):
			case <-m.closed:
				return
			}
		}
	}
}

// begin begins a handshake, if there is room for it.
func (m *memberListener) begin(conn net.Conn) {
	h := &handshake{Conn: conn, known: m.known(conn.RemoteAddr())}
	end, ok := m.enter(h)
	if end != nil {
		_ = end.Close() // its goroutine removes it
	}
	if ok && m.life.Spawn(func() { m.admit(h) }) {
		return
	}
	m.leave(h)
	_ = conn.Close() // refused
}

// enter adds a handshake. If there are too many, it replaces another handshake, and returns it as
// end. ok is false if all other handshakes are from members and h is not.
func (m *memberListener) enter(h *handshake) (end *handshake, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.pending) >= maxHandshakes {
		i := slices.IndexFunc(m.pending, func(o *handshake) bool { return !o.known })
		if i < 0 && !h.known {
			return nil, false
		}
		i = max(i, 0)
		end = m.pending[i]
		m.pending = slices.Delete(m.pending, i, i+1)
	}
	m.pending = append(m.pending, h)
	return end, true
}

// leave removes a handshake. It returns false if another handshake has replaced it.
func (m *memberListener) leave(h *handshake) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	i := slices.Index(m.pending, h)
	if i >= 0 {
		m.pending = slices.Delete(m.pending, i, i+1)
	}
	return i >= 0
}

// handshakes returns the number of handshakes.
func (m *memberListener) handshakes() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.pending)
}

// endAll ends all handshakes.
func (m *memberListener) endAll() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, h := range m.pending {
		_ = h.Close() // its goroutine removes it
	}
}

// admit shakes hands, and hands the connection of a member to Accept.
func (m *memberListener) admit(h *handshake) {
	counted := &countedConn{Conn: h.Conn}
	conn := tls.Server(counted, m.config)
	// A stranger whose bytes cause a panic must not end berth. net/http has not seen it yet.
	err := task.Guard(m.log, "shake hands with", "a client for peers", func() error { return m.shakeHands(conn) })
	if !m.leave(h) || err != nil {
		m.log.Debug("a client of the port for peers is no peer", "address", h.RemoteAddr(), "error", err)
		_ = counted.Close() // refused
		return
	}
	release, ok := m.places.TryAcquire(certificateOf(conn.ConnectionState()))
	if !ok {
		m.full.Warn(m.log, "a peer is refused: there are too many connections", "address", h.RemoteAddr())
		_ = conn.Close() // refused
		return
	}
	counted.release = release
	select {
	case m.accepted <- conn:
	case <-m.closed:
		_ = conn.Close() // berth ends
	}
}

// shakeHands authenticates the client within the timeout.
func (m *memberListener) shakeHands(conn *tls.Conn) error {
	if err := conn.SetDeadline(time.Now().Add(m.timeout)); err != nil {
		return err
	}
	if err := conn.HandshakeContext(context.Background()); err != nil { // endAll ends it
		return err
	}
	return conn.SetDeadline(time.Time{})
}

// Accept implements net.Listener.
func (m *memberListener) Accept() (net.Conn, error) {
	select {
	case conn := <-m.accepted:
		return conn, nil
	case <-m.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (m *memberListener) Close() error {
	m.closing.Do(func() { close(m.closed) })
	return m.Listener.Close()
}

// countedConn is a connection that gives its place back when it is closed.
type countedConn struct {
	net.Conn
	once    sync.Once
	release func() // nil: the connection has no place
}

// Close implements net.Conn.
func (c *countedConn) Close() error {
	if c.release != nil {
		c.once.Do(c.release)
	}
	return c.Conn.Close()
}
