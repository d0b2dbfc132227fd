package crash

import (
	"fmt"
	"syscall"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
)

// TestFrozenLauncher stops a launcher in the middle of a launch. Everybody else goes on, and the pod can be stopped.
func TestFrozenLauncher(t *testing.T) {
	var fp harness.Failpoints
	d := harness.StartDaemon(t, harness.WithFailpoints(&fp))
	pod, other := d.RunPod(t), d.RunPod(t, harness.HostNetwork)
	c := pod.Create(t)
	fp.FreezeNext(t, harness.LauncherProgram, "launcher.executed", 1)
	started := make(chan error, 1)
	go func() { started <- d.Cri.StartContainer(t.Context(), c.Id) }()
	if !fp.WaitReached(deathPatience) {
		t.Fatal("the launcher does not get to its point")
	}
	launcher := harness.LauncherOf(t, d, c)
	harness.Equal(t, "state", c.Status(t).State, runtimeapi.ContainerState_CONTAINER_CREATED)
	harness.Equal(t, "what a container of another pod prints", other.Sh(t, "echo fine"), "fine\n")
	pod.Stop(t)
	harness.Must(t, syscall.Kill(launcher, syscall.SIGCONT))
	if err := <-started; err == nil {
		t.Error("a container was started in a pod that had been stopped")
	}
	harness.Equal(t, "state in the end", c.WaitExited(t).State, runtimeapi.ContainerState_CONTAINER_EXITED)
	d.StateMatches(t)
}

// TestFrozenExec stops the launcher of an exec that has a limit of time. The exec ends in time, and what it has started does
// when the launcher is given up.
func TestFrozenExec(t *testing.T) {
	var fp harness.Failpoints
	d := harness.StartDaemon(t, harness.WithFailpoints(&fp))
	c := d.RunPod(t, harness.HostNetwork).Run(t)
	fp.FreezeNext(t, harness.LauncherProgram, "launcher.exec-announced", 1)
	_, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"sh", "-c", "sleep 100003 & sleep 100004"}, time.Second)
	harness.Must(t, expectTimeout(err))
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
