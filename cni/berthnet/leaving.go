package berthnet

import (
	"cmp"
	"log/slog"
	"sync"
	"time"

	"berth/cni/berthnet/links"
)

// leavingTime is how long a port may remain after its pod's DEL. The kernel removes the port in the
// background together with the pod's namespace. It removes one namespace after the other.
const leavingTime = 5 * time.Second

// leavingTries limits the attempts to delete a port to one minute. The next GC deletes the
// remaining ports. The daemon runs GC when it starts, for networks of CNI 1.1.
const leavingTries = 12

// leaving holds ports that the kernel should remove with their pods' namespaces, and deletes the
// ports that remain. The kernel keeps a namespace without processes while it closes a TCP
// connection with unacknowledged data (tcp_orphan_retries). A disabled port receives no
// acknowledgements, so closing takes more than a minute. If the daemon exits earlier, the next GC
// deletes the ports.
type leaving struct {
	lock sync.Mutex // also guards the counter of running
	// +checklocks:lock
	ports []leavingPort
	// +checklocks:lock
	timer *time.Timer // for the first port; nil: no port
	// +checklocks:lock
	closed  bool           // add ignores further ports
	running sync.WaitGroup // runs of the timer's function, counted from when the timer is set

	again time.Duration                 // time between attempts; 0: leavingTime. Constant
	cut   func(id, ifName string) error // nil: links.Cut. Constant
}

// leavingPort is a port with its deadline.
type leavingPort struct {
	log        *slog.Logger
	id, ifName string
	due        time.Time
	tries      int // failed attempts
}

// add schedules the deletion of a port, which does nothing if the kernel has removed the port.
// Failures are logged.
func (l *leaving) add(log *slog.Logger, id, ifName string, after time.Duration) {
	l.put(leavingPort{log: log, id: id, ifName: ifName, due: time.Now().Add(after)})
}

func (l *leaving) put(p leavingPort) {
	l.lock.Lock()
	defer l.lock.Unlock()
	l.ports = append(l.ports, p)
	l.arm()
}

// arm sets the timer unless it is set.
//
// +checklocks:l.lock
func (l *leaving) arm() {
	if l.closed || l.timer != nil || len(l.ports) == 0 {
		return
	}
	l.running.Add(1)
	l.timer = time.AfterFunc(time.Until(l.ports[0].due), l.sweep)
}

// sweep deletes ports that are due, and schedules another attempt after a failure.
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
			p.log.Error("delete port of a removed pod; GC will try again", "id", p.id, "interface", p.ifName, "error", err)
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

// due removes and returns the ports whose deadline has passed.
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

// close drops all ports and waits for a running sweep.
func (l *leaving) close() {
	l.lock.Lock()
	l.closed = true
	if l.timer != nil && l.timer.Stop() {
		l.running.Done()
	}
	l.lock.Unlock()
	l.running.Wait()
}
