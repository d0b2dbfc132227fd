package pidfd

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// KillTree kills a child of the caller, whose pidfd is fd, and all its descendants. It finds them
// through /proc once, at the start. A process whose parent has exited counts as a descendant of the
// process that has adopted it.
func KillTree(pid int, fd *os.File) error {
	below, err := Below(pid)
	// The root is killed first, so that it does not react to the exit of a child.
	if killErr := Signal(fd, unix.SIGKILL); killErr != nil && !errors.Is(killErr, os.ErrProcessDone) {
		err = errors.Join(err, killErr)
	}
	for _, p := range below {
		if killErr := unix.Kill(p, unix.SIGKILL); killErr != nil && killErr != unix.ESRCH {
			err = errors.Join(err, os.NewSyscallError("kill "+strconv.Itoa(p), killErr))
		}
	}
	return err
}

// Below returns the descendants of root, parents before children. It leaves out some processes and
// their descendants.
func Below(root int, except ...int) ([]int, error) {
	children, err := processTree()
	if err != nil {
		return nil, err
	}
	for _, pid := range except {
		delete(children, pid)
	}
	leftOut := func(pid int) bool { return slices.Contains(except, pid) }
	var all []int
	for next := slices.DeleteFunc(children[root], leftOut); len(next) > 0; {
		var below []int
		for _, pid := range next {
			below = append(below, children[pid]...)
		}
		all = append(all, next...)
		next = slices.DeleteFunc(below, leftOut)
	}
	return all, nil
}

// processTree maps parents to children.
func processTree() (map[int][]int, error) {
	proc, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	defer proc.Close()
	names, err := proc.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	children := map[int][]int{}
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		if parent, ok := parentOf(name); ok {
			children[parent] = append(children[parent], pid)
		}
	}
	return children, nil
}

// IsChild reports whether pid is a child of parent that has not ended.
func IsChild(pid, parent int) bool {
	stat, err := readStat(pid)
	if err != nil {
		return false
	}
	fields := fieldsAfterName(stat)
	return len(fields) > 1 && string(fields[0]) != "Z" && string(fields[1]) == strconv.Itoa(parent)
}

// Names reports whether a process has a pidfd of another process, which has not ended, as its
// descriptor fd.
func Names(holder, fd, pid int) bool {
	info, err := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%d", holder, fd))
	if err != nil || !strings.Contains(string(info), fmt.Sprintf("\nPid:\t%d\n", pid)) {
		return false
	}
	stat, err := readStat(pid)
	if err != nil {
		return false
	}
	fields := fieldsAfterName(stat)
	return len(fields) > 0 && string(fields[0]) != "Z"
}

// parentOf reads field 4 of /proc/PID/stat. Field 2 may contain any bytes and ends with the last
// parenthesis.
func parentOf(pid string) (int, bool) {
	stat, err := os.ReadFile("/proc/" + pid + "/stat")
	if err != nil {
		return 0, false // the process has exited meanwhile
	}
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	if len(fields) < 2 {
		return 0, false
	}
	parent, err := strconv.Atoi(fields[1])
	return parent, err == nil
}
