package integration

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

func lgetxattr(path, name string, value []byte) (int, error) {
	n, err := unix.Lgetxattr(path, name, value)
	if err != nil {
		return 0, &os.PathError{Op: "lgetxattr " + name, Path: path, Err: err}
	}
	return n, nil
}

// pid returns the container's init, once that runs its program: StartContainer
// returns a moment before, and then it still has the runtime's name and privileges.
func (c *container) pid(t *testing.T) int {
	t.Helper()
	response, err := c.pod.d.cri.ContainerStatus(t.Context(), c.id, true)
	must(t, err)
	return waitProgram(t, infoPID(t, response.Info))
}

// pausePID returns the pod's pause process.
func (p *pod) pausePID(t *testing.T) int {
	t.Helper()
	response, err := p.d.cri.PodSandboxStatus(t.Context(), p.id, true)
	must(t, err)
	return waitProgram(t, infoPID(t, response.Info))
}

func waitProgram(t *testing.T, pid int) int {
	t.Helper()
	eventually(t, fmt.Sprintf("process %d runs its program", pid), func() error {
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

// statusField returns a line of /proc/PID/status.
func statusField(t *testing.T, pid int, key string) string {
	t.Helper()
	for _, line := range readLines(fmt.Sprintf("/proc/%d/status", pid)) {
		if value, ok := strings.CutPrefix(line, key+":"); ok {
			return strings.TrimSpace(value)
		}
	}
	t.Fatalf("/proc/%d/status has no %s", pid, key)
	return ""
}

// namespace identifies a namespace of a process.
func namespace(t *testing.T, pid int, kind string) string {
	t.Helper()
	link, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, kind))
	must(t, err)
	return link
}

func alive(pid int) bool {
	lines := readLines("/proc/" + strconv.Itoa(pid) + "/stat")
	if len(lines) == 0 {
		return false
	}
	_, state, _ := strings.Cut(lines[0], ") ")
	return !strings.HasPrefix(state, "Z")
}

// cgroupDir returns the directory of a process's cgroup in the hierarchy of a
// controller, on a host with cgroup v1 or v2.
func cgroupDir(t *testing.T, pid int, controller string) string {
	t.Helper()
	for _, line := range readLines(fmt.Sprintf("/proc/%d/cgroup", pid)) {
		fields := strings.SplitN(line, ":", 3)
		if fields[1] == "" && cgroup2() {
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

// cgroup2 reports whether the host uses cgroup v2 alone.
func cgroup2() bool {
	_, err := os.Stat("/sys/fs/cgroup/cgroup.controllers")
	return err == nil
}

// cgroupFile reads a setting of a process's cgroup: v1 and v2 are its names.
func cgroupFile(t *testing.T, pid int, controller, v1, v2 string) string {
	t.Helper()
	name := v1
	if cgroup2() {
		name = v2
	}
	content, err := os.ReadFile(filepath.Join(cgroupDir(t, pid, controller), name))
	must(t, err)
	return strings.TrimSpace(string(content))
}

// canLowerOOMScore reports whether this kernel lets us go below our own
// oom_score_adj: that takes CAP_SYS_RESOURCE, which root may lack.
func canLowerOOMScore() bool {
	cmd := exec.Command("sh", "-c", "echo -998 >/proc/self/oom_score_adj")
	return cmd.Run() == nil
}

// commandLine returns a process's arguments, separated by blanks; "" if it is a
// zombie or gone.
func commandLine(pid int) string {
	return strings.ReplaceAll(strings.Join(readLines(fmt.Sprintf("/proc/%d/cmdline", pid)), "\n"), "\x00", " ")
}

// processes returns the IDs of all processes.
func processes() (pids []int) {
	for _, name := range readDir("/proc") {
		if pid, err := strconv.Atoi(name); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// commandLines returns the command lines of all processes that begin with prefix.
func commandLines(prefix string) (found []string) {
	for _, pid := range processes() {
		if line := commandLine(pid); strings.HasPrefix(line, prefix) {
			found = append(found, line)
		}
	}
	return found
}

// childrenOf returns a process's children.
func childrenOf(parent int) (pids []int) {
	for _, pid := range processes() {
		lines := readLines(fmt.Sprintf("/proc/%d/status", pid))
		if slices.Contains(lines, fmt.Sprintf("PPid:\t%d", parent)) {
			pids = append(pids, pid)
		}
	}
	return pids
}
