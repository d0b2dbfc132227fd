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

// Pid returns the container's init, once that runs its program.
func (c *Container) Pid(t *testing.T) int {
	t.Helper()
	return waitProgram(t, c.InitPID(t))
}

// InitPID is Pid, whatever the process executes.
func (c *Container) InitPID(t *testing.T) int {
	t.Helper()
	response, err := c.Pod.D.Cri.ContainerStatus(t.Context(), c.Id, true)
	Must(t, err)
	return infoPID(t, response.Info)
}

// WaitStoppable waits until SIGTERM reaches the container's program, and returns its process: it
// catches the signal, or waits for it as pause does. Before that a process 1 never learns of the
// signal, and another process ends by it.
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
		return fmt.Errorf("signals that it catches: %w", err)
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
	response, err := p.D.Cri.PodSandboxStatus(t.Context(), p.Id, true)
	Must(t, err)
	return waitProgram(t, infoPID(t, response.Info))
}

// waitProgram waits until a process executes its program: daemons of earlier versions answer
// before.
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
		t.Fatalf("verbose Status has no pid (%v): %v", err, info)
	}
	return parsed.PID
}

// LauncherOf returns the process ID of a container's launcher, which becomes its monitor.
func LauncherOf(t *testing.T, d *Daemon, c *Container) (pid int) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(d.State, "c", c.Id, "shim"))
	Must(t, err)
	_, err = fmt.Sscan(string(data), &pid)
	Must(t, err)
	return pid
}

// MonitorOf returns the process ID of a container's monitor.
func MonitorOf(t *testing.T, d *Daemon, c *Container) int {
	t.Helper()
	pid := LauncherOf(t, d, c)
	// A stop that comes while the launcher executes the monitor is forgotten: execve ends the other
	// threads, and the group's stop with them.
	Eventually(t, "the launcher is the monitor", func() error {
		comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
		if err == nil && string(comm) != "berth-monitor\n" {
			err = Unexpected("program", string(comm), "berth-monitor")
		}
		return err
	})
	return pid
}
