package harness

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// StartedBy has the daemon started by a command that is given its command line, such as prlimit.
func StartedBy(command ...string) DaemonOption {
	return func(_ *testing.T, d *Daemon) { d.starter = append(command, d.starter...) }
}

// Group is a cgroup for a daemon and what it starts.
type Group struct{ dir string }

// InGroup has the daemon started in a cgroup of its own with that controller; the test is skipped where
// there is none.
func InGroup(t *testing.T, controller string) (*Group, DaemonOption) {
	t.Helper()
	g := &Group{dir: fmt.Sprintf("/sys/fs/cgroup/%s%s/%sdaemon%d", controller, machineGroup(), podPrefix(), os.Getpid())}
	if Cgroup2() {
		t.Skip("the daemon is limited by cgroups of version 1 here: where they are version 2 its own group is systemd's or the machine's")
	}
	if err := os.MkdirAll(g.dir, 0o755); err != nil {
		t.Skipf("no cgroup for controller %s: %v", controller, err)
	}
	t.Cleanup(func() {
		Eventually(t, "the daemon's cgroup is empty", func() error {
			if err := os.Remove(g.dir); err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
			return nil
		})
	})
	return g, StartedBy("sh", "-c", `echo $$ >"$0/cgroup.procs" && exec "$@"`, g.dir)
}

// Set writes to a file of the group.
func (g *Group) Set(t *testing.T, file string, value any) {
	t.Helper()
	Must(t, os.WriteFile(filepath.Join(g.dir, file), fmt.Append(nil, value), 0o600))
}

// Number reads a file of the group.
func (g *Group) Number(t *testing.T, file string) (n int64) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(g.dir, file))
	Must(t, err)
	_, err = fmt.Sscan(string(data), &n)
	Must(t, err)
	return n
}

// LeaveFiles lowers the daemon's limit of open files while it runs so that it can open left more, until
// the returned function is called.
func (d *Daemon) LeaveFiles(t *testing.T, left int) (undo func()) {
	t.Helper()
	pid := d.Cmd.Process.Pid
	used := map[string]bool{}
	for _, fd := range ReadDir(fmt.Sprintf("/proc/%d/fd", pid)) {
		used[fd] = true
	}
	limit := 0 // a descriptor is a number below it
	for free := 0; free < left || used[fmt.Sprint(limit)]; limit++ {
		if !used[fmt.Sprint(limit)] {
			free++
		}
	}
	var old unix.Rlimit
	Must(t, unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &old))
	Must(t, unix.Prlimit(pid, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(limit), Max: old.Max}, nil))
	return func() { Must(t, unix.Prlimit(pid, unix.RLIMIT_NOFILE, &old, nil)) }
}

// StatusLimits returns a line of /proc/PID/limits: "soft hard".
func StatusLimits(t *testing.T, pid int, name string) string {
	t.Helper()
	for _, line := range ReadLines(fmt.Sprintf("/proc/%d/limits", pid)) {
		if rest, ok := strings.CutPrefix(line, name); ok {
			return strings.Join(strings.Fields(rest)[:2], " ")
		}
	}
	t.Fatalf("process %d has no limit %q", pid, name)
	return ""
}
