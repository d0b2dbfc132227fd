package pidfd

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

// traceEnv makes the test binary a tracer of the process whose ID it contains.
const traceEnv = "BERTH_TEST_TRACE"

func TestMain(m *testing.M) {
	if pid, err := strconv.Atoi(os.Getenv(traceEnv)); err == nil {
		os.Exit(trace(pid))
	}
	os.Exit(m.Run())
}

// trace attaches to a process, prints a line, and waits for the end of its standard input.
func trace(pid int) int {
	runtime.LockOSThread()
	if err := unix.PtraceSeize(pid); err != nil {
		return 1
	}
	_, err := os.Stdout.WriteString("x")
	_, readErr := io.ReadAll(os.Stdin)
	if err != nil || readErr != nil {
		return 1
	}
	return 0
}

func TestWaitReapsTracedChildAfterTracer(t *testing.T) {
	cmd, f := start(t, "sleep", "1000")
	tracer := exec.Command("/proc/self/exe")
	tracer.Env = append(os.Environ(), traceEnv+"="+strconv.Itoa(cmd.Process.Pid))
	stdin, err := tracer.StdinPipe()
	testutil.Must(t, err)
	stdout, err := tracer.StdoutPipe()
	testutil.Must(t, err)
	testutil.Must(t, tracer.Start())
	if _, err := io.ReadFull(stdout, make([]byte, 1)); err != nil {
		t.Fatalf("the tracer did not attach: %v", err)
	}
	testutil.Must(t, Signal(f, unix.SIGKILL))
	for {
		done, err := Exited(f)
		testutil.Must(t, err)
		if done {
			break
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*tracedPause)
	defer cancel()
	if err := Wait(ctx, f); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Wait while the child is traced: %v", err)
	}
	testutil.Must(t, stdin.Close())
	if err := Wait(t.Context(), f); err != nil {
		t.Error(err)
	}
	if _, err := Open(cmd.Process.Pid); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("the child was not reaped: %v", err)
	}
	if err := tracer.Wait(); err != nil {
		t.Error(err)
	}
}
