package runtime

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/pidfd"
	"berth/internal/testutil"
	"berth/sandbox/state"
	"berth/shim"
	"berth/shim/proto"
)

func testStopper(t *testing.T) *Stopper {
	t.Helper()
	return NewStopper(testProcesses(t))
}

// contained returns a container with these processes and no cgroup.
func contained(run *Running) StopTarget {
	return StopTarget{ID: "c", CgroupsPath: fmt.Sprintf("/berth-unit-test-no-such-group-%d", os.Getpid()), Running: func() *Running { return run }}
}

// command runs a shell command as the init of a container, and publishes its exit. The command must
// print its process ID first. status returns its exit code like a shell. The parent of the command
// is a separate shell, because polling a pidfd reaps children.
func command(t *testing.T, script string) (run *Running, status func() string) {
	t.Helper()
	cmd := exec.Command("sh", "-c", `sh -c "$1" & wait $!; echo $?`, "sh", script)
	out, err := cmd.StdoutPipe()
	testutil.Must(t, err)
	testutil.Must(t, cmd.Start())
	var pid int
	if _, err := fmt.Fscanln(out, &pid); err != nil {
		t.Fatal(err)
	}
	init, err := pidfd.Open(pid)
	testutil.Must(t, err)
	run = Launched(&proto.Started{Init: init, PIDs: proto.PIDs{InitPID: pid, StartedAt: time.Now()}})
	var ended string
	go func() {
		defer close(run.Exited)
		if _, err := fmt.Fscanln(out, &ended); err != nil {
			t.Error(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	}()
	t.Cleanup(func() {
		_ = pidfd.Signal(init, unix.SIGKILL) // no error is expected only if the test failed
		<-run.Exited
		if err := run.Close(); err != nil {
			t.Error(err)
		}
	})
	return run, func() string { <-run.Exited; return ended }
}

// Stop sends the stop signal unless the timeout is zero, and kills the container after the timeout.
func TestStop(t *testing.T) {
	const willing, unwilling = `echo $$; exec sleep 1000`, `trap "" TERM; echo $$; exec sleep 1000`
	for name, test := range map[string]struct {
		script  string
		timeout time.Duration
		status  string // TERM is 15, KILL 9
	}{
		"init obeys TERM":   {willing, time.Minute, "143"},
		"init ignores TERM": {unwilling, 100 * time.Millisecond, "137"},
		"zero timeout":      {willing, 0, "137"},
	} {
		run, status := command(t, test.script)
		if err := testStopper(t).Stop(t.Context(), contained(run), run, unix.SIGTERM, test.timeout); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if got := status(); got != test.status {
			t.Errorf("%s: exit %s, want %s", name, got, test.status)
		}
	}
}

// A repeated Stop sends no second signal, even if the next daemon repeats it.
func TestStopSignalsOnce(t *testing.T) {
	for name, next := range map[string]func(*testing.T, Processes, *Running){
		"same daemon": func(*testing.T, Processes, *Running) {},
		"next daemon": func(_ *testing.T, k Processes, run *Running) {
			run.signalled.Store(shim.Signalled(k.Node.Shim("c")))
		},
	} {
		t.Run(name, func(t *testing.T) {
			k, terms := testStopper(t), filepath.Join(t.TempDir(), "terms")
			testutil.Must(t, os.MkdirAll(k.processes.Node.Shim("c"), 0o700))
			run, status := command(t, `trap "echo term >> `+terms+`" TERM; echo $$; while :; do sleep 0.01; done`)
			ctx, cancel := context.WithCancel(t.Context())
			stopped := make(chan error, 1)
			go func() { stopped <- k.Stop(ctx, contained(run), run, unix.SIGTERM, time.Hour) }()
			for _, err := os.Stat(terms); err != nil; _, err = os.Stat(terms) {
				time.Sleep(time.Millisecond)
			}
			cancel()
			if err := <-stopped; !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
			next(t, k.processes, run)
			testutil.Must(t, k.Stop(t.Context(), contained(run), run, unix.SIGTERM, 100*time.Millisecond))
			if got := status(); got != "137" {
				t.Errorf("exit %s", got)
			}
			if got, err := os.ReadFile(terms); err != nil || string(got) != "term\n" {
				t.Errorf("signals: %q, %v", got, err)
			}
		})
	}
}

// Kill checks the container repeatedly, because another goroutine may publish the exit.
func TestKillChecksAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var checks atomic.Int64
		c := contained(Launched(&proto.Started{}))
		run := c.Running
		c.Running = func() *Running {
			if checks.Add(1) > 3 {
				return nil
			}
			return run()
		}
		if err := testStopper(t).Kill(t.Context(), c); err != nil || checks.Load() != 4 {
			t.Errorf("after %d checks: %v", checks.Load(), err)
		}
	})
}

// Kill of a container that survives SIGKILL returns an error.
func TestKillReturnsAfterDeadline(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := testStopper(t).Kill(ctx, contained(Launched(&proto.Started{PIDs: proto.PIDs{InitPID: 77}})))
	if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "process 77 does not exit") {
		t.Error(err)
	}
}

// Kill kills a shim that hangs after its container's exit.
func TestKillEndsHangingShim(t *testing.T) {
	left, status := command(t, `echo $$; exec sleep 1000`) // stands for a shim
	synctest.Test(t, func(t *testing.T) {
		run := Launched(&proto.Started{Shim: left.Init})
		ctx, cancel := context.WithTimeout(t.Context(), 2*MonitorTimeout)
		defer cancel()
		if err := testStopper(t).Kill(ctx, contained(run)); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
	})
	if got := status(); got != "137" {
		t.Errorf("exit %s", got)
	}
}

// Settle returns the exit in the shim's record. Without a record the exit reason is ShimLost.
func TestSettle(t *testing.T) {
	k, started := testStopper(t), time.Unix(100, 0)
	exit, settled := k.Settle(contained(nil), started)
	if !settled || exit.Reason != state.ReasonShimLost || exit.FinishedAt.IsZero() || !exit.StartedAt.Equal(started) {
		t.Errorf("without an exit record: %+v, %v", exit, settled)
	}
	dir := k.processes.Node.Shim("c")
	testutil.Must(t, os.MkdirAll(dir, 0o700))
	written := proto.Exit{Code: 7, At: time.Unix(200, 0)}
	testutil.Must(t, os.WriteFile(filepath.Join(dir, proto.ExitFile), written.Encode(), 0o600))
	exit, settled = k.Settle(contained(nil), started)
	if !settled || exit.Code != 7 || !exit.FinishedAt.Equal(time.Unix(200, 0)) || !exit.StartedAt.Equal(started) {
		t.Errorf("with an exit record: %+v, %v", exit, settled)
	}
}

// Surviving processes of a lost shim are killed repeatedly. The exit is not published before they
// exit, and not during a shutdown.
func TestSettleWaitsForSurvivingProcesses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k, c := testStopper(t), contained(nil)
		c.CgroupsPath = "no path of a cgroup" // each kill fails
		settled := make(chan bool, 1)
		go func() { _, s := k.Settle(c, time.Time{}); settled <- s }()
		time.Sleep(time.Hour)
		synctest.Wait()
		select {
		case <-settled:
			t.Fatal("settled before the processes exited")
		default:
		}
		k.processes.Tasks.Watchers.Cancel()
		if <-settled {
			t.Error("settled during the shutdown")
		}
	})
}
