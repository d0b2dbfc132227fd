package integration

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/logs"
	"berth/integration/machine"
)

// SIGTERM stops the daemon. Containers keep running, and the next daemon finds them.
func TestContainersSurviveSIGTERM(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t)
	running, created := pod.Run(t), pod.Create(t)
	exited, before := pod.RunToEnd(t, harness.Script("exit 9"))
	pid, ip := running.Pid(t), pod.Ip(t)
	d.Stop(t)
	if !machine.Alive(pid) {
		t.Fatal("the container ended with the daemon")
	}
	d.Start(t)
	status := pod.Status(t)
	harness.Equal(t, "pod state", status.State, runtimeapi.PodSandboxState_SANDBOX_READY)
	harness.Equal(t, "pod IP", status.Network.GetIp(), ip)
	harness.Equal(t, "state of the running container", running.Status(t).State, runtimeapi.ContainerState_CONTAINER_RUNNING)
	harness.Equal(t, "its pid", running.Pid(t), pid)
	harness.Equal(t, "state of the created container", created.Status(t).State, runtimeapi.ContainerState_CONTAINER_CREATED)
	after := exited.Status(t)
	harness.Equal(t, "the exited container's status", after.String(), before.String())
	harness.Equal(t, "exec", running.Exec(t, "echo", "still"), "still")
	created.Start(t)
	harness.Equal(t, "exec in the container created before", created.Exec(t, "echo", "new"), "new")
}

// The daemon is killed with SIGKILL while a pod runs. After a restart the pod is ready, its log has
// no gap, and its exit code is correct.
func TestKillDaemonUnderRunningPod(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t)
	c := pod.Run(t, harness.Script("i=0; while [ ! -e /tmp/stop ]; do i=$((i+1)); echo $i; sleep 0.005; done; exit 42"))
	c.WaitOutput(t, "3\n")
	d.Kill(t)
	reached := len(c.Log(t))
	harness.EventuallyGot(t, "the log grows without a daemon", func() (bool, any) { n := len(c.Log(t)); return n >= reached+20, n })
	d.Start(t)
	harness.Equal(t, "pod state", pod.Status(t).State, runtimeapi.PodSandboxState_SANDBOX_READY)
	harness.Equal(t, "container state", c.Status(t).State, runtimeapi.ContainerState_CONTAINER_RUNNING)
	c.Release(t, "/tmp/stop")
	status := c.WaitExited(t)
	harness.Equal(t, "exit code", status.ExitCode, 42)
	logs.Numbered(t, c.Log(t))
}

// The next daemon reports exits that happened while no daemon ran.
func TestExitWhileDaemonIsDown(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	exits := pod.Run(t, harness.Script("trap 'exit 11' TERM; echo ready; while :; do sleep 0.02; done"))
	oom := pod.Run(t, harness.Resources(func(r *runtimeapi.LinuxContainerResources) { r.MemoryLimitInBytes = 16 << 20 }),
		harness.Script("trap 'exec tail /dev/zero' TERM; echo ready; while :; do sleep 0.02; done"))
	exits.WaitOutput(t, "ready")
	oom.WaitOutput(t, "ready")
	pids := []int{exits.Pid(t), oom.Pid(t)}
	d.Kill(t)
	for _, pid := range pids {
		harness.Must(t, syscall.Kill(pid, syscall.SIGTERM))
		harness.Eventually(t, "the container ends", func() error {
			if machine.Alive(pid) {
				return fmt.Errorf("process %d lives", pid)
			}
			return nil
		})
	}
	d.Start(t)
	status := exits.WaitExited(t)
	harness.Equal(t, "exit code", status.ExitCode, 11)
	harness.Equal(t, "reason", status.Reason, "Error")
	if status.FinishedAt <= status.StartedAt {
		t.Errorf("finished_at is %d, started_at %d", status.FinishedAt, status.StartedAt)
	}
	harness.Equal(t, "reason of the container out of memory", oom.WaitExited(t).Reason, "OOMKilled")
}

// Each round kills the daemon at a different moment of a pod's start. The next daemon can remove
// every partial pod, and the leak check finds nothing.
func TestKillDaemonDuringRunPodSandbox(t *testing.T) {
	d := harness.StartDaemon(t)
	d.Pull(t, harness.BaseImage)
	for i := range 4 {
		config := d.PodConfig(t)
		done := harness.Go(func() error { _, err := d.Cri.RunPodSandbox(t.Context(), config, ""); return err })
		// Each round waits for one more step of the start before the kill.
		_ = waitForProgress(d, i)
		d.Signal(t, syscall.SIGKILL)
		<-done
		d.Disconnect(t)
		d.Start(t)
		for _, item := range harness.Get(d.Cri.ListPodSandbox(t.Context(), nil))(t) {
			d.Objects = append(d.Objects, item.Id)
		}
		// kubelet repeats the request for the pod. It gets the pod or a clear error.
		if id, err := d.Cri.RunPodSandbox(t.Context(), config, ""); err == nil {
			d.Objects = append(d.Objects, id)
			(&harness.Pod{D: d, Id: id, Config: config}).Remove(t)
		} else {
			t.Errorf("the same pod cannot be run after a crash: %v", err)
		}
		d.Clean(t)
		d.Pull(t, harness.BaseImage)
	}
}

// waitForProgress waits for the given step of a pod's start: its record, its network namespace, its
// address, its pause process.
func waitForProgress(d *harness.Daemon, step int) error {
	return harness.WaitFor(func() error {
		seen := false
		switch step {
		case 0:
			seen = true
		case 1:
			seen = len(machine.ReadDir("/run/netns")) > 0
		case 2:
			for _, network := range machine.ReadDir(d.DataDir) {
				for _, name := range machine.ReadDir(d.DataDir + "/" + network) {
					seen = seen || strings.Count(name, ".") == 3 && name[0] == '1'
				}
			}
		default:
			seen = len(machine.CommandLines("/pause")) > 0
		}
		if !seen {
			return fmt.Errorf("the step is not reached")
		}
		return nil
	})
}

func TestSecondDaemonRefused(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	other := harness.NewDaemon(t)
	for _, c := range []struct{ name, root, state string }{
		{"same root", d.Root, other.State},
		{"same state", other.Root, d.State},
	} {
		t.Run(c.name, func(t *testing.T) {
			second := d.DaemonCommand("--config", d.ConfigFile(), "--listen", other.Socket, "--root", c.root, "--state", c.state, "--cni-conf-dir", d.ConfDir)
			out, err := second.CombinedOutput()
			if err == nil {
				t.Fatalf("a second daemon ran:\n%s", out)
			}
			if !strings.Contains(string(out), d.Root) && !strings.Contains(string(out), d.State) {
				t.Errorf("the message does not name the directory:\n%s", out)
			}
		})
	}
	harness.Equal(t, "the first daemon's pod", pod.Status(t).State, runtimeapi.PodSandboxState_SANDBOX_READY)
}

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
	ended := harness.Go(func() error { return d.Cri.StartContainer(t.Context(), created.Id) })
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
