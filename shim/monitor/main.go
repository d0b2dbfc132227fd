// Command monitor watches over one container. A launcher (package shim/launcher)
// executes it in its own place when the container runs, so the container's init
// is this process's child. The command line (package shim/handoff) names what it
// inherits.
//
// It writes the container's output to the log in CRI format and to attached
// clients, feeds its stdin, reaps every process that becomes its child, and when
// init has ended writes the exit record and ends. Nothing that fails here — a full
// disk, a slow client — may hold up the container.
//
// There is one monitor per container, so it is small: one thread waits in epoll,
// everything it needs while nothing happens is allocated at start, and it imports
// neither net nor encoding/json nor fmt.
package main

import (
	"os"
	"os/signal"

	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
	"berth/shim/handoff"
)

func main() {
	ignoreSignals()
	failpoint.Reach("monitor.started")
	p, err := handoff.Parse(os.Args[1:])
	if err != nil {
		fatal(err)
	}
	m, err := newMonitor(p)
	if err != nil {
		// Nobody would log, reap or report: that is no way for a container to run.
		_ = unix.Kill(p.InitPID, unix.SIGKILL)
		fatal(err)
	}
	if err := m.run(); err != nil {
		fatal(err)
	}
}

// ignoreSignals ignores what would end or stop us, apart from SIGKILL, SIGSTOP and
// signals about a fault in us: stopping the daemon's service, or a terminal that is
// closed, is nothing to a container. The launcher did the same until now.
func ignoreSignals() {
	signal.Ignore(handoff.Ignored...)
}

func fatal(err error) {
	_, _ = os.Stderr.WriteString("berth-monitor: " + err.Error() + "\n")
	os.Exit(1)
}
