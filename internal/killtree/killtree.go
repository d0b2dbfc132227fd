// Package killtree ends every process in a cgroup directory and below it. It
// works on one directory, whatever made it. The monitor does the same by
// shim/monitor/killtree.c.
package killtree

import (
	"errors"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
)

// Kill sends SIGKILL to all processes in dir and below, and looks again until
// none is left: processes may be forking, frozen, or in uninterruptible sleep. It
// gives up after patience. A directory that does not exist has no processes.
func Kill(dir string, patience time.Duration) error {
	deadline := time.Now().Add(patience)
	for delay := time.Millisecond; ; delay = min(2*delay, 50*time.Millisecond) {
		err := round(dir)
		pids, listErr := Procs(dir)
		if listErr == nil && len(pids) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return errors.Join(errors.New(strconv.Itoa(len(pids))+" processes in "+dir+" do not end"), err, listErr)
		}
		time.Sleep(delay)
	}
}

// round kills what is there now. Linux 5.14 does it in one step on cgroup v2. On
// v1 the group is frozen meanwhile, so that no fork escapes.
func round(dir string) error {
	if err := write(dir+"/cgroup.kill", "1"); err == nil {
		return nil
	}
	freezer, frozen, thawed := dir+"/freezer.state", "FROZEN", "THAWED"
	if exists(dir + "/cgroup.freeze") { // v2 before Linux 5.14
		freezer, frozen, thawed = dir+"/cgroup.freeze", "1", "0"
	}
	freezeErr := freeze(freezer, frozen) // a hierarchy without a freezer takes more rounds
	if gone(freezeErr) {
		freezeErr = nil
	}
	failpoint.Reach("killtree.frozen")
	err := errors.Join(freezeErr, signal(dir))
	failpoint.Reach("killtree.signalled")
	if thawErr := write(freezer, thawed); thawErr != nil && !gone(thawErr) {
		err = errors.Join(err, thawErr)
	}
	return err
}

// freezePatience is how long a cgroup may take to freeze. A process in uninterruptible sleep can
// keep it from that.
const freezePatience = 200 * time.Millisecond

// freeze freezes a cgroup and waits until it is frozen. The freezer of v1 answers while processes
// still run; those that fork escape the signals, and thousands of them fork faster than they are
// killed.
func freeze(freezer, frozen string) error {
	for deadline := time.Now().Add(freezePatience); ; time.Sleep(time.Millisecond) {
		if err := write(freezer, frozen); err != nil {
			return err
		}
		state, err := os.ReadFile(freezer)
		if err != nil {
			return err
		}
		if strings.TrimSpace(string(state)) == frozen || time.Now().After(deadline) {
			return nil
		}
	}
}

func signal(dir string) error {
	pids, err := Procs(dir)
	for _, pid := range pids {
		if killErr := unix.Kill(pid, unix.SIGKILL); killErr != nil && killErr != unix.ESRCH {
			err = errors.Join(err, os.NewSyscallError("kill "+strconv.Itoa(pid), killErr))
		}
	}
	return err
}

// Procs lists the processes in dir and below.
func Procs(dir string) ([]int, error) {
	data, err := os.ReadFile(dir + "/cgroup.procs")
	if errors.Is(err, unix.EOPNOTSUPP) {
		// A threaded cgroup (v2) lists its processes by their threads; a signal to one reaches the process.
		data, err = os.ReadFile(dir + "/cgroup.threads")
	}
	if gone(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var pids []int
	for line := range strings.Lines(string(data)) {
		// 0 is a process outside the reader's PID namespace.
		if pid, err := strconv.Atoi(strings.TrimSuffix(line, "\n")); err == nil && pid > 0 {
			pids = append(pids, pid)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil && !gone(err) {
		return pids, err
	}
	for _, e := range entries {
		if e.IsDir() {
			below, err := Procs(dir + "/" + e.Name())
			pids = append(pids, below...)
			if err != nil {
				return pids, err
			}
		}
	}
	return pids, nil
}

// gone tells whether err says that the cgroup or its file does not exist: opening
// gives ENOENT, using what was opened before its removal ENODEV.
func gone(err error) bool {
	return errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENODEV)
}

func exists(path string) bool { return unix.Access(path, unix.F_OK) == nil }

func write(path, data string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(data)
	return errors.Join(err, f.Close())
}
