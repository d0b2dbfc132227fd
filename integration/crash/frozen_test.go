package crash

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
	"berth/internal/testutil"
	"berth/sandbox/state"
)

// TestFrozenLauncher stops a launcher during a launch. Other pods and calls are not affected, and
// the pod can be stopped.
func TestFrozenLauncher(t *testing.T) {
	var fp harness.Failpoints
	d := harness.StartDaemon(t, harness.WithFailpoints(&fp))
	pod, other := d.RunPod(t), d.RunPod(t, harness.HostNetwork)
	c, launcher, started := startFrozen(t, &fp, pod)
	harness.Equal(t, "state", c.Status(t).State, runtimeapi.ContainerState_CONTAINER_CREATED)
	harness.Equal(t, "output of a container of another pod", other.Sh(t, "echo fine"), "fine\n")
	pod.Stop(t)
	harness.Must(t, syscall.Kill(launcher, syscall.SIGCONT))
	harness.Must(t, expect(<-started, codes.FailedPrecondition))
	harness.Equal(t, "state after the stop", c.WaitExited(t).State, runtimeapi.ContainerState_CONTAINER_EXITED)
	d.StateMatches(t)
}

// TestStopEndsFrozenLauncher stops launchers and never continues them. A stop of the container or
// of its pod kills the launcher.
func TestStopEndsFrozenLauncher(t *testing.T) {
	testutil.Long(t)
	var fp harness.Failpoints
	d := harness.StartDaemon(t, harness.WithFailpoints(&fp))
	inPod, _, podStopped := startFrozen(t, &fp, d.RunPod(t))
	alone, _, containerStopped := startFrozen(t, &fp, d.RunPod(t, harness.HostNetwork))
	inPod.Pod.Stop(t)
	harness.Must(t, d.Cri.StopContainer(t.Context(), alone.Id, 1))
	for _, started := range []<-chan error{podStopped, containerStopped} {
		harness.Must(t, expect(<-started, codes.FailedPrecondition))
	}
	for _, c := range []*harness.Container{inPod, alone} {
		harness.Equal(t, "reason", c.WaitExited(t).Reason, state.ReasonStartError)
	}
	harness.Equal(t, "output of the next container", alone.Pod.Sh(t, "echo fine"), "fine\n")
	d.StateMatches(t)
}

// startFrozen starts a container whose launcher stops at a failpoint.
func startFrozen(t *testing.T, fp *harness.Failpoints, pod *harness.Pod) (c *harness.Container, launcher int, started <-chan error) {
	t.Helper()
	c = pod.Create(t)
	fp.FreezeNext(t, harness.LauncherProgram, "launcher.executed", 1)
	ended := harness.Go(func() error { return pod.D.Cri.StartContainer(t.Context(), c.Id) })
	if !fp.WaitReached(deathPatience) {
		t.Fatal("the launcher did not reach its failpoint")
	}
	return c, harness.LauncherOf(t, pod.D, c), ended
}

// TestFrozenExec stops the launcher of an exec with a timeout. The exec returns in time. Its
// processes end when the daemon replaces the launcher.
func TestFrozenExec(t *testing.T) {
	testutil.Long(t)
	var fp harness.Failpoints
	d := harness.StartDaemon(t, harness.WithFailpoints(&fp))
	c := d.RunPod(t, harness.HostNetwork).Run(t)
	fp.FreezeNext(t, harness.LauncherProgram, "launcher.exec-announced", 1)
	_, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"sh", "-c", "sleep 100003 & sleep 100004"}, 10*time.Second) // the launcher reaches its point within the timeout
	harness.Must(t, expectTimeout(err))
	if !fp.WaitReached(deathPatience) {
		t.Fatal("the launcher did not reach its failpoint")
	}
	harness.Eventually(t, "the exec's processes end", func() error {
		for _, line := range []string{"sleep 100003", "sleep 100004"} {
			if pids := machine.ProcessesOf(line); len(pids) > 0 {
				return fmt.Errorf("%s runs: %v", line, pids)
			}
		}
		return nil
	})
	harness.Equal(t, "another exec", c.Exec(t, "echo", "fine"), "fine")
}

// TestStartIsRefusedWhileKilledStartRuns kills the daemon during a start, and keeps a process of
// that start running. The next daemon reports the container as created and refuses to start it
// until the process has exited.
func TestStartIsRefusedWhileKilledStartRuns(t *testing.T) {
	var fp harness.Failpoints
	d := harness.StartDaemon(t, harness.WithFailpoints(&fp))
	pod := d.RunPod(t, harness.HostNetwork)
	c := pod.Create(t)
	fp.Kill(t, d, "launch.recorded", 1)
	if err := d.Cri.StartContainer(t.Context(), c.Id); err == nil || !d.WaitKilled(t, deathPatience) {
		t.Fatalf("the daemon was not killed: %v", err)
	}
	busy := filepath.Join(d.State, "c", c.Id, "busy")
	harness.Must(t, os.Mkdir(busy, 0o700))
	harness.Must(t, unix.Mount("none", busy, "tmpfs", 0, ""))
	d.Start(t)
	harness.Equal(t, "state", c.Status(t).State, runtimeapi.ContainerState_CONTAINER_CREATED)
	harness.Must(t, expect(d.Cri.StartContainer(t.Context(), c.Id), codes.Unavailable))
	harness.Must(t, unix.Unmount(busy, 0))
	harness.Eventually(t, "it is started", func() error { return d.Cri.StartContainer(t.Context(), c.Id) })
	harness.Equal(t, "output of an exec", c.Exec(t, "echo", "fine"), "fine")
	d.StateMatches(t)
}

const pointLimit = time.Minute // a slow machine needs a while to reach a point

// startUntil starts a container whose launcher stops at a failpoint. The channel returns the
// start's error.
func startUntil(t *testing.T, fp *harness.Failpoints, c *harness.Container, point string) chan error {
	t.Helper()
	fp.FreezeNext(t, harness.LauncherProgram, point, 1)
	started := make(chan error, 1)
	cri := c.Pod.D.Cri
	go func() { started <- cri.StartContainer(context.WithoutCancel(t.Context()), c.Id) }()
	if !fp.WaitReached(pointLimit) {
		t.Fatal("the launcher did not reach its failpoint")
	}
	return started
}

// A start that is cancelled by a stop of the pod logs no warning.
func TestStoppedStartLogsNoError(t *testing.T) {
	testutil.Long(t)
	var fp harness.Failpoints
	d := harness.StartDaemon(t, harness.WithFailpoints(&fp))
	pod := d.RunPod(t, harness.HostNetwork)
	c := pod.Create(t)
	started := startUntil(t, &fp, c, "launcher.open-log")
	pod.Stop(t)
	harness.WantCode(t, <-started, codes.FailedPrecondition, "stopped")
	harness.Equal(t, "state", c.WaitExited(t).State, runtimeapi.ContainerState_CONTAINER_EXITED)
	pod.Remove(t)
	d.QuietLog(t)
}

// If the daemon dies during a start, the next daemon undoes the start without an error in the log.
// The launcher, which has lost its client, logs no error either.
func TestUndoneStartLogsNoError(t *testing.T) {
	var fp harness.Failpoints
	d := harness.StartDaemon(t, harness.WithFailpoints(&fp))
	pod := d.RunPod(t, harness.HostNetwork)
	c := pod.Create(t)
	started := startUntil(t, &fp, c, "launcher.open-log")
	launcher := stoppedLauncher(t)
	d.Kill(t)
	<-started
	harness.Must(t, syscall.Kill(launcher, syscall.SIGCONT))
	harness.Eventually(t, "the launcher ends", func() error {
		if machine.Alive(launcher) {
			return fmt.Errorf("process %d lives", launcher)
		}
		return nil
	})
	d.Start(t)
	harness.Equal(t, "state", c.Status(t).State, runtimeapi.ContainerState_CONTAINER_CREATED)
	c.Start(t)
	pod.Remove(t)
	d.QuietLog(t)
}

// stoppedLauncher returns the launcher that a failpoint has stopped.
func stoppedLauncher(t *testing.T) (found int) {
	t.Helper()
	harness.Eventually(t, "a launcher is stopped", func() error {
		for _, pid := range machine.Processes() {
			stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
			if _, state, ok := strings.Cut(string(stat), "(berth-shim) "); ok && strings.HasPrefix(state, "T") {
				found = pid
				return nil
			}
		}
		return fmt.Errorf("no launcher is stopped")
	})
	return found
}
