package berthnet

import (
	"cmp"
	"log/slog"
	"sync"
	"time"

	"berth/cni/berthnet/links"
)

// leavingTime is how long a port may take to go with its pod's namespace: the kernel does that in the background, one after the other for all
// namespaces of the machine.
const leavingTime = 5 * time.Second

// leavingTries is how often it is tried to delete one: for a minute. What is left then is the next GC's: the daemon has it when it starts, for networks of CNI 1.1.
const leavingTries = 12

// leaving are ports that go with the namespaces of their pods, and are deleted if they don't. A namespace stays, when all processes have left it, while the kernel
// goes on to close one of its TCP connections: it repeats what the other side has not acknowledged (tcp_orphan_retries), and nothing comes through
// a port that is disabled. That takes a minute and more. Whoever dies before leaves what is left to the next GC.
type leaving struct {
	lock    sync.Mutex // of what follows
	ports   []leavingPort
	timer   *time.Timer    // for the first of them; nil: there is none
	closed  bool           // none is waited for any more
	running sync.WaitGroup // of the timer's function, also before it is called

	again time.Duration                 // from one try to the next; 0: leavingTime. Not changed
	cut   func(id, ifName string) error // nil: links.Cut. Not changed
}

// leavingPort is a port and when it is deleted.
type leavingPort struct {
	log        *slog.Logger
	id, ifName string
	due        time.Time
	tries      int // that have failed
}

// add has a port deleted that is still there after a time. That it can't be is logged.
func (l *leaving) add(log *slog.Logger, id, ifName string, after time.Duration) {
	l.put(leavingPort{log: log, id: id, ifName: ifName, due: time.Now().Add(after)})
}

func (l *leaving) put(p leavingPort) {
	l.lock.Lock()
	defer l.lock.Unlock()
	l.ports = append(l.ports, p)
	l.arm()
}

// arm sets the timer, unless it is set. The lock is held.
func (l *leaving) arm() {
	if l.closed || l.timer != nil || len(l.ports) == 0 {
		return
	}
	l.running.Add(1)
	l.timer = time.AfterFunc(time.Until(l.ports[0].due), l.sweep)
}

// sweep deletes ports that are due. One that can't be deleted now is tried again.
func (l *leaving) sweep() {
	defer l.running.Done()
	for _, p := range l.due() {
		err := l.delete(p)
		p.tries++
		switch {
		case err == nil:
		case p.tries < leavingTries:
			p.due = time.Now().Add(cmp.Or(l.again, leavingTime))
			l.put(p)
		default:
			p.log.Error("delete the port of a pod that is gone; it is left to GC", "id", p.id, "interface", p.ifName, "error", err)
		}
	}
	l.lock.Lock()
	defer l.lock.Unlock()
	l.timer = nil
	l.arm()
}

func (l *leaving) delete(p leavingPort) error {
	if l.cut != nil {
		return l.cut(p.id, p.ifName)
	}
	return links.Cut(p.id, p.ifName, true)
}

// due takes those ports out whose time has come.
func (l *leaving) due() (some []leavingPort) {
	l.lock.Lock()
	defer l.lock.Unlock()
	n := 0
	for n < len(l.ports) && !l.ports[n].due.After(time.Now()) {
		n++
	}
	some, l.ports = l.ports[:n:n], l.ports[n:]
	return some
}

// close ends the waiting, and waits for who is deleting a port.
func (l *leaving) close() {
	l.lock.Lock()
	l.closed = true
	if l.timer != nil && l.timer.Stop() {
		l.running.Done()
	}
	l.lock.Unlock()
	l.running.Wait()
}
