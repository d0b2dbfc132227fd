package harness

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"berth/integration/machine"
)

// Pid returns the container's init. It waits until init runs the container's program.
func (c *Container) Pid(t *testing.T) int {
	t.Helper()
	return waitProgram(t, c.InitPID(t))
}

// InitPID returns the container's init, which may still be libcontainer's.
func (c *Container) InitPID(t *testing.T) int {
	t.Helper()
	response := Get(c.Pod.D.Cri.ContainerStatus(t.Context(), c.Id, true))(t)
	return infoPID(t, response.Info)
}

// WaitStoppable waits until the container's program expects SIGTERM, and returns its process. The
// program either catches the signal or waits for it as pause does. Before that, the kernel drops a
// signal to a process 1, and the signal kills any other process.
func (c *Container) WaitStoppable(t *testing.T) (pid int) {
	t.Helper()
	pid = c.Pid(t)
	Eventually(t, fmt.Sprintf("process %d expects SIGTERM", pid), func() error { return expectsTerm(t, pid) })
	return pid
}

func expectsTerm(t *testing.T, pid int) error {
	t.Helper()
	const term = 1 << (unix.SIGTERM - 1)
	caught := machine.StatusField(t, pid, "SigCgt")
	mask, err := strconv.ParseUint(caught, 16, 64)
	if err != nil {
		return fmt.Errorf("parse SigCgt of the process: %w", err)
	}
	if mask&term != 0 {
		return nil
	}
	// In sigtimedwait the kernel removes the awaited signals from the process's mask.
	call, err := os.ReadFile(fmt.Sprintf("/proc/%d/syscall", pid))
	if err == nil && !strings.HasPrefix(string(call), strconv.Itoa(unix.SYS_RT_SIGTIMEDWAIT)+" ") {
		err = fmt.Errorf("the process catches signals %s and is in system call %s", caught, bytes.TrimSpace(call))
	}
	return err
}

// PausePID returns the pod's pause process.
func (p *Pod) PausePID(t *testing.T) int {
	t.Helper()
	response := Get(p.D.Cri.PodSandboxStatus(t.Context(), p.Id, true))(t)
	return waitProgram(t, infoPID(t, response.Info))
}

// waitProgram waits until a process executes its program. Daemons of earlier versions answer before
// that.
func waitProgram(t *testing.T, pid int) int {
	t.Helper()
	Eventually(t, fmt.Sprintf("process %d runs its program", pid), func() error {
		exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
		if err == nil && strings.Contains(exe, "berth-shim") {
			err = fmt.Errorf("the process runs %s", exe)
		}
		return err
	})
	return pid
}

// infoPID returns the process ID in verbose information. As crictl and critest do, it reads the
// JSON object under the key "info".
func infoPID(t *testing.T, info map[string]string) int {
	t.Helper()
	var parsed struct {
		PID int `json:"pid"`
	}
	if err := json.Unmarshal([]byte(info["info"]), &parsed); err != nil || parsed.PID == 0 {
		t.Fatalf("verbose Status has no pid (%v): %v", err, info)
	}
	return parsed.PID
}

// LauncherOf returns the process ID of a container's launcher, and later of its monitor.
func LauncherOf(t *testing.T, d *Daemon, c *Container) (pid int) {
	t.Helper()
	data := Get(os.ReadFile(filepath.Join(d.State, "c", c.Id, "shim")))(t)
	_, err := fmt.Sscan(string(data), &pid)
	Must(t, err)
	return pid
}

// MonitorOf returns the process ID of a container's monitor.
func MonitorOf(t *testing.T, d *Daemon, c *Container) int {
	t.Helper()
	var pid int
	// A SIGSTOP before the launcher executes the monitor would be lost, because execve ends the
	// other threads and with them the stop.
	Eventually(t, "the container has a monitor", func() error {
		pid = LauncherOf(t, d, c)
		comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
		if err == nil && string(comm) != "berth-monitor\n" {
			err = Unexpected("program", string(comm), "berth-monitor")
		}
		return err
	})
	return pid
}
