package shim

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/testutil"
	"berth/shim/proto"
)

// lastingEnv returns an environment with one launcher, which outlives its launches.
func lastingEnv(t *testing.T) (*env, *launcher) {
	e := newEnv(t)
	if e.runtime() != nil {
		t.Skip("the launcher of an OCI runtime's container becomes its monitor")
	}
	if !e.keepsStatus {
		t.Skip("the kernel does not keep the status of a reaped process (Linux 6.15)")
	}
	return e, e.idleLauncher()
}

// launcherOf returns the process that has launched a container: the monitor or its parent.
func (c *container) launcherOf() int {
	if c.Lasts {
		return c.parentOf(c.MonitorPID)
	}
	return c.MonitorPID
}

// parentOf returns the parent of a process, 0 if the process has ended.
func (e *env) parentOf(pid int) (parent int) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	var state string
	if _, err := fmt.Sscan(rest, &state, &parent); err != nil {
		e.Fatal(err)
	}
	return parent
}

// filesOf counts the open files of a process by their targets. It leaves out pidfds, which Go
// closes when it frees their processes.
func (e *env) filesOf(pid int) map[string]int {
	e.Helper()
	files := map[string]int{}
	links, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil {
		e.Fatal(err)
	}
	for _, l := range links {
		if target, err := os.Readlink(l); err == nil && !strings.Contains(target, "pidfd") {
			files[target]++
		}
	}
	return files
}

func (e *env) mountsOf(pid int) string {
	e.Helper()
	table, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
	if err != nil {
		e.Fatal(err)
	}
	return string(table)
}

func withStdin(r *proto.Launch) { r.Stdin = true }

// A launcher launches containers one after another. It keeps none of their files and mounts, and
// reaps their inits and monitors.
func TestLauncherLasts(t *testing.T) {
	e, p := lastingEnv(t)
	mounts := e.mountsOf(p.pid)
	// What a process inherits from the launcher.
	const inherited = "grep -E '^(Sig(Ign|Blk)|THP_enabled|NoNewPrivs|Seccomp):' /proc/self/status; ulimit -a"
	var files map[string]int
	var first string
	for i := range 5 {
		c := e.run(fmt.Sprintf("c%d", i), fmt.Sprintf("%s; echo end; read x; exit %d", inherited, i), withStdin)
		e.until("it has written all", func() bool { return strings.HasSuffix(c.output("stdout"), "end\n") })
		out := c.output("stdout")
		if i == 0 {
			first = out
		}
		if out != first {
			t.Errorf("the first container had\n%s\nthis one has\n%s", first, out)
		}
		if got := c.launcherOf(); got != p.pid {
			t.Fatalf("launcher %d launched the container, not %d", got, p.pid)
		}
		if now := e.mountsOf(p.pid); now != mounts {
			t.Errorf("the launcher's mounts were\n%s\nare\n%s", mounts, now)
		}
		if err := OpenMonitor(c.Dir).CloseStdin(t.Context()); err != nil {
			t.Fatal(err)
		}
		if exit := c.wait(); int(exit.Code) != i || exit.Signal != 0 {
			t.Errorf("exit = %+v, want code %d", exit, i)
		}
		e.until("init and monitor are reaped", func() bool {
			return unix.Kill(c.InitPID, 0) == unix.ESRCH && unix.Kill(c.MonitorPID, 0) == unix.ESRCH
		})
		if i == 0 { // libcontainer opens some files of the cgroups once
			files = e.filesOf(p.pid)
		} else if now := e.filesOf(p.pid); !maps.Equal(now, files) {
			t.Errorf("the launcher's files were %v, are %v", files, now)
		}
	}
}

// The monitor reports the exit of a container whose launcher has died or is stopped.
func TestLaunchersEndAndTheExit(t *testing.T) {
	for name, signal := range map[string]unix.Signal{"killed": unix.SIGKILL, "stopped": unix.SIGSTOP} {
		for _, ended := range []string{"exits", "is killed"} {
			t.Run(name+" and the container "+ended, func(t *testing.T) {
				e, p := lastingEnv(t)
				c := e.run("c", "read x; exit 7", withStdin)
				if err := OpenMonitor(c.Dir).ReopenLog(t.Context()); err != nil { // it works
					t.Fatal(err)
				}
				if err := unix.Kill(p.pid, signal); err != nil {
					t.Fatal(err)
				}
				if signal == unix.SIGKILL {
					e.until("the container has another parent", func() bool { return c.launcherOf() != p.pid })
				}
				end := func() error { return OpenMonitor(c.Dir).CloseStdin(t.Context()) }
				code, bySignal := 7, 0
				if ended == "is killed" {
					end = func() error { return unix.Kill(c.InitPID, unix.SIGKILL) }
					code, bySignal = 137, 9
				}
				if err := end(); err != nil {
					t.Fatal(err)
				}
				if exit := c.wait(); int(exit.Code) != code || exit.Signal != bySignal {
					t.Errorf("exit = %+v, want code %d", exit, code)
				}
				if err := unix.Kill(p.pid, unix.SIGCONT); err != nil && err != unix.ESRCH {
					t.Error(err)
				}
			})
		}
	}
}

// mainless is a program whose main thread ends first. SIGTERM makes its other thread exit.
const mainless = `
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

static void leave(int sig) { (void)sig; _exit(3); }
static void *rest(void *arg) { for (;;) pause(); return arg; }

int main(void)
{
	pthread_t other;
	signal(SIGTERM, leave);
	if (pthread_create(&other, NULL, rest, NULL) != 0)
		return 1;
	pthread_exit(NULL);
}
`

// runMainless launches mainless and waits for the end of its main thread.
func (e *env) runMainless() *container {
	e.Helper()
	compiler := exec.Command("cc", "-static", "-pthread", "-x", "c", "-o", filepath.Join(e.layer, "bin", "mainless"), "-")
	compiler.Stdin = strings.NewReader(mainless)
	if out, err := compiler.CombinedOutput(); err != nil {
		e.Skipf("NOT TESTED: no C compiler with a static C library: %v\n%s", err, out)
	}
	c := e.run("c", "exec mainless")
	if err := OpenMonitor(c.Dir).ReopenLog(e.ctx); err != nil { // it works
		e.Fatal(err)
	}
	e.until("the main thread has ended", func() bool { return stateOf(e.T, c.InitPID) == "Z" })
	return c
}

// The exit code is that of the process, not that of a main thread that ended earlier, also if init
// was reaped before the monitor reads it.
func TestStatusOfOtherThread(t *testing.T) {
	for name, end := range map[string]struct {
		signal unix.Signal
		code   int32
	}{"exits": {unix.SIGTERM, 3}, "is killed": {unix.SIGKILL, 137}} {
		t.Run("it "+name, func(t *testing.T) {
			e, _ := lastingEnv(t)
			c := e.runMainless()
			testutil.Must(t, unix.Kill(c.MonitorPID, unix.SIGSTOP))
			testutil.Must(t, unix.Kill(c.InitPID, end.signal))
			e.until("init is reaped", func() bool { return unix.Kill(c.InitPID, 0) == unix.ESRCH })
			testutil.Must(t, unix.Kill(c.MonitorPID, unix.SIGCONT))
			if exit := c.wait(); exit.Code != end.code {
				t.Errorf("exit = %+v, want code %d", exit, end.code)
			}
		})
	}
}

// On a kernel that forgets the status of a reaped process, the launcher becomes the monitor.
func TestLauncherBecomesMonitor(t *testing.T) {
	e := newEnv(t)
	e.keepsStatus = false
	p := e.idleLauncher()
	c := e.run("c", "exit 3")
	if c.MonitorPID != p.pid {
		t.Errorf("process %d is the monitor, not the launcher %d", c.MonitorPID, p.pid)
	}
	if exit := c.wait(); exit.Code != 3 {
		t.Errorf("exit = %+v", exit)
	}
}

// The monitor of a launch that fails ends, as the leak check sees. The message of init arrives.
func TestFailedLaunchEndsItsMonitor(t *testing.T) {
	e, p := lastingEnv(t)
	if err := os.WriteFile(filepath.Join(e.layer, "bin", "damaged"), []byte("\x7fELF, damaged"), 0o755); err != nil {
		t.Fatal(err)
	}
	req := e.request("c", "")
	req.Spec.Process.Args = []string{"/bin/damaged"}
	_, err := e.Launch(t.Context(), req)
	if errdefs.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "exec format error") {
		t.Errorf("error = %v", err)
	}
	e.nothingLeft(req)
	e.until("the launcher has ended", func() bool { return unix.Kill(p.pid, 0) == unix.ESRCH })
}
