package integration

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/faults"
	"berth/integration/harness"
	"berth/integration/machine"
	"berth/internal/testutil"
)

// sleeping is a container command with two processes that sleep for the given seconds. The seconds
// identify the container. It exits with 7 on SIGTERM.
func sleeping(first, second int) harness.ContainerOption {
	return harness.Script(fmt.Sprintf("trap 'exit 7' TERM; sleep %d & setsid sleep %d & echo ready; wait; wait", first, second))
}

func whenReady(t *testing.T, c *harness.Container) *harness.Container {
	t.Helper()
	c.WaitOutput(t, "ready")
	return c
}

// wantLost checks that a container has ended because its shim was lost, and that none of its
// processes runs.
func wantLost(t *testing.T, c *harness.Container, seconds ...int) {
	t.Helper()
	status := c.WaitExited(t)
	harness.Equal(t, "exit code", status.ExitCode, 255)
	harness.Equal(t, "reason", status.Reason, "ShimLost")
	harness.WantText(t, "status message", status.Message, "shim was lost")
	if status.StartedAt == 0 || status.FinishedAt < status.StartedAt {
		t.Errorf("the container started at %d and finished at %d, want two times in order", status.StartedAt, status.FinishedAt)
	}
	wantNoSleep(t, seconds...)
}

// wantExited checks that a container has exited with a code, and that none of its processes runs.
func wantExited(t *testing.T, c *harness.Container, code int32, seconds ...int) {
	t.Helper()
	status := c.WaitExited(t)
	harness.Equal(t, "exit code", status.ExitCode, code)
	harness.Equal(t, "reason", status.Reason, "Error")
	if status.StartedAt == 0 || status.FinishedAt < status.StartedAt {
		t.Errorf("the container started at %d and finished at %d, want two times in order", status.StartedAt, status.FinishedAt)
	}
	wantNoSleep(t, seconds...)
}

// wantNoSleep checks that no process sleeps for one of these times.
func wantNoSleep(t *testing.T, seconds ...int) {
	t.Helper()
	for _, n := range seconds {
		if pids := machine.ProcessesOf(fmt.Sprintf("sleep %d", n)); len(pids) > 0 {
			t.Errorf("sleep %d still runs: %v", n, pids)
		}
	}
}

// checkPodWorks checks that a pod works after the loss of one of its containers: its other
// container and the next attempt of the lost one run.
func checkPodWorks(t *testing.T, pod *harness.Pod, lost, other *harness.Container) {
	t.Helper()
	harness.Equal(t, "state of the pod", pod.Status(t).State, runtimeapi.PodSandboxState_SANDBOX_READY)
	harness.Equal(t, "exec in the other container", other.Exec(t, "echo", "fine"), "fine")
	next := pod.Run(t, func(c *runtimeapi.ContainerConfig) {
		c.Metadata.Name, c.Metadata.Attempt = lost.Config.Metadata.Name, 1
		c.LogPath = filepath.Join(filepath.Dir(lost.Config.LogPath), "1.log")
	})
	harness.Equal(t, "exec in the next attempt", next.Exec(t, "echo", "again"), "again")
	harness.Must(t, pod.D.Cri.RemoveContainer(t.Context(), lost.Id))
}

// kinds lists kinds of pods. They differ in the way in which a container's processes are found and
// killed.
var kinds = []struct {
	name string
	pod  harness.PodOption
	ctr  harness.ContainerOption
}{
	{"own PID namespace", harness.HostNetwork, func(*runtimeapi.ContainerConfig) {}},
	{"shared PID namespace", harness.SharedPID, func(*runtimeapi.ContainerConfig) {}},
	{"the node's PID namespace", harness.HostPID, func(*runtimeapi.ContainerConfig) {}},
	{"terminal", harness.HostNetwork, func(c *runtimeapi.ContainerConfig) { c.Tty = true }},
}

// If a monitor is killed, its container ends, and nothing else does. The status reports the loss.
// This also holds if no daemon runs at that time.
func TestMonitorKilled(t *testing.T) {
	d := harness.StartDaemon(t)
	for i, kind := range kinds {
		for _, noDaemon := range []bool{false, true} {
			name := kind.name
			if noDaemon {
				name += ", without daemon"
			}
			t.Run(name, func(t *testing.T) {
				pod := d.RunPod(t, kind.pod)
				first, second := 110000+10*i, 110001+10*i
				c, other := whenReady(t, pod.Run(t, sleeping(first, second), kind.ctr)), pod.Run(t)
				monitor := harness.MonitorOf(t, d, c)
				if noDaemon {
					d.Kill(t)
				}
				harness.Must(t, syscall.Kill(monitor, syscall.SIGKILL))
				if noDaemon {
					waitDead(t, monitor)
					d.Start(t)
				}
				wantLost(t, c, first, second)
				checkPodWorks(t, pod, c, other)
				d.StateMatches(t)
				pod.Remove(t)
			})
		}
	}
}

// If a monitor is killed during an exec in its container, the exec ends.
func TestMonitorKilledDuringExec(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.SharedPID)
	c, other := whenReady(t, pod.Run(t, sleeping(110100, 110101))), pod.Run(t)
	ended := harness.Go(func() error {
		_, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"sh", "-c", "sleep 110102 & sleep 110103"}, 0)
		return err
	})
	harness.EventuallyTrue(t, "the exec runs", func() bool { return len(machine.ProcessesOf("sleep 110103")) > 0 })
	harness.Must(t, syscall.Kill(harness.MonitorOf(t, d, c), syscall.SIGKILL))
	if err := <-ended; err == nil {
		t.Error("an exec that was killed succeeded")
	}
	wantLost(t, c, 110100, 110101, 110102, 110103)
	checkPodWorks(t, pod, c, other)
}

// If pause is killed, the pod is not ready. Its containers keep running, except those in pause's
// PID namespace. kubelet then stops the pod and runs the next attempt. This also holds without a
// daemon.
func TestPauseKilled(t *testing.T) {
	d := harness.StartDaemon(t)
	for _, shared := range []bool{false, true} {
		for _, noDaemon := range []bool{false, true} {
			t.Run(fmt.Sprintf("shared PID namespace %t, without daemon %t", shared, noDaemon), func(t *testing.T) {
				var options []harness.PodOption
				if shared {
					options = append(options, harness.SharedPID)
				}
				pod := d.RunPod(t, options...)
				c := whenReady(t, pod.Run(t, sleeping(110200, 110201)))
				pause := pod.PausePID(t)
				if noDaemon {
					d.Kill(t)
				}
				harness.Must(t, syscall.Kill(pause, syscall.SIGKILL))
				waitDead(t, pause)
				if noDaemon {
					d.Start(t)
				}
				harness.EventuallyGot(t, "the pod is not ready", func() (bool, any) {
					state := pod.Status(t).State
					return state == runtimeapi.PodSandboxState_SANDBOX_NOTREADY, state
				})
				if !shared {
					harness.Equal(t, "exec in the container", c.Exec(t, "echo", "fine"), "fine")
				}
				pod.Stop(t)
				status := c.WaitExited(t)
				harness.Equal(t, "exit code", status.ExitCode, 137)
				wantNoSleep(t, 110200, 110201)
				next := d.PodConfig(t)
				next.Metadata.Name, next.Metadata.Uid, next.Metadata.Attempt = pod.Config.Metadata.Name, pod.Config.Metadata.Uid, 1
				replaced := d.RunPodConfig(t, next)
				pod.Remove(t)
				harness.Equal(t, "output of the next attempt", replaced.Sh(t, "echo again"), "again\n")
				replaced.Remove(t)
			})
		}
	}
}

// --- frozen monitors ------------------------------------------------------------

// freeze stops a container's monitor and waits until it is stopped.
func freeze(t *testing.T, d *harness.Daemon, c *harness.Container) (monitor int) {
	t.Helper()
	monitor = harness.MonitorOf(t, d, c)
	harness.Must(t, syscall.Kill(monitor, syscall.SIGSTOP))
	harness.Eventually(t, "the monitor is stopped", func() error { return isFrozen(t, monitor) })
	return monitor
}

func isFrozen(t *testing.T, pid int) error {
	t.Helper()
	if state := machine.StatusField(t, pid, "State"); !strings.HasPrefix(state, "T") {
		return harness.Unexpected("its state", state, "stopped")
	}
	return nil
}

// readers are calls that must not depend on any shim.
func readers(d *harness.Daemon, pod *harness.Pod, c *harness.Container) map[string]func(context.Context) error {
	return map[string]func(context.Context) error{
		"ListContainers":        func(ctx context.Context) error { _, err := d.Cri.ListContainers(ctx, nil); return err },
		"ContainerStatus":       func(ctx context.Context) error { _, err := d.Cri.ContainerStatus(ctx, c.Id, true); return err },
		"ContainerStats":        func(ctx context.Context) error { _, err := d.Cri.ContainerStats(ctx, c.Id); return err },
		"ListContainerStats":    func(ctx context.Context) error { _, err := d.Cri.ListContainerStats(ctx, nil); return err },
		"ListPodSandbox":        func(ctx context.Context) error { _, err := d.Cri.ListPodSandbox(ctx, nil); return err },
		"PodSandboxStatus":      func(ctx context.Context) error { _, err := d.Cri.PodSandboxStatus(ctx, pod.Id, true); return err },
		"PodSandboxStats":       func(ctx context.Context) error { _, err := d.Cri.PodSandboxStats(ctx, pod.Id); return err },
		"ListPodSandboxStats":   func(ctx context.Context) error { _, err := d.Cri.ListPodSandboxStats(ctx, nil); return err },
		"ListPodSandboxMetrics": func(ctx context.Context) error { _, err := d.Cri.ListPodSandboxMetrics(ctx); return err },
		"Status":                func(ctx context.Context) error { _, err := d.Cri.Status(ctx, true); return err },
		"ListImages":            func(ctx context.Context) error { _, err := d.Images.ListImages(ctx, nil); return err },
	}
}

// measureAnswers makes every call several times while monitors are frozen. It logs the slowest
// answer, for docs/reliability.md.
func measureAnswers(t *testing.T, when string, calls map[string]func(context.Context) error, monitors ...int) {
	t.Helper()
	slowest, which := time.Duration(0), ""
	for range 20 {
		for name, call := range calls {
			begin := time.Now()
			if err := call(t.Context()); err != nil {
				t.Errorf("%s %s: %v", name, when, err)
			}
			if took := time.Since(begin); took > slowest {
				slowest, which = took, name
			}
		}
	}
	for _, m := range monitors { // the monitors are still frozen
		harness.Must(t, isFrozen(t, m))
	}
	t.Logf("TRIED %d calls %s; the slowest answer was %s's, after %v", 20*len(calls), when, which, slowest)
}

// While monitors are frozen, the daemon answers all requests, and other pods work. The pods of the
// monitors work, too, except for the monitors' tasks. Containers and pods can be stopped in time,
// and removed.
func TestFrozenMonitor(t *testing.T) {
	d := harness.StartDaemon(t)
	pod, other := d.RunPod(t), d.RunPod(t, harness.HostNetwork)
	stopped, withPod := whenReady(t, pod.Run(t, sleeping(110300, 110301))), whenReady(t, pod.Run(t, sleeping(110302, 110303)))
	monitors := []int{freeze(t, d, stopped), freeze(t, d, withPod)}
	calls := readers(d, pod, stopped)

	measureAnswers(t, "while a container's monitor is frozen", calls, monitors...)
	harness.Equal(t, "output of a container of another pod", other.Sh(t, "echo fine"), "fine\n")
	another := d.RunPod(t)
	harness.Equal(t, "output of a container of a new pod", another.Sh(t, "echo new"), "new\n")
	another.Remove(t)
	harness.Equal(t, "output of an exec while a monitor is frozen", stopped.Exec(t, "echo", "here"), "here")

	const grace = 30
	ctx, cancel := context.WithTimeout(t.Context(), grace*time.Second)
	defer cancel()
	ended := harness.Go(func() error { return d.Cri.StopContainer(ctx, stopped.Id, grace) })
	waitGone(t, 110300, 110301)
	measureAnswers(t, "while a container with a frozen monitor is being stopped", calls, monitors[1])
	harness.Must(t, <-ended)
	harness.Must(t, ctx.Err()) // the call returned within the grace period
	wantExited(t, stopped, 7, 110300, 110301)

	stopping := harness.Go(func() error { return d.Cri.StopPodSandbox(t.Context(), pod.Id) })
	waitGone(t, 110302, 110303)
	measureAnswers(t, "while a pod with a frozen monitor is being stopped", calls)
	harness.Equal(t, "output of a container of another pod", other.Sh(t, "echo still"), "still\n")
	harness.Must(t, <-stopping)
	wantExited(t, withPod, 137, 110302, 110303)
	for _, m := range monitors {
		waitDead(t, m)
	}
	d.StateMatches(t)
	harness.Must(t, d.Cri.RemovePodSandbox(t.Context(), pod.Id))
}

func waitGone(t *testing.T, seconds ...int) {
	t.Helper()
	harness.Eventually(t, "the container's processes end", func() error {
		for _, n := range seconds {
			if pids := machine.ProcessesOf(fmt.Sprintf("sleep %d", n)); len(pids) > 0 {
				return fmt.Errorf("sleep %d runs: %v", n, pids)
			}
		}
		return nil
	})
}

// A monitor in a frozen cgroup receives no signal. Its container ends with its exit code and can be
// removed.
func TestMonitorInFrozenCgroup(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	c := whenReady(t, pod.Run(t, sleeping(110310, 110311)))
	monitor := harness.MonitorOf(t, d, c)
	thaw := freezeInCgroup(t, monitor)
	harness.Must(t, d.Cri.StopContainer(t.Context(), c.Id, 5))
	wantExited(t, c, 7, 110310, 110311)
	harness.Must(t, d.Cri.RemoveContainer(t.Context(), c.Id))
	thaw()
	waitDead(t, monitor)
	d.StateMatches(t)
}

// freezeInCgroup moves a process to a new cgroup and freezes it. thaw thaws the cgroup. The test's
// cleanup removes it.
func freezeInCgroup(t *testing.T, pid int) (thaw func()) {
	t.Helper()
	dir, file, frozen, thawed := "/sys/fs/cgroup/freezer", "freezer.state", "FROZEN", "THAWED"
	if _, err := os.Stat(dir); err != nil {
		dir, file, frozen, thawed = "/sys/fs/cgroup", "cgroup.freeze", "1", "0"
	}
	dir += fmt.Sprintf("/berth-test-frozen-%d", pid)
	harness.Must(t, os.Mkdir(dir, 0o755))
	write := func(name, text string) { harness.Must(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0)) }
	write("cgroup.procs", fmt.Sprint(pid))
	write(file, frozen)
	t.Cleanup(func() {
		write(file, thawed)
		harness.Eventually(t, "the cgroup is removed", func() error { return syscall.Rmdir(dir) })
	})
	return func() { write(file, thawed) }
}

// One call removes a pod with a frozen monitor, even if the monitor froze while no daemon ran.
func TestFrozenMonitorOfRemovedPod(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t)
	c := whenReady(t, pod.Run(t, sleeping(110400, 110401)))
	d.Kill(t)
	monitor := freeze(t, d, c)
	d.Start(t)
	measureAnswers(t, "of a daemon that was started beside a frozen monitor", readers(d, pod, c), monitor)
	harness.Must(t, d.Cri.RemovePodSandbox(t.Context(), pod.Id))
	wantNoSleep(t, 110400, 110401)
	waitDead(t, monitor)
}

// A monitor that was frozen and continues delivers the complete output and the exit with its code.
func TestThawedMonitorDeliversOutputAndExit(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	c := whenReady(t, pod.Run(t, sleeping(110500, 110501)))
	pid, monitor := c.Pid(t), freeze(t, d, c)
	harness.Must(t, syscall.Kill(pid, syscall.SIGTERM))
	waitGone(t, 110500, 110501)
	harness.Equal(t, "state before a monitor reports the exit", c.Status(t).State, runtimeapi.ContainerState_CONTAINER_RUNNING)
	harness.Must(t, syscall.Kill(monitor, syscall.SIGCONT))
	status := c.WaitExited(t)
	harness.Equal(t, "exit code", status.ExitCode, 7)
	harness.Equal(t, "reason", status.Reason, "Error")

	talks := pod.Run(t, harness.Script("i=0; while [ ! -e /tmp/stop ]; do i=$((i+1)); echo $i; sleep 0.005; done; exit 3"))
	talks.WaitOutput(t, "3\n")
	monitor = freeze(t, d, talks)
	talks.Release(t, "/tmp/stop")
	harness.Must(t, syscall.Kill(monitor, syscall.SIGCONT))
	harness.Equal(t, "exit code", talks.WaitExited(t).ExitCode, 3)
	for i, l := range talks.Log(t) {
		if l.Text != fmt.Sprint(i+1) {
			t.Fatalf("line %d is %q", i+1, l.Text)
		}
	}
	harness.Equal(t, "exec in another container", pod.Run(t).Exec(t, "echo", "fine"), "fine")
}

// --- signals right after the start ----------------------------------------------

// A container that is stopped right after its start ends as its program handles the signal, and not
// as the launcher does. A hook extends the time between the two.
func TestStopRightAfterStart(t *testing.T) {
	dir, option := cdiDir(t)
	d := harness.StartDaemon(t, option)
	writeCDI(t, filepath.Join(dir, "vendor.json"), map[string]any{
		"slow": map[string]any{"hooks": []any{map[string]any{"hookName": "startContainer", "path": "/bin/sleep", "args": []string{"sleep", "0.5"}}}},
	})
	for _, c := range []struct {
		name  string
		pod   harness.PodOption
		grace int64
		code  int32
	}{
		{"process 1, which ignores signals without a handler", harness.HostNetwork, 2, 128 + int32(syscall.SIGKILL)},
		{"any process", harness.HostPID, 60, 128 + int32(syscall.SIGTERM)},
	} {
		t.Run(c.name, func(t *testing.T) {
			pod := d.RunPod(t, c.pod)
			for _, options := range [][]harness.ContainerOption{{harness.Cdi("slow")}, nil, nil} {
				ctr := pod.Run(t, options...)
				ctr.Stop(t, c.grace)
				harness.Equal(t, "exit code", ctr.WaitExited(t).ExitCode, c.code)
			}
		})
	}
}

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
