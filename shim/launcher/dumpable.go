package launcher

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/opencontainers/runc/libcontainer/configs"
	"golang.org/x/sys/unix"

	"berth/internal/cgroup"
	"berth/shim/proto"
)

// checkDumpable refuses containers that CRIU cannot dump or that could not be restored, before they
// are frozen. The error is FailedPrecondition and names the cause.
func (d *dump) checkDumpable() error {
	for _, pid := range d.pids {
		why, err := undumpable(pid)
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			continue // it has ended
		}
		if err != nil {
			return err
		}
		if why != "" {
			return proto.Errorf(proto.FailedPrecondition, "its process %d %s", pid, why)
		}
	}
	return nil
}

// checkTree refuses a frozen container with processes that do not descend from its first process.
// CRIU dumps only descendants. Other processes are orphans that another process has adopted. If the
// PID namespace is shared or the host's, this is the pause or the host's init.
func (d *dump) checkTree() error {
	pids, err := cgroup.ProcsIn(d.freezer())
	if err != nil {
		return err
	}
	descends := map[int]bool{d.state.InitProcessPid: true}
	for _, pid := range pids {
		if err := findAncestor(pid, descends); err != nil {
			return err
		}
		if !descends[pid] {
			return proto.Errorf(proto.FailedPrecondition,
				"its process %d does not descend from its first process; another process has adopted it", pid)
		}
	}
	return nil
}

// mayBeConnected returns whether a process of the frozen container may have a TCP connection. CRIU
// then needs its option tcp-close, which the images record. Runtimes that do not set this option,
// as CRI-O and containerd with runc, cannot restore such images.
func (d *dump) mayBeConnected() (bool, error) {
	if d.config.Namespaces.PathOf(configs.NEWNET) == "" {
		return true, nil // the node has too many sockets to read all while the container is frozen
	}
	for _, table := range []struct{ counts, protocol, sockets string }{
		{"sockstat", "TCP:", "tcp"}, {"sockstat6", "TCP6:", "tcp6"},
	} {
		found, err := d.connectedIn(table.counts, table.protocol, table.sockets)
		if found || err != nil {
			return found, err
		}
	}
	return false, nil
}

// connectedIn reads the files of one protocol in /proc/PID/net. Most pods have no TCP socket, which
// counts tells at once. To list sockets, the kernel walks its tables of all namespaces. This takes
// milliseconds on a machine with much memory.
func (d *dump) connectedIn(counts, protocol, sockets string) (bool, error) {
	dir := fmt.Sprintf("/proc/%d/net/", d.state.InitProcessPid)
	text, err := os.ReadFile(dir + counts)
	if errors.Is(err, os.ErrNotExist) && protocol == "TCP6:" {
		return false, nil // the kernel has no IPv6
	}
	if err != nil {
		return false, err
	}
	if hasNoSocket(string(text), protocol) {
		return false, nil
	}
	f, err := os.Open(dir + sockets)
	if err != nil {
		return false, err
	}
	defer f.Close() // read only
	return hasConnection(f)
}

// hasNoSocket reports whether the text of /proc/PID/net/sockstat says that no socket of a protocol
// listens or is connected.
func hasNoSocket(text, protocol string) bool {
	for line := range strings.Lines(text) {
		if fields := strings.Fields(line); len(fields) > 2 && fields[0] == protocol && fields[1] == "inuse" {
			return fields[2] == "0"
		}
	}
	return false
}

// States of sockets in /proc/PID/net/tcp that CRIU saves without tcp-close.
const (
	tcpClosed    = "07"
	tcpListening = "0A"
)

// hasConnection reads a table of /proc/PID/net/tcp. Sockets that no process has opened have no
// inode there. They are in TIME_WAIT, or wait for accept.
func hasConnection(table io.Reader) (bool, error) {
	const state, inode = 3, 9
	lines := bufio.NewScanner(table)
	lines.Scan() // the heading
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) <= inode {
			return false, fmt.Errorf("parse table of TCP sockets: %q", lines.Text())
		}
		if fields[inode] != "0" && fields[state] != tcpListening && fields[state] != tcpClosed {
			return true, nil
		}
	}
	return false, lines.Err()
}

// findAncestor marks a process and its ancestors in descends if one of them is marked.
func findAncestor(pid int, descends map[int]bool) error {
	var line []int
	for at := pid; at > 0; {
		if descends[at] {
			for _, p := range line {
				descends[p] = true
			}
			return nil
		}
		line = append(line, at)
		parent, err := parentOf(at)
		if err != nil {
			return err
		}
		at = parent
	}
	return nil
}

// parentOf returns the parent of a process.
func parentOf(pid int) (int, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(data)) {
		if text, found := strings.CutPrefix(line, "PPid:"); found {
			return strconv.Atoi(strings.TrimSpace(text))
		}
	}
	return 0, fmt.Errorf("process %d has no parent", pid)
}

// undumpable returns why a process cannot be dumped, or "" if no reason is known.
func undumpable(pid int) (string, error) {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return "", err
	}
	for _, e := range entries {
		target, err := os.Readlink(dir + "/" + e.Name())
		if err != nil {
			continue // it was closed
		}
		if why := undumpableFile(target); why != "" {
			return why, nil
		}
		if strings.HasPrefix(target, "anon_inode:[pidfd]") || strings.HasPrefix(target, "pidfd:") {
			if isThreadPidfd(fmt.Sprintf("/proc/%d/fdinfo/%s", pid, e.Name())) {
				return "has a pidfd of a thread (PIDFD_THREAD)", nil
			}
		}
	}
	return undumpableMemory(pid)
}

// devices of accelerators have state that CRIU cannot read without a plugin.
var accelerators = []string{"/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel/", "/dev/infiniband/"}

func undumpableFile(target string) string {
	if target == "anon_inode:[io_uring]" {
		return "uses io_uring"
	}
	for _, prefix := range accelerators {
		if strings.HasPrefix(target, prefix) {
			return "uses the device " + target
		}
	}
	return ""
}

// isThreadPidfd looks in /proc/PID/fdinfo/N of a pidfd for PIDFD_THREAD, which is O_EXCL.
func isThreadPidfd(fdinfo string) bool {
	data, err := os.ReadFile(fdinfo)
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(data)) {
		if text, found := strings.CutPrefix(line, "flags:"); found {
			flags, err := strconv.ParseUint(strings.TrimSpace(text), 8, 64)
			return err == nil && flags&unix.PIDFD_THREAD != 0
		}
	}
	return false
}

// undumpableMemory looks for mappings that a restore cannot make again.
func undumpableMemory(pid int) (string, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return "", err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 6 {
			continue
		}
		if strings.HasPrefix(fields[5], "/SYSV") {
			return "uses System V shared memory, which the pod's containers share", nil
		}
		if why := undumpableFile(fields[5]); why != "" {
			return why, nil
		}
	}
	return "", lines.Err()
}
