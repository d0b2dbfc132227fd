package statecheck

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"berth/sandbox/state"
)

// File descriptors: pods and containers bound the number of the daemon's descriptors. The daemon
// holds no namespace and no deleted file. It holds pidfds only of running objects' processes and of
// its own children. It holds cgroups and directories only of recorded objects. The number of its
// other descriptors is limited, and the limit grows with containers, children and clients.

// descriptor is an open file of a process.
type descriptor struct {
	number string
	target string // the link in /proc/PID/fd
	pid    int    // of a pidfd: its process, -1 if reaped
}

// Limits on how many open files of a process are read. Any process may have a million.
const (
	firstDescriptors = 1 << 10 // of a process that may be the daemon, because a daemon opens its lock first
	mostLinks        = 1 << 18 // of the daemon
)

// linksOf returns up to most open files of a process. It returns none if the process has ended.
func (f *facts) linksOf(pid string, most int) []descriptor {
	dir, err := os.Open(f.procFile(pid, "fd"))
	if err != nil {
		return nil
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(most) // an error means that the process has ended
	var all []descriptor
	for _, name := range names {
		if target, err := os.Readlink(f.procFile(pid, "fd", name)); err == nil {
			all = append(all, descriptor{number: name, target: target})
		}
	}
	return all
}

const pidfdTarget = "anon_inode:[pidfd]"

func (f *facts) readDescriptors() error {
	if f.daemon == 0 {
		return nil
	}
	daemon := strconv.Itoa(f.daemon)
	f.descriptors = f.linksOf(daemon, mostLinks)
	for i := range f.descriptors {
		if fd := &f.descriptors[i]; fd.isProcess() {
			fd.pid = f.processOf(daemon, fd.number)
		}
	}
	return nil
}

// isProcess reports whether this is a pidfd. Since Linux 6.9 pidfds have a filesystem of their own.
func (fd descriptor) isProcess() bool {
	return fd.target == pidfdTarget || strings.HasPrefix(fd.target, "pidfd:[")
}

// processOf reads the line "Pid:" of a pidfd's fdinfo. It returns 0 if the file was closed
// meanwhile.
func (f *facts) processOf(daemon, fd string) int {
	info, _ := f.readProc(daemon, "fdinfo", fd)
	for line := range strings.Lines(string(info)) {
		if text, ok := strings.CutPrefix(line, "Pid:"); ok {
			pid, _ := strconv.Atoi(strings.TrimSpace(text)) // the kernel writes numbers
			return pid
		}
	}
	return 0
}

// Allowances for descriptors that cannot be attributed: sockets, pipes, files of the Go runtime.
const (
	atRest       = 64 // listeners, logs, locks, epoll, inotify, directories, a pull's connections
	perContainer = 24 // nine statistics files on cgroup v1, and sessions
	perChild     = 8
	perProcess   = 8 // pidfds of one process, because each waiter has a duplicate
)

func compareDescriptors(f *facts, d *finder) {
	processes := map[int]int{}
	for _, fd := range f.descriptors {
		if fd.isProcess() {
			processes[fd.pid]++
		}
		f.compareDescriptor(d, fd)
	}
	for pid, n := range processes {
		if n > perProcess {
			d.differ("the daemon", fmt.Sprintf("at most %d descriptors of process %d", perProcess, pid), "%d", n)
		}
	}
	if most := f.mostDescriptors(); f.daemon != 0 && len(f.descriptors) > most {
		d.differ("the daemon", "a number of descriptors in proportion to its pods and containers", "%d, more than %d",
			len(f.descriptors), most)
	}
}

func (f *facts) mostDescriptors() int {
	children := 0
	for _, p := range f.processes {
		if p.parent == f.daemon {
			children++
		}
	}
	clients := 0
	if f.views != nil {
		clients = f.views.busy
	}
	return atRest + perContainer*(len(f.pods)+len(f.containers)) + perChild*(children+clients)
}

func (f *facts) compareDescriptor(d *finder, fd descriptor) {
	object := fmt.Sprintf("descriptor %s of the daemon", fd.number)
	target, deleted := strings.CutSuffix(fd.target, " (deleted)")
	switch {
	case fd.isProcess():
		if fd.pid != 0 && !f.mayWatch(fd.pid) {
			d.differ(object, "a process of a running object, or a child", "process %d", fd.pid)
		}
	case deleted && !strings.HasPrefix(target, "/memfd:") && !isNetworkOfThread(target):
		d.differ(object, "a file that exists", "%s", fd.target)
	case strings.HasPrefix(target, "net:[") || strings.HasPrefix(target, "user:[") || strings.HasPrefix(target, "mnt:["):
		d.differ(object, "no namespace", "%s", fd.target)
	case strings.HasPrefix(target, "/"):
		for part := range strings.SplitSeq(filepath.Clean(target), "/") {
			id := strings.TrimSuffix(strings.TrimPrefix(part, scopePrefix), ".scope")
			if isID(id) && !f.known(id) && f.concerns(target) {
				d.differ(object, "a file of a recorded pod or container", "%s", fd.target)
			}
		}
	}
}

// isNetworkOfThread reports whether this is /proc/PID/task/TID/net/dev. Such a descriptor still
// serves the statistics of a pod after the thread that opened it has ended.
func isNetworkOfThread(path string) bool {
	match, _ := filepath.Match("/proc/*/task/*/net/dev", path) // the pattern is valid
	return match
}

// concerns reports whether a file with an ID in its path belongs to an object, not to a layer.
func (f *facts) concerns(path string) bool {
	return !strings.HasPrefix(path, f.realPath(f.imageRoot())+"/") &&
		!strings.HasPrefix(path, f.realPath(f.dirs.Trash())+"/")
}

// mayWatch reports whether the daemon may hold a pidfd of a process.
func (f *facts) mayWatch(pid int) bool {
	if p := f.processes[pid]; p != nil && (f.isDaemonOrLauncher(p.parent) || f.known(f.groupOf(p))) {
		return true
	}
	for _, pod := range f.pods {
		if pod.PausePID == pid || pod.Stage == state.BeingMade {
			return true
		}
	}
	for id := range f.containers {
		s := f.shims[id]
		if s == nil {
			continue
		}
		if s.launched.MonitorPID == pid || s.launched.InitPID == pid {
			return true
		}
		// It was reaped, but its monitor has not reported that.
		if pid == -1 && f.alive(s.launched.InitPID, s.launched.InitStartTime) == nil {
			return true
		}
	}
	return false
}

// isDaemonOrLauncher reports whether a process is the daemon or one of its launchers.
func (f *facts) isDaemonOrLauncher(pid int) bool {
	p := f.processes[pid]
	return pid == f.daemon || p != nil && p.isLauncher() && p.parent == f.daemon
}
