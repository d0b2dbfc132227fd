package shim

import (
	"context"
	"errors"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"berth/internal/pidfd"
)

const (
	// readTime is how long a launcher may take to read its order before it is looked at. One that runs does so in a millisecond.
	readTime = 500 * time.Millisecond
	// lookAgain is how often it is looked at from then on.
	lookAgain = 100 * time.Millisecond
	// slowTime is how long a launcher may take that is not frozen, but gets no processor or waits for a disk: to replace it
	// would cost a loaded machine more than to wait.
	slowTime = 10 * time.Second
)

// errUnresponsive says that a launcher did not read its order, so that another may be given it.
var errUnresponsive = errors.New("the launcher does not read its order")

// orderWatch watches whether a launcher reads its order. The lock guards what follows it.
type orderWatch struct {
	p     *launcher
	timer *time.Timer
	begun time.Time

	mu                 sync.Mutex
	over, unresponsive bool
}

// watchOrder begins before an order is sent. If that is not read, its sending and the wait for a reply to it end: after limit
// where the launcher is frozen, after slowTime where it is slow.
func (p *launcher) watchOrder(limit time.Duration) *orderWatch {
	w := &orderWatch{p: p, begun: time.Now()}
	w.mu.Lock() // it is complete when it looks
	defer w.mu.Unlock()
	w.timer = time.AfterFunc(limit, w.look)
	return w
}

func (w *orderWatch) look() {
	frozen := w.p.isFrozen() // before what is unread is looked at: it may just have read all, and sleep
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.over {
		return
	}
	unread, err := w.p.conn.Unread()
	if err != nil || unread == 0 { // the connection has ended, or the order was read
		return
	}
	if frozen || time.Since(w.begun) > slowTime {
		w.unresponsive = true
		_ = w.p.conn.Interrupt() // it fails on a closed connection, when nobody waits
	}
	w.timer.Reset(lookAgain) // a send that begins now would lift the interruption
}

// result ends it. It is errUnresponsive if err comes of that, else err.
func (w *orderWatch) result(err error) error {
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
	// It has read and replied just now. The deadline is not to hit who waits for the next reply.
	return errors.Join(err, w.p.conn.SetDeadline(time.Time{}))
}

// sent is the error of sending the order; it ends the watch if there is one. It is errUnresponsive if the launcher reads nothing.
func (w *orderWatch) sent(err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = errUnresponsive
	}
	return w.result(err)
}

// isFrozen tells whether a launcher does nothing although it has an order to read: none of its threads runs, is about to, or waits
// for a disk. That is so if it is stopped by a signal or a tracer, or frozen by its cgroup.
func (p *launcher) isFrozen() bool {
	threads, err := pidfd.Threads(p.pid)
	if err != nil || len(threads) == 0 {
		return false
	}
	return !slices.ContainsFunc(threads, func(t pidfd.Thread) bool {
		return t.State == 'R' || t.State == 'D' && !p.inFreezer(t.ID)
	})
}

// inFreezer tells whether a thread is frozen by the freezer of cgroup v1, which looks like a wait for a disk. On v2 a frozen thread
// counts as asleep.
func (p *launcher) inFreezer(tid int) bool {
	wchan, err := os.ReadFile("/proc/" + strconv.Itoa(p.pid) + "/task/" + strconv.Itoa(tid) + "/wchan")
	return err == nil && strings.Contains(string(wchan), "refrigerator")
}

// frozenEnd is how long the end of a killed launcher is waited for that may be frozen.
const frozenEnd = 500 * time.Millisecond

// killUnresponsive kills a launcher that has not read its order. One that the freezer of cgroup v1 holds ends when it is thawed; it
// executes nothing before, and so is not waited for.
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

// retireStopped ends the idle launchers that are stopped, as one was that did not read its order: each call that took one would wait.
func (l *Launchers) retireStopped() {
	for _, p := range l.takeStopped() {
		l.cfg.Log.Warn("an idle launcher is stopped, it is killed", "pid", p.pid)
		if err := p.killUnresponsive(); err != nil {
			l.cfg.Log.Error("kill a launcher", "pid", p.pid, "error", err)
		}
		l.retire(p)
	}
	l.wantMore()
}

// takeStopped takes them out of the pool.
func (l *Launchers) takeStopped() (stopped []*launcher) {
	l.mu.Lock()
	idle := slices.Clone(l.idle)
	l.mu.Unlock()
	for _, p := range idle {
		threads, err := pidfd.Threads(p.pid) // if it is taken and ends meanwhile, drop says so
		isStopped := func(t pidfd.Thread) bool { return t.State == 'T' || t.State == 't' }
		if err == nil && slices.ContainsFunc(threads, isStopped) && l.drop(p.launcher) {
			stopped = append(stopped, p.launcher)
		}
	}
	return stopped
}
