package integration

import (
	"context"
	"syscall"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/faults"
	"berth/integration/harness"
	"berth/integration/machine"
	"berth/internal/testutil"
)

// A container with an unkillable process stays Running until that process exits, even without its
// monitor, with and without a daemon. After the exit kubelet starts the next attempt. Meanwhile the
// daemon answers requests, and a stop fails at its deadline.
func TestMonitorKilledWithUnkillableProcess(t *testing.T) {
	testutil.Long(t)
	for name, noDaemon := range map[string]bool{"with a daemon": false, "without daemon": true} {
		t.Run(name, func(t *testing.T) {
			volume := faults.NewVolume(t)
			d := harness.StartDaemon(t)
			defer volume.Answer()
			pod := d.RunPod(t, harness.HostNetwork)
			c := pod.Run(t, harness.Script("exec stat /v/something"), harness.Mount(&runtimeapi.Mount{HostPath: volume.Dir, ContainerPath: "/v"}))
			volume.AwaitLookups(t, 1)
			pid, monitor := c.Pid(t), harness.MonitorOf(t, d, c)
			if noDaemon {
				d.Kill(t)
			}
			harness.Must(t, syscall.Kill(monitor, syscall.SIGKILL))
			if noDaemon {
				waitDead(t, monitor)
				d.Start(t)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
			defer cancel()
			if err := d.Cri.StopContainer(ctx, c.Id, 1); err == nil {
				t.Errorf("StopContainer succeeds, though process %d does not end", pid)
			}
			harness.Equal(t, "state", c.Status(t).State, runtimeapi.ContainerState_CONTAINER_RUNNING)
			measureAnswers(t, "while an unkillable process runs without its monitor", readers(d, pod, c))
			if !machine.Alive(pid) {
				t.Error("the process has ended before the check")
			}
			volume.Answer()
			wantLost(t, c)
			checkPodWorks(t, pod, c, pod.Run(t))
			d.StateMatches(t)
		})
	}
}
