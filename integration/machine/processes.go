package machine

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

// Processes returns the IDs of all processes.
func Processes() (pids []int) {
	for _, name := range ReadDir("/proc") {
		if pid, err := strconv.Atoi(name); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// CommandLine returns a process's arguments, separated by blanks, or "" if the process is a zombie
// or has exited.
func CommandLine(pid int) string {
	return strings.ReplaceAll(strings.Join(ReadLines(fmt.Sprintf("/proc/%d/cmdline", pid)), "\n"), "\x00", " ")
}

// CommandLines returns the command lines of all processes that begin with prefix.
func CommandLines(prefix string) (found []string) {
	for _, pid := range Processes() {
		if line := CommandLine(pid); strings.HasPrefix(line, prefix) {
			found = append(found, line)
		}
	}
	return found
}

// ProcessesOf returns the processes with exactly that command line.
func ProcessesOf(line string) (pids []int) {
	for _, pid := range Processes() {
		if strings.TrimRight(CommandLine(pid), " ") == line {
			pids = append(pids, pid)
		}
	}
	return pids
}

// ChildrenOf returns a process's children.
func ChildrenOf(parent int) (pids []int) {
	for _, pid := range Processes() {
		lines := ReadLines(fmt.Sprintf("/proc/%d/status", pid))
		if slices.Contains(lines, fmt.Sprintf("PPid:\t%d", parent)) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// PidfdsOf returns the number of pidfds of process pid that process holder has open.
func PidfdsOf(holder, pid int) (n int) {
	dir := fmt.Sprintf("/proc/%d/fdinfo/", holder)
	for _, fd := range ReadDir(dir) {
		if slices.Contains(ReadLines(dir+fd), fmt.Sprintf("Pid:\t%d", pid)) {
			n++
		}
	}
	return n
}

// Alive reports whether the process exists and is no zombie.
func Alive(pid int) bool {
	lines := ReadLines("/proc/" + strconv.Itoa(pid) + "/stat")
	if len(lines) == 0 {
		return false
	}
	_, state, _ := strings.Cut(lines[0], ") ")
	return !strings.HasPrefix(state, "Z")
}

// KillProcess sends SIGKILL.
func KillProcess(t *testing.T, pid int) {
	t.Helper()
	testutil.Must(t, unix.Kill(pid, unix.SIGKILL))
}

// ContinueAll sends SIGCONT to all stopped processes.
func ContinueAll() {
	for _, pid := range Stopped() {
		_ = unix.Kill(pid, unix.SIGCONT) // the process may have exited
	}
}

// Stopped returns the stopped processes.
func Stopped() (pids []int) {
	for _, pid := range Processes() {
		if slices.Contains(ReadLines(fmt.Sprintf("/proc/%d/status", pid)), "State:\tT (stopped)") {
			pids = append(pids, pid)
		}
	}
	return pids
}

// StatusField returns the value of a line of /proc/PID/status.
func StatusField(t *testing.T, pid int, key string) string {
	t.Helper()
	value, err := ReadStatusField(pid, key)
	testutil.Must(t, err)
	return value
}

// ReadStatusField is StatusField for a process that may have ended.
func ReadStatusField(pid int, key string) (string, error) {
	for _, line := range ReadLines(fmt.Sprintf("/proc/%d/status", pid)) {
		if value, ok := strings.CutPrefix(line, key+":"); ok {
			return strings.TrimSpace(value), nil
		}
	}
	return "", fmt.Errorf("/proc/%d/status has no %s", pid, key)
}

// Namespace returns the identity of a process's namespace, for example "net:[4026531840]".
func Namespace(t *testing.T, pid int, kind string) string {
	t.Helper()
	link, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, kind))
	testutil.Must(t, err)
	return link
}

// CountFiles returns the number of entries in a directory of /proc/PID, for example fd or task.
func CountFiles(t *testing.T, pid int, dir string) int {
	t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/%s", pid, dir))
	testutil.Must(t, err)
	return len(entries)
}

// SessionsLeft returns an error if the monitor has sockets besides its listener.
func SessionsLeft(monitor int) error {
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", monitor))
	if err != nil {
		return err
	}
	sockets := 0
	for _, e := range entries {
		if target, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", monitor, e.Name())); err == nil && strings.HasPrefix(target, "socket:") {
			sockets++
		}
	}
	if sockets != 1 {
		return fmt.Errorf("the monitor has %d sockets", sockets)
	}
	return nil
}

// CanLowerOOMScore reports whether the process may lower its oom_score_adj, which needs
// CAP_SYS_RESOURCE. Root may lack it.
func CanLowerOOMScore() bool {
	cmd := exec.Command("sh", "-c", "echo -998 >/proc/self/oom_score_adj")
	return cmd.Run() == nil
}

// Limits returns a line of /proc/PID/limits as "soft hard".
func Limits(t *testing.T, pid int, name string) string {
	t.Helper()
	for _, line := range ReadLines(fmt.Sprintf("/proc/%d/limits", pid)) {
		if rest, ok := strings.CutPrefix(line, name); ok {
			return strings.Join(strings.Fields(rest)[:2], " ")
		}
	}
	t.Fatalf("process %d has no limit %q", pid, name)
	return ""
}
