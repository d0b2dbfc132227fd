package main

import (
	"golang.org/x/sys/unix"

	"berth/shim/wire"
)

// stdin is the container's input: a pipe, or its terminal, or nothing.
type stdin struct {
	fd      int    // -1: there is none, or it is closed
	pending []byte // what the container was not ready to take; clients wait meanwhile
	closing bool   // close it when pending is written
}

// writeStdin hands data to the container; what it does not take now is kept, and
// no client's input is looked at until that is gone.
func (m *monitor) writeStdin(data []byte) {
	in := &m.stdin
	if in.fd < 0 || in.closing {
		return
	}
	n := m.writeInput(data)
	if n < len(data) && in.fd >= 0 {
		in.pending = append(in.pending[:0], data[n:]...)
		m.watchStdin()
	}
}

// flushStdin goes on when the container is ready for more.
func (m *monitor) flushStdin() {
	in := &m.stdin
	if in.fd < 0 {
		return
	}
	n := m.writeInput(in.pending)
	if in.fd >= 0 && n < len(in.pending) {
		in.pending = in.pending[n:]
		return
	}
	in.pending = nil
	if in.closing {
		m.shutStdin()
	}
	m.watchStdin()
	m.resumeClients()
}

// writeInput writes what is possible. Input that can never be delivered, because
// the container closed its end, is dropped.
func (m *monitor) writeInput(data []byte) (n int) {
	for n < len(data) {
		written, err := unix.Write(m.stdin.fd, data[n:])
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.EAGAIN:
			return n
		case err != nil:
			m.shutStdin()
			return n
		}
		n += written
	}
	return n
}

// closeStdin closes the container's stdin after what is pending. A terminal has no
// such end: a program in it is told by typing.
func (m *monitor) closeStdin() {
	in := &m.stdin
	if in.fd < 0 || in.fd == m.params.Console {
		return
	}
	in.closing = true
	if len(in.pending) == 0 {
		m.shutStdin()
	}
}

// shutStdin gives the descriptor up.
func (m *monitor) shutStdin() {
	in := &m.stdin
	if in.fd != m.params.Console && in.fd >= 0 {
		m.forget(in.fd)
		_ = unix.Close(in.fd)
	}
	in.fd, in.pending = -1, nil
}

// watchStdin waits for the container's readiness as long as something is pending.
func (m *monitor) watchStdin() {
	in := &m.stdin
	switch {
	case in.fd < 0:
		return
	case in.fd == m.params.Console && len(in.pending) > 0:
		_ = m.watch(in.fd, unix.EPOLLIN|unix.EPOLLOUT)
	case in.fd == m.params.Console:
		_ = m.watch(in.fd, unix.EPOLLIN)
	case len(in.pending) > 0:
		_ = m.watch(in.fd, unix.EPOLLOUT)
	default:
		m.forget(in.fd)
	}
}

// resize changes the terminal's size; the kernel tells the container (SIGWINCH).
func (m *monitor) resize(payload []byte) error {
	size, err := wire.DecodeSize(payload)
	if err != nil {
		return err
	}
	if m.params.Console < 0 {
		return errNoTerminal
	}
	return unix.IoctlSetWinsize(m.params.Console, unix.TIOCSWINSZ, &unix.Winsize{Row: size.Height, Col: size.Width})
}
