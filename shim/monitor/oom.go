package main

import (
	"bytes"
	"strconv"

	"golang.org/x/sys/unix"
)

// oom follows the count of processes that the OOM killer took from the container's
// cgroup. The file was opened when the container started: with the systemd driver
// the cgroup is removed as soon as it is empty, perhaps before we look. Hence the
// count is read whenever the kernel says that it changed.
type oom struct {
	file   int // memory.events (v2) or memory.oom_control (v1); -1: unknown
	notify int // v1: eventfd; v2 reports changes by EPOLLPRI on the file
	kills  uint64

	// The cgroup above counts kills of all below it. With the systemd driver ours may
	// be gone before the kernel's report of its change has reached us; a kill above that
	// no change of ours explains was ours then.
	parent      int // its memory.events; -1: none
	parentKills uint64
}

func (m *monitor) watchOOM() {
	switch {
	case m.oom.file < 0:
		return
	case m.oom.notify >= 0:
		_ = m.watch(m.oom.notify, unix.EPOLLIN) // without, the count is read at the end
	default:
		_ = m.watch(m.oom.file, unix.EPOLLPRI)
	}
	if m.oom.parent >= 0 {
		_ = m.watch(m.oom.parent, unix.EPOLLPRI)
	}
	m.readOOM() // kernfs reports changes since the last read
}

// readOOM takes the current count. When the cgroup is gone, the last one stands.
func (m *monitor) readOOM() {
	if m.oom.file < 0 {
		return
	}
	if m.oom.notify >= 0 {
		var count [8]byte
		_, _ = unix.Read(m.oom.notify, count[:]) // resets it; it is non-blocking
	}
	kills, err := readKills(m.oom.file)
	above, parentErr := readKills(m.oom.parent)
	switch {
	case err == unix.EINTR:
		return
	case err == nil:
		m.oom.kills = kills
	default:
		m.oomGone(parentErr == nil && above > m.oom.parentKills)
	}
	if parentErr == nil {
		m.oom.parentKills = above
	}
}

// oomGone takes leave of a cgroup that has been removed.
func (m *monitor) oomGone(killedAbove bool) {
	if killedAbove {
		m.oom.kills++
	}
	for _, fd := range []int{m.oom.file, m.oom.notify, m.oom.parent} {
		if fd >= 0 {
			m.forget(fd) // nobody would reset it any more
		}
	}
	m.oom.file = -1
}

// readKills reads the count from a file that kernfs makes.
func readKills(fd int) (uint64, error) {
	if fd < 0 {
		return 0, unix.EBADF
	}
	var buf [512]byte
	n, err := unix.Pread(fd, buf[:], 0)
	if err != nil {
		return 0, err
	}
	kills, ok := oomKills(buf[:n])
	if !ok {
		return 0, unix.ENODATA
	}
	return kills, nil
}

// oomKills finds the line "oom_kill N", which both files have (v1 since Linux 4.13).
func oomKills(data []byte) (uint64, bool) {
	for line := range bytes.Lines(data) {
		if n, ok := bytes.CutPrefix(line, []byte("oom_kill ")); ok {
			kills, err := strconv.ParseUint(string(bytes.TrimSpace(n)), 10, 64)
			return kills, err == nil
		}
	}
	return 0, false
}
