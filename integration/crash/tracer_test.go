package crash

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"berth/integration/harness"
	"berth/integration/machine"
	"berth/internal/testutil"
)

// TestLauncherKilledAtSystemCalls kills the launcher after each system call that changes something.
// This covers the gaps between libcontainer's steps, which have no failpoints.
func TestLauncherKilledAtSystemCalls(t *testing.T) {
	if testing.Short() {
		t.Skip("runs for minutes")
	}
	for _, op := range slices.Concat(shimOperations, shimRestores) {
		if !op.launches || op.more && !everything {
			continue
		}
		t.Run(op.name, func(t *testing.T) {
			e := &shimEnumeration{enumeration: enumeration{op: op.operation}, shimOperation: op}
			e.runTraced(t)
			t.Log(e.summary("launcher killed after each system call, of"))
		})
	}
}

// fewCalls is the number of an operation's cases in contrib/test -all, fewestCalls that in
// contrib/test.
const fewCalls, fewestCalls = 8, 2

func (e *shimEnumeration) runTraced(t *testing.T) {
	e.start(t)
	effects := e.effects(t)
	e.uncrashed(t)
	e.uncrashed(t)
	e.points = len(effects)
	stride := 1
	if !everything {
		stride = max(1, len(effects)/calls())
	}
	for i := stride / 2; i < len(effects); i += stride {
		e.cases++
		call, _, _ := strings.Cut(effects[i], " ")
		if !t.Run(fmt.Sprintf("%d-%s", i+1, call), func(t *testing.T) { e.crash(t, e.atCall(i+1), false, e.after) }) {
			e.failed++
			t.Logf("killed after system call %d, in the first run: %s", i+1, effects[i])
			e.startOver(t)
		}
	}
	e.mostReached(t)
}

func calls() int {
	if testutil.AllTests() {
		return fewCalls
	}
	return fewestCalls
}

// effects runs the operation without a crash, and returns the system calls of its launcher.
func (e *shimEnumeration) effects(t *testing.T) []string {
	t.Helper()
	w := &world{d: e.d}
	e.op.prepare(t, w)
	e.d.WaitIdle(t)
	tr := traceLaunchers(t, e.d, 0)
	err := e.op.request(t, w)
	effects := tr.stop()
	harness.Must(t, err)
	if len(effects) == 0 {
		t.Fatal("no system calls of launchers were traced")
	}
	w.clean(t)
	e.d.Settled(t)
	return effects
}

func (e *shimEnumeration) atCall(n int) killing {
	var tr *tracer
	return killing{
		program: harness.LauncherProgram,
		arm:     func(t *testing.T) { tr = traceLaunchers(t, e.d, n) },
		reached: func() bool { return tr.kill(deathPatience) },
		disarm:  func() { tr.stop() },
		mayMiss: true, // the tracer also watches the next idle launcher during the operation
	}
}

// tracer traces launchers (ptrace(2)) and stops at each system call with an effect outside the
// launcher. These include libcontainer's calls, which have no failpoints. It does not trace the
// launchers' children.
type tracer struct {
	at int // the thread is stopped after this effect (counted from 1), to be killed; 0: never

	ready   chan error
	reached chan int      // gets the ID of the stopped thread, whose tracing ends soon after
	end     chan struct{} // closed by stop
	ended   sync.WaitGroup
	effects []string // valid after ended
}

// traceLaunchers starts to trace the daemon's idle launchers.
func traceLaunchers(t *testing.T, d *harness.Daemon, at int) *tracer {
	t.Helper()
	tr := &tracer{at: at, ready: make(chan error), reached: make(chan int, 1), end: make(chan struct{})}
	var pids []int
	for _, pid := range machine.ChildrenOf(d.Cmd.Process.Pid) {
		if strings.HasPrefix(machine.CommandLine(pid), "berth-shim launcher") {
			pids = append(pids, pid)
		}
	}
	tr.ended.Go(func() {
		onItsOwnThread(func() {
			err := tr.attach(pids)
			tr.ready <- err
			if err == nil {
				tr.follow()
			}
		})
	})
	harness.Must(t, <-tr.ready)
	return tr
}

// onItsOwnThread runs a tracer on a new thread, which then exits. The kernel detaches its tracees
// at the exit.
func onItsOwnThread(trace func()) {
	runtime.LockOSThread()
	if unix.Gettid() != unix.Getpid() {
		trace()
		return
	}
	// The main thread never exits. It stays locked, so that no other goroutine uses it.
	var other sync.WaitGroup
	other.Go(func() { onItsOwnThread(trace) })
	other.Wait()
	runtime.UnlockOSThread()
}

// stop detaches the launchers and returns their effects.
func (tr *tracer) stop() []string {
	close(tr.end)
	tr.ended.Wait()
	return tr.effects
}

// kill waits up to limit until the launcher is stopped, kills it, and reports whether the kill
// succeeded. It waits for the end of the tracing, because only a tracer could reap a traced
// process.
func (tr *tracer) kill(limit time.Duration) bool {
	select {
	case tid := <-tr.reached:
		return harness.WaitUpTo(limit, func() error {
			threads := fmt.Sprintf("/proc/%d/task", tid)
			for _, thread := range machine.ReadDir(threads) {
				if status := machine.ReadLines(threads + "/" + thread + "/status"); !slices.Contains(status, "TracerPid:\t0") {
					return errors.New("the launcher is still traced")
				}
			}
			return unix.Kill(tid, unix.SIGKILL) // any thread's ID works; the thread is stopped, so its ID is not reused
		}) == nil
	case <-time.After(limit):
		return false
	}
}

const traceOptions = unix.PTRACE_O_TRACESYSGOOD | unix.PTRACE_O_TRACECLONE | unix.PTRACE_O_TRACEEXEC

// attach seizes all threads of the processes.
func (tr *tracer) attach(pids []int) error {
	for _, pid := range pids {
		for _, name := range machine.ReadDir(fmt.Sprintf("/proc/%d/task", pid)) {
			tid, err := strconv.Atoi(name)
			if err != nil {
				return err
			}
			err = ptrace(unix.PTRACE_SEIZE, tid, 0, traceOptions)
			if errors.Is(err, unix.ESRCH) {
				continue // the thread has exited
			}
			if err != nil {
				return fmt.Errorf("trace thread %d of launcher %d: %w", tid, pid, err)
			}
			if err := unix.PtraceInterrupt(tid); err != nil {
				return fmt.Errorf("interrupt thread %d of launcher %d: %w", tid, pid, err)
			}
		}
	}
	return nil
}

func ptrace(request, pid int, address, data uintptr) error {
	_, _, errno := unix.RawSyscall6(unix.SYS_PTRACE, uintptr(request), uintptr(pid), address, data, 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// follow handles the events of the threads until stop is called or no thread is left.
func (tr *tracer) follow() {
	for {
		var status unix.WaitStatus
		tid, err := unix.Wait4(-1, &status, unix.WNOHANG|unix.WALL|unix.WNOTHREAD, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return
		case tid == 0:
			select {
			case <-tr.end:
				return
			case <-time.After(50 * time.Microsecond):
			}
		case status.Stopped() && tr.resume(tid, status):
			return
		}
	}
}

// resume handles a stopped thread and resumes it until its next system call, unless this call was
// the chosen one. Errors mean that the thread has exited.
func (tr *tracer) resume(tid int, status unix.WaitStatus) (reached bool) {
	signal := 0
	switch event := int(status) >> 16; {
	case event == unix.PTRACE_EVENT_EXEC: // the launcher has become a monitor
		_ = unix.PtraceDetach(tid)
		return false
	case event != 0: // a new thread, or the start of tracing
	case status.StopSignal() == unix.SIGTRAP|0x80:
		if tr.enter(tid) {
			_ = unix.Kill(tid, unix.SIGSTOP) // stops the thread after this system call
			tr.reached <- tid
			return true
		}
	default:
		signal = int(status.StopSignal())
	}
	_ = unix.PtraceSyscall(tid, signal)
	return false
}

// syscallInfo is struct ptrace_syscall_info at the entry of a system call.
type syscallInfo struct {
	op     uint8
	_      [3]uint8
	arch   uint32
	ip, sp uint64
	number uint64
	args   [6]uint64
}

// enter records the effect of the system call that the thread enters. It reports whether the call
// is the chosen one.
func (tr *tracer) enter(tid int) bool {
	const entry = 1 // PTRACE_SYSCALL_INFO_ENTRY
	var info syscallInfo
	if ptrace(unix.PTRACE_GET_SYSCALL_INFO, tid, unsafe.Sizeof(info), uintptr(unsafe.Pointer(&info))) != nil || info.op != entry {
		return false
	}
	effect := describeEffect(tid, &info)
	if effect == "" {
		return false
	}
	tr.effects = append(tr.effects, effect)
	return len(tr.effects) == tr.at
}

// effectOf lists the system calls with an effect outside the process. path is the index of the
// argument that is a path; -1: none.
var effectOf = map[uint64]struct {
	name string
	path int
}{
	unix.SYS_MKDIRAT: {"mkdirat", 1}, unix.SYS_MKNODAT: {"mknodat", 1}, unix.SYS_UNLINKAT: {"unlinkat", 1}, unix.SYS_SYMLINKAT: {"symlinkat", 2},
	unix.SYS_LINKAT: {"linkat", 3}, unix.SYS_RENAMEAT: {"renameat", 1}, unix.SYS_RENAMEAT2: {"renameat2", 1}, unix.SYS_OPENAT: {"openat", 1},
	unix.SYS_FCHOWNAT: {"fchownat", 1}, unix.SYS_FCHMODAT: {"fchmodat", 1}, unix.SYS_FTRUNCATE: {"ftruncate", -1},
	unix.SYS_MOUNT: {"mount", 1}, unix.SYS_UMOUNT2: {"umount2", 0}, unix.SYS_MOVE_MOUNT: {"move_mount", 3}, unix.SYS_FSMOUNT: {"fsmount", -1},
	unix.SYS_MOUNT_SETATTR: {"mount_setattr", 1}, unix.SYS_SETNS: {"setns", -1}, unix.SYS_UNSHARE: {"unshare", -1},
	unix.SYS_CLONE: {"clone", -1}, unix.SYS_CLONE3: {"clone3", -1}, unix.SYS_EXECVE: {"execve", 0},
	unix.SYS_BIND: {"bind", -1}, unix.SYS_SENDMSG: {"sendmsg", -1}, unix.SYS_WRITE: {"write", -1},
	unix.SYS_KILL: {"kill", -1}, unix.SYS_PIDFD_SEND_SIGNAL: {"pidfd_send_signal", -1},
}

// describeEffect returns the system call's name and object, or "" for a call without an effect
// outside the process.
func describeEffect(tid int, info *syscallInfo) string {
	call, known := effectOf[info.number]
	if !known {
		return ""
	}
	switch info.number {
	case unix.SYS_OPENAT:
		if info.args[2]&(unix.O_CREAT|unix.O_TRUNC) == 0 {
			return ""
		}
	case unix.SYS_CLONE:
		if info.args[0]&unix.CLONE_THREAD != 0 {
			return ""
		}
	case unix.SYS_WRITE: // writes to pipes and sockets show in other effects
		file, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", tid, info.args[0]))
		if err != nil || !strings.HasPrefix(file, "/") || strings.HasPrefix(file, "/proc/") || strings.HasPrefix(file, "/dev/") {
			return ""
		}
		return call.name + " " + file
	}
	if call.path < 0 {
		return call.name
	}
	return call.name + " " + stringAt(tid, info.args[call.path])
}

// stringAt reads a string from a process's memory.
func stringAt(tid int, address uint64) string {
	memory, err := os.Open(fmt.Sprintf("/proc/%d/mem", tid))
	if err != nil {
		return ""
	}
	defer memory.Close()
	buf := make([]byte, 256)
	n, _ := memory.ReadAt(buf, int64(address)) // the mapping may end before
	text, _, _ := bytes.Cut(buf[:n], []byte{0})
	return string(text)
}
