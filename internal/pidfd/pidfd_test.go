package pidfd

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

func start(t *testing.T, name string, args ...string) (*exec.Cmd, *os.File) {
	t.Helper()
	cmd := exec.Command(name, args...)
	testutil.Must(t, cmd.Start())
	f, err := Open(cmd.Process.Pid)
	testutil.Must(t, err)
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait(); f.Close() })
	return cmd, f
}

func TestWaitReapsChild(t *testing.T) {
	cmd, f := start(t, "sleep", "1000")
	if done, err := Exited(f); done || err != nil {
		t.Fatalf("Exited of a running process = %v, %v", done, err)
	}
	testutil.Must(t, Signal(f, unix.SIGKILL))
	testutil.Must(t, Wait(context.Background(), f))
	if _, err := Open(cmd.Process.Pid); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("Open after Wait = %v, want ErrProcessDone: the child was not reaped", err)
	}
	if err := Signal(f, unix.SIGTERM); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("Signal after Wait = %v, want ErrProcessDone", err)
	}
	if err := Wait(context.Background(), f); err != nil {
		t.Errorf("second Wait = %v", err)
	}
}

func TestWaitForProcessOfAnotherParent(t *testing.T) {
	cmd := exec.Command("sh", "-c", "sleep 1000 & echo $!; wait")
	out, err := cmd.StdoutPipe()
	testutil.Must(t, err)
	testutil.Must(t, cmd.Start())
	defer cmd.Wait()
	pid := readPID(t, out)
	f, err := Open(pid)
	testutil.Must(t, err)
	defer f.Close()
	testutil.Must(t, Signal(f, unix.SIGKILL))
	testutil.Must(t, Wait(context.Background(), f))
}

func TestCancelledWaitLeavesOthersWaiting(t *testing.T) {
	_, f := start(t, "sleep", "1000")
	var wg sync.WaitGroup
	errs := make([]error, 8)
	for i := range errs {
		wg.Go(func() { errs[i] = Wait(context.Background(), f) })
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	if err := Wait(ctx, f); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Wait = %v, want deadline exceeded", err)
	}
	testutil.Must(t, Signal(f, unix.SIGKILL))
	wg.Wait()
	for i, err := range errs {
		if err != nil {
			t.Errorf("Wait %d = %v", i, err)
		}
	}
}

func TestOpenVerifiedRefusesOtherStartTime(t *testing.T) {
	cmd, _ := start(t, "sleep", "1000")
	ticks, err := StartTime(cmd.Process.Pid)
	testutil.Must(t, err)
	f, err := OpenVerified(cmd.Process.Pid, ticks)
	testutil.Must(t, err)
	f.Close()
	if _, err := OpenVerified(cmd.Process.Pid, ticks+1); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("OpenVerified with another start time = %v, want ErrProcessDone", err)
	}
}

func TestCallsOnGoneProcessReturnProcessDone(t *testing.T) {
	cmd := exec.Command("true")
	testutil.Must(t, cmd.Run())
	if _, err := Open(cmd.Process.Pid); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("Open = %v, want ErrProcessDone", err)
	}
	if _, err := StartTime(cmd.Process.Pid); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("StartTime = %v, want ErrProcessDone", err)
	}
}

func TestParseStartTime(t *testing.T) {
	tail := " S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4242 20 21"
	for _, tt := range []struct {
		stat string
		want uint64
		ok   bool
	}{
		{"7 (sh)" + tail, 4242, true},
		{"7 (a) b) (c)" + tail, 4242, true},
		{"7 (new\nline)" + tail, 4242, true},
		{"7 (sh) S 1 2", 0, false},
		{"", 0, false},
	} {
		got, err := parseStartTime([]byte(tt.stat))
		if got != tt.want || (err == nil) != tt.ok {
			t.Errorf("parseStartTime(%q) = %d, %v", tt.stat, got, err)
		}
	}
}

func TestParseExecuted(t *testing.T) {
	for _, tt := range []struct {
		name, stat         string
		executed, runnable bool
		ok                 bool
	}{
		{"executed", "7 (sh) S 1 2 3 4 5 4194560 7", true, false, true},
		{"forked only", "7 (a) b) R 1 2 3 4 5 4194368 7", false, true, true},
		{"in the kernel", "7 (sh) D 1 2 3 4 5 64", false, true, true},
		{"short", "7 (sh) S 1 2", false, false, false},
		{"no number", "7 (sh) S 1 2 3 4 5 x 7", false, false, false},
		{"empty", "", false, false, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			executed, runnable, err := parseExecuted([]byte(tt.stat))
			if executed != tt.executed || runnable != tt.runnable || (err == nil) != tt.ok {
				t.Errorf("parseExecuted(%q) = %v, %v, %v", tt.stat, executed, runnable, err)
			}
		})
	}
}

func TestExecuted(t *testing.T) {
	if executed, _, err := Executed(os.Getpid()); !executed || err != nil {
		t.Errorf("this program: %v, %v", executed, err)
	}
	// The shell forks a background job, and its read keeps it from executing a program.
	cmd := exec.Command("/bin/sh", "-c", "exec 3<&0; { read x <&3; } & echo $!; wait")
	in, err := cmd.StdinPipe()
	testutil.Must(t, err)
	out, err := cmd.StdoutPipe()
	testutil.Must(t, err)
	testutil.Must(t, cmd.Start())
	pid := readPID(t, out)
	if executed, _, err := Executed(pid); executed || err != nil {
		t.Errorf("a forked process: %v, %v", executed, err)
	}
	if err := errors.Join(in.Close(), cmd.Wait()); err != nil {
		t.Error(err)
	}
	if _, _, err := Executed(cmd.Process.Pid); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("a gone process: %v", err)
	}
}

func TestExiting(t *testing.T) {
	if exiting, err := Exiting(os.Getpid()); exiting || err != nil {
		t.Errorf("this program: %v, %v", exiting, err)
	}
	cmd := exec.Command("true")
	testutil.Must(t, cmd.Start())
	var info unix.Siginfo
	testutil.Must(t, unix.Waitid(unix.P_PID, cmd.Process.Pid, &info, unix.WEXITED|unix.WNOWAIT, nil))
	if exiting, err := Exiting(cmd.Process.Pid); !exiting || err != nil {
		t.Errorf("a zombie: %v, %v", exiting, err)
	}
	testutil.Must(t, cmd.Wait())
	if _, err := Exiting(cmd.Process.Pid); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("a gone process: %v", err)
	}
}

func TestStopped(t *testing.T) {
	cmd, f := start(t, "sleep", "1000")
	is := func(want bool) {
		t.Helper()
		for { // a signal takes a moment to arrive
			if got, err := Stopped(f); got == want || err != nil || t.Context().Err() != nil {
				if err != nil {
					t.Error(err)
				}
				return
			}
		}
	}
	is(false)
	for _, step := range []struct {
		signal  unix.Signal
		stopped bool
	}{{unix.SIGSTOP, true}, {unix.SIGCONT, false}, {unix.SIGSTOP, true}, {unix.SIGKILL, false}} {
		testutil.Must(t, Signal(f, step.signal))
		is(step.stopped)
	}
	if err := Wait(t.Context(), f); err != nil {
		t.Error(err)
	}
	if got, err := Stopped(f); got || err != nil {
		t.Errorf("%d, which was reaped: %t, %v", cmd.Process.Pid, got, err)
	}
}

func readPID(t *testing.T, r interface{ Read([]byte) (int, error) }) int {
	t.Helper()
	buf := make([]byte, 32)
	n, err := r.Read(buf)
	testutil.Must(t, err)
	pid := 0
	for _, c := range buf[:n] {
		if c >= '0' && c <= '9' {
			pid = pid*10 + int(c-'0')
		}
	}
	return pid
}

func TestClosedFileReturnsErrClosed(t *testing.T) {
	f, err := Open(os.Getpid())
	testutil.Must(t, err)
	testutil.Must(t, f.Close())
	if _, err := Exited(f); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Exited: %v", err)
	}
	if err := Signal(f, 0); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Signal: %v", err)
	}
	if err := Wait(t.Context(), f); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Wait: %v", err)
	}
}

// Wait must work without a free descriptor, because an unreaped child would stay a zombie.
func TestWaitWithoutDescriptors(t *testing.T) {
	cmd, f := start(t, "sleep", "1000")
	var limit unix.Rlimit
	testutil.Must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	none := limit
	none.Cur = 3
	testutil.Must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &none))
	t.Cleanup(func() { _ = unix.Setrlimit(unix.RLIMIT_NOFILE, &limit) })
	if _, err := dup(f); !errors.Is(err, unix.EMFILE) {
		t.Fatalf("a descriptor is left: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*pollPause)
	defer cancel()
	if err := Wait(ctx, f); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Wait for one that runs = %v", err)
	}
	testutil.Must(t, Signal(f, unix.SIGKILL))
	testutil.Must(t, Wait(t.Context(), f))
	testutil.Must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	if _, err := Open(cmd.Process.Pid); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("Open after Wait = %v: the child was not reaped", err)
	}
}

// A thread may have the ID of a process that has exited.
func TestOpenRefusesThread(t *testing.T) {
	ids, end := make(chan int), make(chan struct{})
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if id := unix.Gettid(); id != os.Getpid() {
			ids <- id
		} else { // the first thread stays with this goroutine, so the next goroutine gets another one
			go func() { runtime.LockOSThread(); ids <- unix.Gettid(); <-end }()
		}
		<-end
	}()
	defer close(end)
	thread := <-ids
	if f, err := Open(thread); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("Open = %v, %v", f, err)
	}
	if f, err := OpenVerified(thread, 1); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("OpenVerified = %v, %v", f, err)
	}
}

func TestGetFile(t *testing.T) {
	r, w, err := os.Pipe()
	testutil.Must(t, err)
	defer r.Close()
	cmd := exec.Command("sleep", "1000")
	cmd.ExtraFiles = []*os.File{w}
	testutil.Must(t, cmd.Start())
	f, err := Open(cmd.Process.Pid)
	testutil.Must(t, err)
	defer f.Close()
	testutil.Must(t, w.Close())
	got, err := GetFile(f, 3, "pipe")
	testutil.Must(t, err)
	_, err = got.WriteString("x")
	testutil.Must(t, errors.Join(err, got.Close()))
	if n, err := r.Read(make([]byte, 2)); n != 1 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	if _, err := GetFile(f, 99, "nothing"); !errors.Is(err, unix.EBADF) {
		t.Errorf("missing descriptor: %v", err)
	}
	testutil.Must(t, cmd.Process.Kill())
	_ = cmd.Wait() // killed
	if _, err := GetFile(f, 3, "pipe"); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("dead process: %v", err)
	}
}

func TestKeepsStatus(t *testing.T) {
	for release, want := range map[string]bool{
		"6.15.0":               true,
		"6.15-rc1":             true,
		"6.18.44-fc":           true,
		"7.2.1+deb14-amd64":    true,
		"10.0":                 true,
		"6.14.9":               false,
		"6.1.0-37-cloud-amd64": false,
		"5.20.1":               false,
		"":                     false,
		"gVisor":               false,
	} {
		if got := keepsStatus(release); got != want {
			t.Errorf("%q: %v", release, got)
		}
	}
}
