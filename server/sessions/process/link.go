package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"berth/internal/coded"
	"berth/internal/failpoint"
	"berth/sandbox/stream/copying"
	"berth/server/sessions/wire"
	"berth/shim/proto"
	"berth/shim/running"
)

// daemonTimeout bounds the wait for a daemon, which may be starting.
const daemonTimeout = 30 * time.Second

// link is the connection to the daemon, and the sessions that the daemon counts. The lock is held
// for changes of the fields only.
type link struct {
	mu sync.Mutex
	// +checklocks:mu
	daemon *proto.Conn // nil: there is none
	// +checklocks:mu
	changed chan struct{} // closed at the next change of daemon
	// +checklocks:mu
	lost time.Time // when the last daemon ended
	// +checklocks:mu
	sessions map[*held]struct{}
}

// held is a session that has begun. Its connection tells the daemon that the session has not ended.
// The lock of its link guards it.
type held struct {
	open   wire.Open
	conn   *proto.Conn
	daemon *proto.Conn // the daemon that counts it
}

func newLink() *link {
	return &link{changed: make(chan struct{}), lost: time.Now(), sessions: map[*held]struct{}{}}
}

// set makes conn the daemon's connection. nil: the daemon has ended.
func (l *link) set(conn *proto.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.replace(conn)
}

// drop forgets a daemon that has ended, unless another has connected.
func (l *link) drop(conn *proto.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.daemon == conn {
		l.replace(nil)
	}
}

// replace sets the daemon's connection.
//
// +checklocks:l.mu
func (l *link) replace(conn *proto.Conn) {
	l.daemon, l.lost = conn, time.Now()
	close(l.changed)
	l.changed = make(chan struct{})
}

func (l *link) state() (daemon *proto.Conn, changed <-chan struct{}, lost time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.daemon, l.changed, l.lost
}

// unknownTo returns the sessions that a daemon does not count.
func (l *link) unknownTo(daemon *proto.Conn) (all []*held) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for h := range l.sessions {
		if h.daemon != daemon {
			all = append(all, h)
		}
	}
	return all
}

// tell makes a daemon count sessions that an earlier one has begun.
func (l *link) tell(daemon *proto.Conn, sessions []*held) error {
	for _, h := range sessions {
		open := h.open
		open.Running = true
		conn, err := wire.Send(daemon, wire.Request{Open: &open})
		if err != nil {
			return err
		}
		if old := l.renew(h, daemon, conn); old != nil {
			_ = old.Close() // it carries no data
		}
	}
	return nil
}

// renew replaces the connection of a session, and returns the connection to close.
func (l *link) renew(h *held, daemon, conn *proto.Conn) (old *proto.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, lives := l.sessions[h]; !lives {
		return conn
	}
	old, h.conn, h.daemon = h.conn, conn, daemon
	return old
}

// await returns the daemon, other than one that was lost.
func (l *link) await(ctx context.Context, other *proto.Conn) (*proto.Conn, error) {
	timer := time.NewTimer(daemonTimeout)
	defer timer.Stop()
	for {
		daemon, changed, _ := l.state()
		if daemon != nil && daemon != other {
			return daemon, nil
		}
		select {
		case <-changed:
		case <-timer.C:
			return nil, coded.Errorf(coded.Unavailable, "no daemon runs")
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// begin asks the daemon to begin a session. It asks again after the daemon's end, but not for an
// exec, whose command may run already. The error is ResourceExhausted if descriptors are scarce.
// The caller calls end after the session.
func (l *link) begin(ctx context.Context, open wire.Open) (a wire.Answer, files []*os.File, end func(), err error) {
	quota, err := copying.NewFDQuota()
	if err == nil {
		err = quota.Check()
	}
	if err != nil {
		return a, nil, nil, err
	}
	var lost *proto.Conn
	for {
		daemon, err := l.await(ctx, lost)
		if err != nil {
			return a, nil, nil, err
		}
		failpoint.Reach("stream.begin")
		conn, err := wire.Send(daemon, wire.Request{Open: &open})
		switch {
		case wire.Ended(err): // the daemon does not have the request
			lost = daemon
			continue
		case err != nil: // part of the request may be sent: the daemon connects again
			return a, nil, nil, errors.Join(coded.Errorf(coded.Unavailable, "ask berth: %w", err), daemon.Interrupt())
		}
		files, err = running.Receive(ctx, conn, &a)
		failpoint.Reach("stream.begun")
		switch {
		case err == nil && a.Err() == nil:
			return a, files, l.hold(open, conn, daemon), nil
		case err == nil:
			err = a.Err()
		case ctx.Err() != nil:
			err = context.Cause(ctx)
		case open.Kind == wire.Exec:
			err = coded.Errorf(coded.Unavailable, "berth ended while it started the command: %w", err)
		case wire.Ended(err):
			lost, err = daemon, nil
		}
		if err := errors.Join(err, conn.Close(), wire.CloseAll(files)); err != nil {
			return a, nil, nil, err
		}
	}
}

// hold records a session that has begun.
func (l *link) hold(open wire.Open, conn, daemon *proto.Conn) (end func()) {
	h := &held{open: open, conn: conn, daemon: daemon}
	l.mu.Lock()
	l.sessions[h] = struct{}{}
	current := l.daemon
	l.mu.Unlock()
	if current != nil && current != daemon { // it has connected since
		_ = l.tell(current, []*held{h}) // fails only if it has ended
	}
	return func() {
		l.mu.Lock()
		delete(l.sessions, h)
		conn := h.conn
		l.mu.Unlock()
		_ = conn.Close() // it carries no data
	}
}

// welcome answers a daemon's Hello and tells it of the sessions.
func (l *link) welcome(daemon *proto.Conn, w wire.Welcome) error {
	sessions := l.unknownTo(daemon)
	w.Sessions = len(sessions)
	if err := daemon.Send(w); err != nil {
		return fmt.Errorf("greet the daemon: %w", err)
	}
	if err := l.tell(daemon, sessions); err != nil {
		return fmt.Errorf("tell the daemon of sessions: %w", err)
	}
	l.set(daemon)
	return l.tell(daemon, l.unknownTo(daemon)) // begun meanwhile
}
