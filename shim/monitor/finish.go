package main

import (
	"bytes"
	"errors"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
	"berth/internal/killtree"
	"berth/shim/record"
)

const (
	// killPatience is how long processes may take to die that a shared PID
	// namespace let outlive init. Whoever removes the container tries again.
	killPatience = 2 * time.Second
)

// reap collects the children that have ended: init, and orphans. It tells whether there are others.
func (m *monitor) reap() (more bool) {
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, unix.WNOHANG, nil)
		switch {
		case err == unix.EINTR:
			continue
		case err != nil || pid == 0:
			return err == nil
		case pid == m.params.InitPID:
			m.initStatus, m.initEnd = &status, time.Now()
		}
	}
}

// finish does what has to be done after init's end: the verdict first, while the
// cgroup exists; then the output; the record last, since it says that all is done.
func (m *monitor) finish() error {
	failpoint.Reach("monitor.init-ended")
	exit, known := m.verdict()
	if m.params.KillDir != "" {
		m.endOrphans()
	}
	for _, s := range m.streams {
		m.drain(s)
	}
	m.flushLog()
	failpoint.Reach("monitor.output-logged")
	if !known { // whoever reads no record sees to it that nothing is left
		m.sayFarewell()
		return errors.New("the process that waited for the container told nothing of it")
	}
	err := m.writeRecord(exit)
	failpoint.Reach("monitor.exit-recorded")
	m.sayFarewell()
	failpoint.Reach("monitor.farewell-said")
	return err
}

// endOrphans kills what init has left and waits for it. On cgroup v2 a process is no member any more
// a moment before it can be reaped.
func (m *monitor) endOrphans() {
	deadline := time.Now().Add(killPatience)
	failpoint.Reach("monitor.kill-orphans")
	_ = killtree.Kill(m.params.KillDir, killPatience)
	for m.reap() && time.Now().Before(deadline) {
		time.Sleep(time.Millisecond)
	}
	failpoint.Reach("monitor.orphans-ended")
}

func (m *monitor) verdict() (exit record.Exit, known bool) {
	m.readOOM()
	exit = record.Exit{OOMKilled: m.oom.kills > 0, At: m.initEnd.UnixNano()}
	if m.params.Verdict >= 0 {
		exit.Code, known = readVerdict(m.params.Verdict)
		return exit, known
	}
	if s := *m.initStatus; s.Signaled() {
		exit.Signal = int32(s.Signal())
		exit.Code = 128 + exit.Signal
	} else {
		exit.Code = int32(s.ExitStatus())
	}
	return exit, true
}

// readVerdict reads what was written by a process that waited for the container and
// has ended: {"id": ID, "exitStatus": N}. Only digits follow the name of the number.
func readVerdict(fd int) (code int32, ok bool) {
	if unix.SetNonblock(fd, true) != nil {
		return 0, false
	}
	var buf [512]byte
	n, err := unix.Read(fd, buf[:])
	if err != nil || n <= 0 {
		return 0, false
	}
	return exitStatus(buf[:n])
}

func exitStatus(text []byte) (code int32, ok bool) {
	_, rest, found := bytes.Cut(text, []byte(`"exitStatus"`))
	rest, colon := bytes.CutPrefix(bytes.TrimLeft(rest, " \t\r\n"), []byte(":"))
	if !found || !colon {
		return 0, false
	}
	number, _, end := bytes.Cut(rest, []byte("}"))
	number, _, _ = bytes.Cut(number, []byte(","))
	n, err := strconv.ParseUint(string(bytes.TrimSpace(number)), 10, 8)
	return int32(n), err == nil && end
}

// writeRecord tries for a while: without the record the container counts as lost.
func (m *monitor) writeRecord(exit record.Exit) error {
	failpoint.Reach("monitor.record-exit")
	for attempt := 0; ; attempt++ {
		err := record.Write(m.params.Dir, record.ExitFile, exit.Encode())
		if err == nil || attempt == 10 || errors.Is(err, os.ErrNotExist) {
			return err
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// sayFarewell hands what is queued for clients to the kernel, which keeps it for
// them: the monitor's end is the container's, and nobody who reads slowly may delay it.
func (m *monitor) sayFarewell() {
	for _, c := range m.clients {
		if c.dead || len(c.queue) == 0 {
			continue
		}
		rest := bytes.Join(c.queue, nil) // one message costs the least beyond its bytes
		// Without CAP_NET_ADMIN the limit is net.core.wmem_max, and the rest is lost.
		if unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, maxQueued) != nil {
			_ = unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_SNDBUF, maxQueued)
		}
		_, _ = write(c.fd, rest)
	}
}
