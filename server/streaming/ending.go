package streaming

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// How a session ends. The last output may be unsent when the session's result is known, because
// the client reads slowly or has paused. If the server then closed its socket, the client's next
// ping would be answered with a reset, which discards the rest. Clients treat a missing result as
// success.
//
// So the server sends the end of the session in its protocol. This is the end of each SPDY stream,
// or a WebSocket's Close frame. Then it reads until the client has closed the connection. It does
// not shut down its direction of the TCP connection, because kubelet's proxy treats the end of one
// direction as the end of both.
//
// The wait ends early if a client is silent, if too many clients wait, or if the server stops.

// endLimits bounds how long ended sessions keep their connections.
type endLimits struct {
	// silence is the time after which a client is given up that neither sends nor takes data.
	silence time.Duration
	// waiting is the number of sessions that may wait for their client. If there are more, the
	// oldest end.
	waiting int
	// farewell is the time in which a session must end after its context. In this time it sends its
	// result, and its client receives it.
	farewell time.Duration
}

var defaultEndLimits = endLimits{silence: 10 * time.Minute, waiting: 256, farewell: 3 * time.Second}

// session is a connection whose client has shown a token.
type session struct {
	conn    *connection
	ctx     context.Context
	cancel  context.CancelCauseFunc
	forget  func()        // of hangups
	gone    chan struct{} // closed when either side has closed the connection
	ended   chan struct{} // closed when the handler has returned
	watcher sync.WaitGroup
	place   *list.Element // in the server's lingering list, guarded by the server's lock; nil: not there
}

// begin makes the session of a request. The caller must call end.
func (s *Server) begin(r *http.Request) (*session, error) {
	x := &session{conn: connectionOf(r), gone: make(chan struct{}), ended: make(chan struct{})}
	x.ctx, x.cancel = context.WithCancelCause(r.Context())
	var err error
	x.forget, err = s.hangups.add(x.conn, func() {
		x.cancel(errGone)
		close(x.gone)
	})
	if err != nil {
		x.cancel(err)
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		x.forget()
		x.cancel(errStopping)
		return nil, errStopping
	}
	s.sessions[x.conn] = x
	s.running.Add(1)
	x.conn.noteTraffic()
	x.watcher.Go(func() { x.watch(s.cfg.IdleTimeout, s.limits.farewell) })
	return x, nil
}

// end closes the connection, which ends all goroutines of the protocol's library.
func (s *Server) end(x *session) {
	defer s.running.Done()
	close(x.ended)
	x.watcher.Wait()
	x.forget()
	x.cancel(nil)
	_ = x.conn.Close() // usually closed already
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.sessions, x.conn)
}

// watch ends a session without traffic. If the session does not end in time after its context, it
// closes the connection, because the result may be blocked behind output.
func (x *session) watch(idle, farewell time.Duration) {
	timer := time.NewTimer(idle)
	defer timer.Stop()
	for x.ctx.Err() == nil {
		select {
		case <-x.ended:
			return
		case <-x.ctx.Done():
		case <-timer.C:
			if left := idle - x.conn.quiet(); left > 0 {
				timer.Reset(left)
			} else {
				x.cancel(fmt.Errorf("the session had no traffic for %v", idle))
			}
		}
	}
	timer.Reset(farewell)
	select {
	case <-x.ended:
	case <-timer.C:
		_ = x.conn.Close() // may be closed already
	}
}

// awaitClient waits until the client has closed the connection. The session has sent its end.
// clientEnd is closed when the client announces its end; it may be nil.
func (s *Server) awaitClient(r *http.Request, clientEnd <-chan bool) {
	x, surplus := s.linger(connectionOf(r))
	defer s.leave(x)
	if surplus != nil {
		_ = surplus.conn.Close() // may be closed already
	}
	check := time.NewTicker(s.limits.silence)
	defer check.Stop()
	last := x.conn.progress()
	for {
		select {
		case <-x.gone:
			return
		case <-clientEnd:
			return
		case <-check.C:
			if now := x.conn.progress(); now != last {
				last = now
				continue
			}
			s.cfg.Log.Info("close the connection of an ended session, because its client does not read or close it",
				"client", x.conn.RemoteAddr().String(), "unread", last.unsent)
			return
		}
	}
}

// linger records that a session waits for its client. If too many sessions wait, it returns the
// oldest, which the caller must close.
func (s *Server) linger(conn *connection) (x, surplus *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	x = s.sessions[conn]
	x.place = s.lingering.PushBack(x)
	if s.lingering.Len() > s.limits.waiting {
		surplus = s.lingering.Front().Value.(*session)
		s.leaveLocked(surplus)
	}
	return x, surplus
}

func (s *Server) leave(x *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leaveLocked(x)
}

// +checklocks:s.mu
func (s *Server) leaveLocked(x *session) {
	if x.place != nil {
		s.lingering.Remove(x.place)
		x.place = nil
	}
}

// progress shows whether a client is active.
type progress struct {
	traffic int64 // time of the last read or write
	unsent  int   // bytes that the client's kernel has not acknowledged
}

func (c *connection) progress() progress {
	p := progress{traffic: c.traffic.Load()}
	raw, err := c.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) { p.unsent, _ = unix.IoctlGetInt(int(fd), unix.TIOCOUTQ) })
	}
	if err != nil {
		return progress{} // closed
	}
	return p
}

// quiet returns the time since the last read or write.
func (c *connection) quiet() time.Duration { return time.Since(time.Unix(0, c.traffic.Load())) }

// noteTraffic records a successful read or write.
func (c *connection) noteTraffic() { c.traffic.Store(time.Now().UnixNano()) }

// maxDiscarded bounds the data that discard reads from a client that does not stop sending.
const maxDiscarded = 4 << 20

// discard reads what the client has sent. Otherwise closing the connection would reset it, and the
// client would lose unread data.
func (c *connection) discard() {
	raw, err := c.SyscallConn()
	if err != nil {
		return // closed
	}
	buffer := make([]byte, 64<<10)
	_ = raw.Control(func(fd uintptr) { // fails only for a closed connection
		for total := 0; total < maxDiscarded; {
			n, _, err := unix.Recvfrom(int(fd), buffer, unix.MSG_DONTWAIT|unix.MSG_TRUNC)
			if errors.Is(err, unix.EINTR) {
				continue
			}
			if n <= 0 || err != nil {
				return
			}
			total += n
		}
	})
}
