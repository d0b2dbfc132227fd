package main

import (
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"berth/shim/killtree"
	"berth/shim/record"
)

const (
	// killPatience is how long processes may take to die that a shared PID
	// namespace let outlive init. Whoever removes the container tries again.
	killPatience = 2 * time.Second
	// farewell is how long clients may take for what is queued for them.
	farewell = 500 * time.Millisecond
)

// reap collects the children that have ended: init, and orphans.
func (m *monitor) reap() {
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, unix.WNOHANG, nil)
		switch {
		case err == unix.EINTR:
			continue
		case err != nil || pid == 0:
			return
		case pid == m.params.InitPID:
			m.initStatus, m.initEnd = &status, time.Now()
		}
	}
}

// finish does what has to be done after init's end: the verdict first, while the
// cgroup exists; then the output; the record last, since it says that all is done.
func (m *monitor) finish() error {
	exit := m.verdict()
	if m.params.KillDir != "" {
		_ = killtree.Kill(m.params.KillDir, killPatience)
		m.reap()
	}
	for _, s := range m.streams {
		m.drain(s)
	}
	m.flushLog()
	err := m.writeRecord(exit)
	m.sayFarewell()
	return err
}

func (m *monitor) verdict() record.Exit {
	m.readOOM()
	exit := record.Exit{OOMKilled: m.oom.kills > 0, At: m.initEnd.UnixNano()}
	if s := *m.initStatus; s.Signaled() {
		exit.Signal = int32(s.Signal())
		exit.Code = 128 + exit.Signal
	} else {
		exit.Code = int32(s.ExitStatus())
	}
	return exit
}

// writeRecord tries for a while: without the record the container counts as lost.
func (m *monitor) writeRecord(exit record.Exit) error {
	for attempt := 0; ; attempt++ {
		err := record.Write(m.params.Dir, record.ExitFile, exit.Encode())
		if err == nil || attempt == 10 || errors.Is(err, os.ErrNotExist) {
			return err
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// sayFarewell sends clients what is queued for them.
func (m *monitor) sayFarewell() {
	deadline := time.Now().Add(farewell)
	for {
		var waiting []unix.PollFd
		for _, c := range m.clients {
			m.sendQueue(c)
			if len(c.queue) > 0 && !c.dead {
				waiting = append(waiting, unix.PollFd{Fd: int32(c.fd), Events: unix.POLLOUT})
			}
		}
		left := time.Until(deadline).Milliseconds()
		if len(waiting) == 0 || left <= 0 {
			return
		}
		_, _ = unix.Poll(waiting, int(left)) // an interrupted wait is another round
	}
}
