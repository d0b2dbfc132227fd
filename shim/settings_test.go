package shim

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"berth/shim/proto"
	"golang.org/x/sys/unix"
)

func TestOOMScoreAdj(t *testing.T) {
	e := newEnv(t)
	own, err := os.ReadFile("/proc/self/oom_score_adj")
	if err != nil {
		t.Fatal(err)
	}
	now, err := strconv.Atoi(strings.TrimSpace(string(own)))
	if err != nil {
		t.Fatal(err)
	}
	lowest := now
	if os.WriteFile("/proc/self/oom_score_adj", []byte("-998"), 0) == nil {
		lowest = -998
		if err := os.WriteFile("/proc/self/oom_score_adj", own, 0); err != nil {
			t.Fatal(err)
		}
	}
	for want, ask := range map[int]int{lowest: -998, now: now, 1000: 1000} {
		c := e.run("oom-score-"+strconv.Itoa(ask), "cat /proc/self/oom_score_adj", func(r *proto.Launch) { r.Spec.Process.OOMScoreAdj = &ask })
		c.wait()
		if got := strings.TrimSpace(c.output("stdout")); got != strconv.Itoa(want) {
			t.Errorf("asked for %d: got %s, want %d", ask, got, want)
		}
	}
}

func TestReadOnlyRootfs(t *testing.T) {
	e := newEnv(t)
	c := e.run("readonly", "touch /file; echo $?", func(r *proto.Launch) { r.Rootfs.Upper, r.Rootfs.Work = "", "" })
	c.wait()
	if got := c.output("stdout"); got != "1\n" {
		t.Errorf("touch on a read-only root said %q, %q", got, c.output("stderr"))
	}
}

// The timer slack of launchers and init (shim/launcher/slack.c) does not reach a container's
// command or an exec. Both have the timer slack of the thread that started their launcher, also as
// their default.
func TestTimerSlack(t *testing.T) {
	for name, slack := range map[string]int{"usual": 50_000, "unusual": 70_000} {
		t.Run(name, func(t *testing.T) {
			runtime.LockOSThread() // for good: the thread ends with this function
			if err := unix.Prctl(unix.PR_SET_TIMERSLACK, uintptr(slack), 0, 0, 0); err != nil {
				t.Fatal(err)
			}
			e := newEnv(t, func(c *Config) { c.Warm = false }) // this thread starts the launchers
			const look = "read now </proc/self/timerslack_ns; echo 0 >/proc/self/timerslack_ns; read default </proc/self/timerslack_ns; echo $now $default"
			want := fmt.Sprintf("%d %[1]d", slack)
			c := e.run("slack", look+"; exec sleep 1000")
			e.until("the container has written a line", func() bool { return strings.HasSuffix(c.output("stdout"), "\n") })
			if got := strings.TrimSpace(c.output("stdout")); got != want {
				t.Errorf("its command has a timer slack, and a default one, of %q ns, want %q", got, want)
			}
			for i := range 5 {
				if got, _, _ := c.execIn(itoa(i), look); strings.TrimSpace(got) != want {
					t.Errorf("a command that is executed there has %q ns, want %q", got, want)
				}
			}
		})
	}
}

// Launchers do have the longer timer slack. Otherwise the tests above would show nothing.
func TestTimerSlackOfLauncher(t *testing.T) {
	e := newEnv(t)
	e.until("a launcher waits, and has threads with the longer slack", func() bool { return hasThreadWithSlack(e.Launchers.idlePID(), 2_000_000) })
}

// hasThreadWithSlack returns whether a thread of the process has this timer slack, in nanoseconds.
func hasThreadWithSlack(pid, slack int) bool {
	threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	return err == nil && slices.ContainsFunc(threads, func(thread os.DirEntry) bool {
		got, err := os.ReadFile(filepath.Join("/proc", thread.Name(), "timerslack_ns"))
		return err == nil && strings.TrimSpace(string(got)) == itoa(slack)
	})
}

// Each command of an OCI runtime has the timer slack of the thread that started the launcher.
// Processes that the command leaves behind inherit it, such as gVisor's server of the root
// filesystem.
func TestTimerSlackOfRuntime(t *testing.T) {
	const slack = "70000"
	runtime.LockOSThread() // for good: the thread ends with this function
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, 70_000, 0, 0, 0); err != nil {
		t.Fatal(err)
	}
	e := newEnv(t, func(c *Config) { c.Warm = false }) // this thread starts the launchers
	program := e.runtime()
	if program == nil {
		t.Skip("it is about OCI runtimes")
	}
	seen := filepath.Join(e.dir, "seen")
	wrapper := filepath.Join(e.dir, "runtime")
	script := fmt.Sprintf(`#!/bin/sh
read slack </proc/self/timerslack_ns
for command; do case $command in create|start|exec) echo $command $slack >>%s; break ;; esac; done
exec %s "$@"
`, seen, program.Path)
	if err := os.WriteFile(wrapper, []byte(script), 0o700); err != nil { //nolint:gosec // it must be executable
		t.Fatal(err)
	}
	program.Path = wrapper
	c := e.run("slack", "exec sleep 1000", func(r *proto.Launch) { r.Runtime = program })
	x, err := e.Launchers.Exec(e.ctx, &proto.Exec{ID: c.ID, ExecID: "slack", Dir: c.Dir, Runtime: program, Process: testProcess("true")})
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	if _, err := x.Wait(e.ctx); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(seen)
	if err != nil {
		t.Fatal(err)
	}
	if want := "create " + slack + "\nstart " + slack + "\nexec " + slack + "\n"; string(got) != want {
		t.Errorf("the runtime's program was called with\n%swant\n%s", got, want)
	}
}
