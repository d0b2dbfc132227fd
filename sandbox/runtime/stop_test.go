package runtime

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
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
	"berth/internal/task"
	"berth/internal/testutil"
	"berth/sandbox/state"
	"berth/shim/proto"
)

func testStopper(t *testing.T) *Stopper {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	return NewStopper(Processes{Dirs: state.Dirs{State: t.TempDir()}, Tasks: task.NewRunner(log, nil), Log: log})
}

// contained returns a container with these processes and without a cgroup.
func contained(run *Running) StopTarget {
	return StopTarget{ID: "c", CgroupsPath: fmt.Sprintf("/berth-unit-test-no-such-group-%d", os.Getpid()), Running: func() *Running { return run }}
}

// command runs a shell command as the init of a container; the command prints its process ID first.
// The exit is published when it ends. status returns its exit code like a shell. A separate shell
// is its parent, because polling a pidfd reaps children.
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
	run = Launched(&proto.Started{Init: init, Processes: proto.Processes{InitPID: pid, StartedAt: time.Now()}})
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
		_ = pidfd.Signal(init, unix.SIGKILL) // it has ended, or the test has failed
		<-run.Exited
		if err := run.Close(); err != nil {
			t.Error(err)
		}
	})
	return run, func() string { <-run.Exited; return ended }
}

// A container gets its stop signal first, if it has time, and is killed after the timeout.
func TestStop(t *testing.T) {
	const willing, unwilling = `echo $$; exec sleep 1000`, `trap "" TERM; echo $$; exec sleep 1000`
	for name, test := range map[string]struct {
		script  string
		timeout time.Duration
		status  string // TERM is 15, KILL 9
	}{
		"it does as it is told": {willing, time.Minute, "143"},
		"it does not":           {unwilling, 100 * time.Millisecond, "137"},
		"it has no time":        {willing, 0, "137"},
	} {
		run, status := command(t, test.script)
		if err := testStopper(t).Stop(t.Context(), contained(run), run, unix.SIGTERM, test.timeout); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if got := status(); got != test.status {
			t.Errorf("%s: it ended with %s, want %s", name, got, test.status)
		}
	}
}

// Kill repeats its look, because the exit may be published by another path.
func TestKillLooksAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var looks atomic.Int64
		c := contained(Launched(&proto.Started{}))
		run := c.Running
		c.Running = func() *Running {
			if looks.Add(1) > 3 {
				return nil
			}
			return run()
		}
		if err := testStopper(t).Kill(t.Context(), c); err != nil || looks.Load() != 4 {
			t.Errorf("after %d looks: %v", looks.Load(), err)
		}
	})
}

// Kill of a container that does not end returns an error.
func TestKillGivesUp(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := testStopper(t).Kill(ctx, contained(Launched(&proto.Started{Processes: proto.Processes{InitPID: 77}})))
	if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "its process 77 does not end") {
		t.Error(err)
	}
}

// A shim that hangs after its container's end is killed.
func TestKillOfAShimThatHangs(t *testing.T) {
	left, status := command(t, `echo $$; exec sleep 1000`) // a shim, to this test
	synctest.Test(t, func(t *testing.T) {
		run := Launched(&proto.Started{Shim: left.Init})
		ctx, cancel := context.WithTimeout(t.Context(), 2*ShimPatience)
		defer cancel()
		if err := testStopper(t).Kill(ctx, contained(run)); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
	})
	if got := status(); got != "137" {
		t.Errorf("it ended with %s", got)
	}
}

// The exit is the shim's record, or that the shim was lost, when nothing is left of its container.
func TestSettle(t *testing.T) {
	k, started := testStopper(t), time.Unix(100, 0)
	exit, settled := k.Settle(contained(nil), started)
	if !settled || exit.Reason != state.ReasonShimLost || exit.FinishedAt.IsZero() || !exit.StartedAt.Equal(started) {
		t.Errorf("without a record: %+v, %v", exit, settled)
	}
	dir := k.processes.Dirs.Shim("c")
	testutil.Must(t, os.MkdirAll(dir, 0o700))
	written := proto.Exit{Code: 7, At: time.Unix(200, 0)}
	testutil.Must(t, os.WriteFile(filepath.Join(dir, proto.ExitFile), written.Encode(), 0o600))
	exit, settled = k.Settle(contained(nil), started)
	if !settled || exit.Code != 7 || !exit.FinishedAt.Equal(time.Unix(200, 0)) || !exit.StartedAt.Equal(started) {
		t.Errorf("with one: %+v, %v", exit, settled)
	}
}

// Surviving processes of a lost shim are killed repeatedly. No exit is published before they end,
// nor when the daemon shuts down.
func TestWhatDoesNotEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k, c := testStopper(t), contained(nil)
		c.CgroupsPath = "no path of a cgroup" // which is an error each time
		settled := make(chan bool, 1)
		go func() { _, s := k.Settle(c, time.Time{}); settled <- s }()
		time.Sleep(time.Hour)
		synctest.Wait()
		select {
		case <-settled:
			t.Fatal("it is settled")
		default:
		}
		k.processes.Tasks.Watchers.Cancel()
		if <-settled {
			t.Error("it is settled when the daemon ends")
		}
	})
}
