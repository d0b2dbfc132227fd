package crash

import (
	"context"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
	"berth/internal/testutil"
)

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
