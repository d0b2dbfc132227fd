package main

import (
	"os"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
	"berth/shim/handoff"
	"berth/shim/logfmt"
	"berth/shim/wire"
)

// monitor is the state of the loop, used by its one goroutine only.
type monitor struct {
	params handoff.Params

	epoll int

	log     int // -1: no log
	streams []*stream
	stdin   stdin
	clients []*client

	mostQueued int // bytes that waited for clients, since memory was last given back

	oom oom

	initStatus *unix.WaitStatus // set when init has been reaped
	initEnd    time.Time
}

// Buffers that every read and every log write share. They cost only the pages
// that have been written to.
var (
	frame   [wire.HeaderSize + wire.MaxPayload]byte // room for the header before what is read
	records [48 << 10]byte
)

func newMonitor(p handoff.Params) (*monitor, error) {
	m := &monitor{params: p, log: p.Log, oom: oom{file: p.OOM, notify: p.OOMNotify, parent: p.OOMParent}}
	var err error
	if m.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	for _, fd := range p.FDs() {
		unix.CloseOnExec(fd)
	}
	if err := m.watch(p.Init, unix.EPOLLIN); err != nil {
		return nil, err
	}
	if err := m.watch(p.Listen, unix.EPOLLIN); err != nil {
		return nil, err
	}
	return m, m.openStreams()
}

// openStreams takes over the container's pipes or its terminal.
func (m *monitor) openStreams() error {
	p := &m.params
	if p.Console >= 0 {
		// With the other side open here, too, the terminal does not end when the
		// container closes it for a moment (Linux 4.13; without it, it does).
		_ = unix.IoctlSetInt(p.Console, unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
		m.addStream(p.Console, "stdout", wire.Stdout)
	} else {
		m.addStream(p.Stdout, "stdout", wire.Stdout)
		m.addStream(p.Stderr, "stderr", wire.Stderr)
	}
	for _, s := range m.streams {
		if err := unix.SetNonblock(s.fd, true); err != nil {
			return os.NewSyscallError("set "+s.name+" non-blocking", err)
		}
		if err := m.watch(s.fd, unix.EPOLLIN); err != nil {
			return err
		}
	}
	m.stdin.fd = p.Stdin
	if p.Stdin >= 0 {
		if err := unix.SetNonblock(p.Stdin, true); err != nil {
			return os.NewSyscallError("set stdin non-blocking", err)
		}
	}
	m.watchOOM()
	return nil
}

func (m *monitor) addStream(fd int, name string, t wire.Type) {
	if fd >= 0 {
		m.streams = append(m.streams, &stream{fd: fd, name: name, frameType: t, encoder: logfmt.NewEncoder(name, m.params.MaxLine)})
	}
}

// orphanTime is how long an orphan may be a zombie, in milliseconds. Mostly SIGCHLD
// interrupts epoll_wait, but another thread may get it: Go never blocks it.
const orphanTime = 5000

// run handles events until init has ended, and then finishes.
func (m *monitor) run() error {
	timeout := -1
	if m.params.Orphans {
		timeout = orphanTime
	}
	var events [16]unix.EpollEvent
	failpoint.Reach("monitor.watches")
	for m.initStatus == nil {
		n, err := unix.EpollWait(m.epoll, events[:], timeout)
		if m.params.Orphans {
			m.reap()
		}
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return os.NewSyscallError("epoll_wait", err)
		}
		for _, e := range events[:n] {
			m.handle(int(e.Fd), e.Events)
		}
		m.sweep()
	}
	return m.finish()
}

func (m *monitor) handle(fd int, events uint32) {
	switch fd {
	case m.params.Init:
		m.reap()
		return
	case m.params.Listen:
		m.accept()
		return
	case m.oom.file, m.oom.notify, m.oom.parent:
		m.readOOM()
		return
	}
	if fd == m.stdin.fd && events&(unix.EPOLLOUT|unix.EPOLLERR) != 0 {
		m.flushStdin()
	}
	for _, s := range m.streams {
		if s.fd == fd && events&(unix.EPOLLIN|unix.EPOLLHUP|unix.EPOLLERR) != 0 {
			m.readStream(s)
			return
		}
	}
	for _, c := range m.clients {
		if c.fd == fd {
			m.serve(c, events)
			return
		}
	}
}

// watch adds fd to epoll, or changes what is waited for.
func (m *monitor) watch(fd int, events uint32) error {
	e := &unix.EpollEvent{Events: events, Fd: int32(fd)}
	err := unix.EpollCtl(m.epoll, unix.EPOLL_CTL_ADD, fd, e)
	if err == unix.EEXIST {
		err = unix.EpollCtl(m.epoll, unix.EPOLL_CTL_MOD, fd, e)
	}
	return os.NewSyscallError("epoll_ctl", err)
}

// forget removes fd from epoll; it may not be there.
func (m *monitor) forget(fd int) {
	_ = unix.EpollCtl(m.epoll, unix.EPOLL_CTL_DEL, fd, nil)
}
