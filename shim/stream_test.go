package shim

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/internal/pidfd"
	"berth/shim/proto"
	"berth/shim/running"
)

// A Kill that arrives when its exec has ended must not hit the next one on the
// same launcher.
func TestKillNamesItsExec(t *testing.T) {
	e := newEnv(t)
	c := e.run("names", "exec sleep 1000")
	x, err := e.Exec(e.ctx, &proto.Exec{ID: c.ID, ExecID: "second", Process: testProcess("sh", "-c", "read x; exit 4"), Stdin: closedBy(t)})
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	if err := x.p.conn.Send(proto.Request{Kill: "first"}); err != nil {
		t.Fatal(err)
	}
	// A Kill of its own comes after it on the same connection.
	proc, err := pidfd.Open(x.PID())
	if err != nil {
		t.Fatal(err)
	}
	defer proc.Close()
	if gone, err := pidfd.Exited(proc); gone || err != nil {
		t.Fatalf("the exec has ended: %v, %v", gone, err)
	}
	if stdout, _, code := c.execIn("other", "echo alive"); stdout != "alive\n" || code != 0 {
		t.Errorf("another exec: %q, %d", stdout, code)
	}
	if err := x.Kill(); err != nil {
		t.Fatal(err)
	}
	if code, err := x.Wait(e.ctx); code != 137 || err != nil {
		t.Errorf("Wait = %d, %v, want 137", code, err)
	}
}

// A Kill may arrive when its exec has ended and the launcher already serves a launch. It does not
// cancel that launch.
func TestKillOfAnExecDuringALaunch(t *testing.T) {
	e := newEnv(t)
	var p *launcher
	e.until("a launcher is idle", func() bool { // it is the next launcher to be taken
		e.mu.Lock()
		defer e.mu.Unlock()
		if len(e.idle) == 1 {
			p = e.idle[0].launcher
		}
		return p != nil
	})
	fifo := filepath.Join(e.dir, "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	req := e.request("launched", "read x; exit 3")
	req.Stdin = true
	req.Spec.Hooks = &specs.Hooks{CreateRuntime: []specs.Hook{{Path: "/bin/sh", Args: []string{"sh", "-c", "read go <" + fifo}}}}
	killed := make(chan error, 1)
	go func() {
		f, err := os.OpenFile(fifo, os.O_WRONLY, 0) // which waits until the launch has begun
		if err == nil {
			err = p.conn.Send(proto.Request{Kill: "ended"})
		}
		if err == nil {
			_, err = f.WriteString("go\n")
			err = errors.Join(err, f.Close())
		}
		killed <- err
	}()
	c := e.launch(req)
	if err := <-killed; err != nil {
		t.Fatal(err)
	}
	if got := c.launcherOf(); got != p.pid {
		t.Fatalf("launcher %d got the request, %d launched the container", p.pid, got)
	}
	if err := OpenMonitor(c.Dir).CloseStdin(t.Context()); err != nil {
		t.Fatal(err)
	}
	if exit := c.wait(); exit.Code != 3 {
		t.Errorf("exit = %+v", exit)
	}
}

// closedBy returns the reading end of a pipe whose other end is closed at the
// test's end.
func closedBy(t *testing.T) *os.File {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close(); w.Close() })
	return r
}

// An exec that cannot start, because its container is frozen, ends in time and
// leaves nothing.
func TestCancelledExecIsKilledDuringStart(t *testing.T) {
	if os.Getenv(runtimeEnv) != "" {
		t.Skip("crun refuses at once to exec in a frozen container")
	}
	e := newEnv(t)
	c := e.run("frozen", "sleep 1000 & echo up; wait")
	// Do not freeze earlier: cgroup v1 can freeze some threads of a process in execve for ever.
	e.until("it is up", func() bool { return c.log() != "" && c.countProcesses() == 2 })
	e.until("its sleep is up", func() bool { return len(c.processesNamed("sleep")) == 1 })
	before := c.countProcesses()
	thaw := c.freeze()
	ctx, cancel := context.WithCancel(e.ctx)
	given := make(chan error, 1)
	go func() {
		x, err := e.Exec(ctx, &proto.Exec{ID: c.ID, ExecID: "1", CgroupsPath: cgroupRoot + "/" + c.ID, Process: testProcess("sleep", "1001")})
		if err == nil {
			err = x.Close()
		}
		given <- err
	}()
	e.until("the exec's process is in the container", func() bool {
		select {
		case err := <-given: // it would never come
			t.Fatalf("Exec = %v before it was given up", err)
		default:
		}
		return c.countProcesses() > before
	})
	cancel()
	if err := <-given; !errors.Is(err, context.Canceled) { // still frozen
		t.Errorf("Exec = %v, want canceled", err)
	}
	thaw()
	e.until("the exec's process is gone", func() bool { return c.countProcesses() == before })
	e.until("its cgroup is gone", func() bool {
		for _, dir := range cgroupDirs() {
			if _, err := os.Stat(dir + "/" + c.ID + "/exec-1"); err == nil {
				return false
			}
		}
		return true
	})
	if stdout, _, code := c.execIn("2", "echo alive"); stdout != "alive\n" || code != 0 {
		t.Errorf("the next exec: %q, %d", stdout, code)
	}
}

// processesNamed returns the container's processes that run a program of that name.
func (c *container) processesNamed(name string) []int {
	c.Helper()
	pids, err := c.group().Procs()
	if err != nil {
		c.Fatal(err)
	}
	return slices.DeleteFunc(pids, func(pid int) bool {
		comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
		return err != nil || strings.TrimSpace(string(comm)) != name
	})
}

// freeze stops all processes of the container until thaw is called. It returns when they have
// stopped: on a busy machine libcontainer fails after 10 s if a frozen v2 cgroup has not settled.
func (c *container) freeze() (thaw func()) {
	c.Helper()
	for _, dir := range cgroupDirs() {
		for _, f := range []struct{ file, on, off, state, frozen string }{
			{"freezer.state", "FROZEN", "THAWED", "freezer.state", "FROZEN\n"},
			{"cgroup.freeze", "1", "0", "cgroup.events", "frozen 1\n"},
		} {
			dir := dir + "/" + c.ID + "/"
			if os.WriteFile(dir+f.file, []byte(f.on), 0) != nil {
				continue
			}
			thaw = func() {
				if err := os.WriteFile(dir+f.file, []byte(f.off), 0); err != nil {
					c.Error(err)
				}
			}
			c.Cleanup(thaw)
			c.until("its processes have stopped", func() bool {
				state, err := os.ReadFile(dir + f.state)
				return err == nil && strings.Contains(string(state), f.frozen)
			})
			return thaw
		}
	}
	c.Skip("there is no freezer")
	return nil
}

// attachUnread attaches a client that never reads.
func (c *container) attachUnread() *running.Attached {
	c.Helper()
	stuck, err := OpenMonitor(c.Dir).OpenAttach(c.ctx, proto.WantStdout)
	if err != nil {
		c.Fatal(err)
	}
	c.Cleanup(func() { stuck.Close() })
	if !stuck.AnnouncesEnd {
		c.Fatal("the answer does not announce an end")
	}
	return stuck
}

// monitorMemory is the private memory of the container's monitor, in bytes.
func (c *container) monitorMemory() int {
	c.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", c.MonitorPID))
	if err != nil {
		c.Fatal(err)
	}
	total := 0
	for line := range strings.Lines(string(data)) {
		var kb int
		if n, _ := fmt.Sscanf(line, "Private_Dirty: %d kB", &kb); n == 1 {
			total += kb << 10
		}
	}
	return total
}

// Execs do not inherit the monitor's descriptor of a terminal, and cannot make it their controlling
// terminal.
func TestMonitorsTerminalIsCloseOnExec(t *testing.T) {
	e := newEnv(t)
	c := e.run("peer", "read x", func(r *proto.Launch) { r.Stdin, r.Terminal, r.Spec.Process.Terminal = true, true, true })
	a := c.attach(func(s *running.AttachIO) { s.Stderr = nil })
	if err := OpenMonitor(c.Dir).Resize(e.ctx, 80, 24); err != nil { // the monitor is up when it answers
		t.Fatal(err)
	}
	dir := fmt.Sprintf("/proc/%d/fdinfo/", c.MonitorPID)
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	terminals := 0
	for _, entry := range entries {
		target, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", c.MonitorPID, entry.Name()))
		if target != "/dev/pts/0" { // the master, /dev/pts/ptmx, came with the launcher
			continue
		}
		terminals++
		data, err := os.ReadFile(dir + entry.Name())
		if err != nil {
			t.Fatal(err)
		}
		var flags uint64
		for line := range strings.Lines(string(data)) {
			_, _ = fmt.Sscanf(line, "flags: %o", &flags)
		}
		if flags&unix.O_CLOEXEC == 0 {
			t.Errorf("descriptor %s (%s) is not close-on-exec: %o", entry.Name(), target, flags)
		}
	}
	if terminals == 0 {
		t.Error("the monitor does not hold the terminal open")
	}
	a.send("x\n")
	if err := a.wait(); err != nil {
		t.Error(err)
	}
	c.wait()
}
