package cgroup

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
)

// KillDir sends SIGKILL to all processes in dir and below it until all have exited. It repeats the
// signal, because processes may be forking, frozen, or in uninterruptible sleep. It fails if they
// still exist after timeout. It succeeds if dir does not exist. The monitor has the same function
// in shim/monitor/killtree.c.
func KillDir(dir string, timeout time.Duration) error {
	deadline := time.Now().Add(timeout)
	for delay := time.Millisecond; ; delay = min(2*delay, 50*time.Millisecond) {
		err := killRound(dir)
		pids, listErr := ProcsIn(dir)
		if listErr == nil && len(pids) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return errors.Join(fmt.Errorf("kill cgroup %s: %d processes still exist", dir, len(pids)), err, listErr)
		}
		time.Sleep(delay)
	}
}

// killRound kills the current processes. On cgroup v2 (Linux 5.14) this is one step. Otherwise it
// freezes the group first, so that no fork escapes.
func killRound(dir string) error {
	if err := writeFile(dir+"/cgroup.kill", "1"); err == nil {
		return nil
	}
	freezer, frozen, thawed := dir+"/freezer.state", "FROZEN", "THAWED"
	if exists(dir + "/cgroup.freeze") { // v2 before Linux 5.14
		freezer, frozen, thawed = dir+"/cgroup.freeze", "1", "0"
	}
	freezeErr := freezeDir(freezer, frozen) // an error is not fatal, because without a freezer the kill only needs more rounds
	if gone(freezeErr) {
		freezeErr = nil
	}
	failpoint.Reach("killtree.frozen")
	err := errors.Join(freezeErr, signalDir(dir))
	failpoint.Reach("killtree.signalled")
	if thawErr := writeFile(freezer, thawed); thawErr != nil && !gone(thawErr) {
		err = errors.Join(err, thawErr)
	}
	return err
}

// freezeTimeout is how long a cgroup may take to freeze. A process in uninterruptible sleep can
// prevent that.
const freezeTimeout = 200 * time.Millisecond

// freezeDir freezes a cgroup and waits until it is frozen. The freezer of v1 confirms the write
// while processes still run. Thousands of processes can then fork faster than they are killed.
func freezeDir(freezer, frozen string) error {
	for deadline := time.Now().Add(freezeTimeout); ; time.Sleep(time.Millisecond) {
		if err := writeFile(freezer, frozen); err != nil {
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

func signalDir(dir string) error {
	pids, err := ProcsIn(dir)
	for _, pid := range pids {
		if killErr := unix.Kill(pid, unix.SIGKILL); killErr != nil && killErr != unix.ESRCH {
			err = errors.Join(err, os.NewSyscallError("kill "+strconv.Itoa(pid), killErr))
		}
	}
	return err
}

// ProcsIn lists the processes in dir and below.
func ProcsIn(dir string) ([]int, error) {
	data, err := os.ReadFile(dir + "/cgroup.procs")
	if errors.Is(err, unix.EOPNOTSUPP) {
		// A threaded cgroup (v2) lists threads. A signal to a thread ID reaches its process.
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
			below, err := ProcsIn(dir + "/" + e.Name())
			pids = append(pids, below...)
			if err != nil {
				return pids, err
			}
		}
	}
	return pids, nil
}

func exists(path string) bool { return unix.Access(path, unix.F_OK) == nil }
