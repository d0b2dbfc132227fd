package harness

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func Lgetxattr(path, name string, value []byte) (int, error) {
	n, err := unix.Lgetxattr(path, name, value)
	if err != nil {
		return 0, &os.PathError{Op: "lgetxattr " + name, Path: path, Err: err}
	}
	return n, nil
}

// Pid returns the container's init, once that runs its program: StartContainer
// returns a moment before, and then it still has the runtime's name and privileges.
func (c *Container) Pid(t *testing.T) int {
	t.Helper()
	response, err := c.Pod.D.Cri.ContainerStatus(t.Context(), c.Id, true)
	Must(t, err)
	return waitProgram(t, infoPID(t, response.Info))
}

// PausePID returns the pod's pause process.
func (p *Pod) PausePID(t *testing.T) int {
	t.Helper()
	response, err := p.D.Cri.PodSandboxStatus(t.Context(), p.Id, true)
	Must(t, err)
	return waitProgram(t, infoPID(t, response.Info))
}

func waitProgram(t *testing.T, pid int) int {
	t.Helper()
	Eventually(t, fmt.Sprintf("process %d runs its program", pid), func() error {
		exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
		if err == nil && strings.Contains(exe, "berth-shim") {
			err = fmt.Errorf("it runs %s", exe)
		}
		return err
	})
	return pid
}

// infoPID finds the process ID in verbose information: as crictl and critest do,
// in the JSON object under the key "info".
func infoPID(t *testing.T, info map[string]string) int {
	t.Helper()
	var parsed struct {
		PID int `json:"pid"`
	}
	if err := json.Unmarshal([]byte(info["info"]), &parsed); err != nil || parsed.PID == 0 {
		t.Fatalf("verbose status tells no pid (%v): %v", err, info)
	}
	return parsed.PID
}

// StatusField returns a line of /proc/PID/status.
func StatusField(t *testing.T, pid int, key string) string {
	t.Helper()
	for _, line := range ReadLines(fmt.Sprintf("/proc/%d/status", pid)) {
		if value, ok := strings.CutPrefix(line, key+":"); ok {
			return strings.TrimSpace(value)
		}
	}
	t.Fatalf("/proc/%d/status has no %s", pid, key)
	return ""
}

// Namespace identifies a namespace of a process.
func Namespace(t *testing.T, pid int, kind string) string {
	t.Helper()
	link, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, kind))
	Must(t, err)
	return link
}

func Alive(pid int) bool {
	lines := ReadLines("/proc/" + strconv.Itoa(pid) + "/stat")
	if len(lines) == 0 {
		return false
	}
	_, state, _ := strings.Cut(lines[0], ") ")
	return !strings.HasPrefix(state, "Z")
}

// CgroupDir returns the directory of a process's cgroup in the hierarchy of a
// controller, on a host with cgroup v1 or v2.
func CgroupDir(t *testing.T, pid int, controller string) string {
	t.Helper()
	for _, line := range ReadLines(fmt.Sprintf("/proc/%d/cgroup", pid)) {
		fields := strings.SplitN(line, ":", 3)
		if fields[1] == "" && Cgroup2() {
			return filepath.Join("/sys/fs/cgroup", fields[2])
		}
		for _, name := range strings.Split(fields[1], ",") {
			if name == controller {
				return filepath.Join("/sys/fs/cgroup", controller, fields[2])
			}
		}
	}
	t.Fatalf("process %d has no cgroup for %s", pid, controller)
	return ""
}

// Cgroup2 reports whether the host uses cgroup v2 alone.
func Cgroup2() bool {
	_, err := os.Stat("/sys/fs/cgroup/cgroup.controllers")
	return err == nil
}

// CgroupFile reads a setting of a process's cgroup: v1 and v2 are its names.
func CgroupFile(t *testing.T, pid int, controller, v1, v2 string) string {
	t.Helper()
	name := v1
	if Cgroup2() {
		name = v2
	}
	content, err := os.ReadFile(filepath.Join(CgroupDir(t, pid, controller), name))
	Must(t, err)
	return strings.TrimSpace(string(content))
}

// CanLowerOOMScore reports whether this kernel lets us go below our own
// oom_score_adj: that takes CAP_SYS_RESOURCE, which root may lack.
func CanLowerOOMScore() bool {
	cmd := exec.Command("sh", "-c", "echo -998 >/proc/self/oom_score_adj")
	return cmd.Run() == nil
}

// CommandLine returns a process's arguments, separated by blanks; "" if it is a
// zombie or gone.
func CommandLine(pid int) string {
	return strings.ReplaceAll(strings.Join(ReadLines(fmt.Sprintf("/proc/%d/cmdline", pid)), "\n"), "\x00", " ")
}

// Processes returns the IDs of all processes.
func Processes() (pids []int) {
	for _, name := range ReadDir("/proc") {
		if pid, err := strconv.Atoi(name); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
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

func KillProcess(t *testing.T, pid int) {
	t.Helper()
	Must(t, unix.Kill(pid, unix.SIGKILL))
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

// MonitorOf returns the process ID of a container's monitor.
func MonitorOf(t *testing.T, d *Daemon, c *Container) int {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(d.State, "c", c.Id, "shim"))
	Must(t, err)
	var pid int
	_, err = fmt.Sscan(string(data), &pid)
	Must(t, err)
	return pid
}

// SessionsLeft tells whether a monitor has clients.
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
	if sockets != 1 { // the one it listens at
		return fmt.Errorf("the monitor has %d sockets", sockets)
	}
	return nil
}

func CountFiles(t *testing.T, pid int, dir string) int {
	t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/%s", pid, dir))
	Must(t, err)
	return len(entries)
}
