package shim

import (
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/internal/pidfd"
	"berth/shim/proto"
)

// onThread runs do on a thread that ends with it. The process's first thread would not.
func onThread(do func()) {
	runtime.LockOSThread() // never unlocked but on the first thread
	if unix.Gettid() != unix.Getpid() {
		do()
		return
	}
	done := make(chan struct{})
	go func() { defer close(done); onThread(do) }()
	<-done
	runtime.UnlockOSThread()
}

// seize traces a process and never waits for it. A process of another container in the same PID
// namespace can do so. The returned function detaches.
func seize(t *testing.T, pid int) (letGo func()) {
	t.Helper()
	result, end, ended := make(chan error), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		onThread(func() {
			const seize = 0x4206 // PTRACE_SEIZE
			_, _, errno := unix.RawSyscall6(unix.SYS_PTRACE, seize, uintptr(pid), 0, 0, 0, 0)
			if errno != 0 {
				result <- errno
				return
			}
			result <- nil
			<-end
		})
	}()
	if err := <-result; err != nil {
		t.Fatal(err)
	}
	return func() { close(end); <-ended }
}

// sharePIDNamespace puts a container into the PID namespace of the tests, where other processes can
// trace it.
func sharePIDNamespace(r *proto.Launch) {
	var own []specs.LinuxNamespace
	for _, ns := range r.Spec.Linux.Namespaces {
		if ns.Type != specs.PIDNamespace {
			own = append(own, ns)
		}
	}
	r.Spec.Linux.Namespaces, r.Stdin = own, true
}

// The exit code of an init is recorded although another process traces it and never reaps it. The
// container can be removed.
func TestTracedInit(t *testing.T) {
	for name, c := range map[string]struct {
		script string
		end    func(c *container, a *attached) error
		want   proto.Exit
	}{
		"exits": {"echo ready; read x; echo last words; exit 7", func(_ *container, a *attached) error { a.send("go\n"); return nil }, proto.Exit{Code: 7}},
		"killed": {"echo ready; read x", func(c *container, _ *attached) error { return pidfd.Signal(c.Init, unix.SIGKILL) },
			proto.Exit{Code: 128 + int32(unix.SIGKILL), Signal: int(unix.SIGKILL)}},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t)
			traced := e.run("traced", c.script, sharePIDNamespace)
			client := traced.attach()
			e.until("it is ready", func() bool { return strings.Contains(traced.output("stdout"), "ready") })
			letGo := seize(t, traced.InitPID)
			defer letGo()
			if err := c.end(traced, client); err != nil {
				t.Fatal(err)
			}
			got := traced.wait()
			if got.Code != c.want.Code || got.Signal != c.want.Signal {
				t.Errorf("exit = %+v, want %+v", got, c.want)
			}
			if err := client.wait(); err != nil {
				t.Error(err)
			}
			if strings.Contains(c.script, "last words") && !strings.HasSuffix(traced.output("stdout"), "last words\n") {
				t.Errorf("it said %q", traced.output("stdout"))
			}
			if state := stateOf(t, traced.InitPID); state != "Z" {
				t.Errorf("init's state is %q: it was not traced", state)
			}
			if err := KillAndDestroy(e.ctx, traced.ID, traced.Dir, traced.group()); err != nil {
				t.Error(err)
			}
		})
	}
}

// stateOf returns field 3 of a process's stat.
func stateOf(t *testing.T, pid int) string {
	t.Helper()
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))[0]
}

// A monitor that cannot learn how its init ended sleeps until the tracer detaches. Then it has the
// exit code.
func TestTracedInitWithoutStatus(t *testing.T) {
	e := newEnv(t)
	traced := e.run("traced", "echo ready; read x; exit 7", sharePIDNamespace)
	client := traced.attach()
	e.until("it is ready", func() bool { return strings.Contains(traced.output("stdout"), "ready") })
	stat := "/proc/" + strconv.Itoa(traced.InitPID) + "/stat"
	if err := unix.Mount(os.DevNull, stat, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	letGo := seize(t, traced.InitPID)
	client.send("go\n")
	// The tests must not wait for it: that would be their tracing thread's wait.
	e.until("init has ended", func() bool {
		status, err := os.ReadFile("/proc/" + strconv.Itoa(traced.InitPID) + "/status")
		return err == nil && strings.Contains(string(status), "State:\tZ")
	})
	e.until("the monitor sleeps", func() bool { return sleeps(t, traced.MonitorPID) })
	if done, err := pidfd.Exited(traced.Shim); done || err != nil {
		t.Errorf("the monitor has ended: %t, %v", done, err)
	}
	if err := unix.Unmount(stat, unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	letGo()
	if got := traced.wait(); got.Code != 7 {
		t.Errorf("exit = %+v, want code 7", got)
	}
	if err := client.wait(); err != nil {
		t.Error(err)
	}
}

// A monitor that has no descriptor for a connection does not try to accept it all the time, and
// accepts it when it has one.
func TestConnectionWithoutDescriptor(t *testing.T) {
	e := newEnv(t)
	c := e.run("full", "exec sleep 1000")
	if err := OpenMonitor(c.Dir).CloseStdin(e.ctx); err != nil { // it is at work now
		t.Fatal(err)
	}
	var old unix.Rlimit
	if err := unix.Prlimit(c.MonitorPID, unix.RLIMIT_NOFILE, nil, &old); err != nil {
		t.Fatal(err)
	}
	if err := unix.Prlimit(c.MonitorPID, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 1, Max: old.Max}, nil); err != nil {
		t.Fatal(err)
	}
	asked := make(chan error, 1)
	go func() { asked <- OpenMonitor(c.Dir).CloseStdin(e.ctx) }()
	e.until("the monitor sleeps", func() bool { return sleeps(t, c.MonitorPID) })
	if err := unix.Prlimit(c.MonitorPID, unix.RLIMIT_NOFILE, &old, nil); err != nil {
		t.Fatal(err)
	}
	if err := <-asked; err != nil {
		t.Error(err)
	}
}

// sleeps returns whether a process sleeps at each of many checks. One that polls without waiting
// does not.
func sleeps(t *testing.T, pid int) bool {
	t.Helper()
	for range 20 {
		time.Sleep(time.Millisecond)
		if stateOf(t, pid) != "S" {
			return false
		}
	}
	return true
}
