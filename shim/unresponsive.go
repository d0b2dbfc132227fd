package shim

import (
	"context"
	"errors"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/pidfd"
)

const (
	// requestTimeout is the time until the first check whether a launcher has read its request,
	// which takes a running one a millisecond. The second check, after 500 ms, is the first that
	// gives up on it.
	requestTimeout = 400 * time.Millisecond
	// orderCheckInterval is the interval of later checks.
	orderCheckInterval = 100 * time.Millisecond
	// slowOrderTimeout bounds the wait for a launcher that is not frozen, but waits for a processor
	// or a disk. On a loaded machine, replacing it costs more than waiting.
	slowOrderTimeout = 10 * time.Second
)

// errUnresponsive means that a launcher did not read its request. Another one can get it.
var errUnresponsive = errors.New("the launcher does not read its request")

// requestWatch watches whether a launcher reads its request.
type requestWatch struct {
	p     *launcher
	timer *time.Timer
	begun time.Time

	mu sync.Mutex
	// +checklocks:mu
	isSent bool
	// +checklocks:mu
	over bool
	// +checklocks:mu
	unresponsive bool
	// +checklocks:mu
	wasFrozen bool // at the previous check, with the request unread
}

// watchRequest starts the watch; the request is sent afterwards. If the launcher does not read it,
// Send and Receive fail: after limit if the launcher is frozen, after slowOrderTimeout if it is
// slow.
func (p *launcher) watchRequest(limit time.Duration) *requestWatch {
	w := &requestWatch{p: p, begun: time.Now()}
	w.mu.Lock() // check waits until timer is set
	defer w.mu.Unlock()
	w.timer = time.AfterFunc(limit, w.check)
	return w
}

func (w *requestWatch) check() {
	frozen := w.p.isFrozen() // check this first: the launcher may just have read everything and sleep
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.over {
		return
	}
	unread, err := w.p.conn.Unread()
	if err != nil || unread == 0 && w.isSent { // the connection has ended, or the request was read
		return
	}
	// This process may have sent the request only after that check, for lack of a processor. A
	// healthy launcher slept until then. So one check is not enough.
	frozen = frozen && unread > 0
	if frozen && w.wasFrozen || unread > 0 && time.Since(w.begun) > slowOrderTimeout {
		w.unresponsive = true
		_ = w.p.conn.Interrupt() // it fails only on a closed connection, where no read waits
	}
	w.wasFrozen = frozen
	w.timer.Reset(orderCheckInterval) // check again: a send that starts now removes the deadline
}

// result ends the watch and returns errUnresponsive if that is the cause of err, otherwise err.
func (w *requestWatch) result(err error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.timer.Stop()
	w.over = true
	if !w.unresponsive || errors.Is(err, errUnresponsive) {
		return err
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return errUnresponsive
	}
	// The launcher has just replied. Remove the deadline for the next reply.
	return errors.Join(err, w.p.conn.SetDeadline(time.Time{}))
}

// sent notes the result of sending the request. It returns nil, or ends the watch and returns its
// result.
func (w *requestWatch) sent(err error) error {
	if err == nil {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.isSent = true
		return nil
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = errUnresponsive
	}
	return w.result(err)
}

// isFrozen returns whether no thread of the launcher runs, is runnable or waits for a disk,
// although there is a request to read. A signal, a tracer or the cgroup's freezer has stopped it
// then.
func (p *launcher) isFrozen() bool {
	threads, err := pidfd.Threads(p.pid)
	if err != nil || len(threads) == 0 {
		return false
	}
	return !slices.ContainsFunc(threads, func(t pidfd.Thread) bool {
		return t.State == 'R' || t.State == 'D' && !t.InFreezer(p.pid)
	})
}

// frozenEnd bounds the wait for the end of a killed launcher that may be frozen.
const frozenEnd = 500 * time.Millisecond

// killUnresponsive kills a launcher that has not read its request. It does not wait for one in a
// frozen cgroup v1: that one executes nothing until it is thawed, and then exits.
func (p *launcher) killUnresponsive() error {
	err := killUpTo(p.proc, frozenEnd)
	if !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	if p.isFrozen() {
		return nil
	}
	return kill(p.proc)
}

// retireStopped ends the idle launchers that are stopped or frozen, too: each call that took one
// would wait for it.
func (l *Launchers) retireStopped() {
	for _, p := range l.takeStopped() {
		l.cfg.Log.Warn("idle launcher is stopped, killing it", "pid", p.pid)
		if err := pidfd.Signal(p.proc, unix.SIGKILL); err != nil && !errors.Is(err, os.ErrProcessDone) {
			l.cfg.Log.Error("kill launcher", "pid", p.pid, "error", err)
		}
		l.retire(p) // it waits in the background
	}
	l.wantMore()
}

// takeStopped removes them from the pool.
func (l *Launchers) takeStopped() (stopped []*launcher) {
	l.mu.Lock()
	idle := slices.Clone(l.idle)
	l.mu.Unlock()
	for _, p := range idle {
		isStopped, err := pidfd.AnyStopped(p.pid) // drop notices if it was taken meanwhile
		if err == nil && isStopped && l.drop(p.launcher) {
			stopped = append(stopped, p.launcher)
		}
	}
	return stopped
}
