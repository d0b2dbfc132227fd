package integration

import (
	"fmt"
	"slices"
	"syscall"
	"testing"

	"berth/integration/harness"
	"berth/integration/machine"
)

// The harness kills processes that a failed test leaves, so that the next test does not fail: a
// stopped launcher, a monitor with its container, a pause.
func TestHarnessEndsLeftoverProcesses(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t)
	running, created := pod.Run(t), pod.Create(t)
	left := []int{harness.MonitorOf(t, d, running), running.Pid(t), pod.PausePID(t)}
	d.WaitWatched(t) // waits until the monitor no longer counts as a launcher
	launchers := d.Launchers()
	for _, pid := range launchers {
		harness.Must(t, syscall.Kill(pid, syscall.SIGSTOP))
	}
	ended := make(chan error, 1)
	go func() { ended <- d.Cri.StartContainer(t.Context(), created.Id) }()
	harness.Eventually(t, "a launcher has its launch request", func() error {
		for _, w := range waitsOf(t, harness.Get(d.Cri.Status(t.Context(), true))(t).Info) {
			if w.What == "container launch" {
				return nil
			}
		}
		return fmt.Errorf("no call waits for the launch")
	})
	d.Kill(t)
	<-ended
	if !slices.ContainsFunc(launchers, machine.Alive) {
		t.Error("the killed daemon has left no launcher, want one")
	}
	d.KillAll(t)
	for _, pid := range append(left, launchers...) {
		if machine.Alive(pid) {
			t.Errorf("process %d lives: %s", pid, machine.CommandLine(pid))
		}
	}
	d.Start(t) // finds that all processes have exited
	d.StateSettles(t)
}
