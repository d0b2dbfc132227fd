package scarcity

import (
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/faults"
	"berth/integration/harness"
	"berth/integration/sessions"
)

// clockEnv is set if this test may set the clock, as in a guest.
const clockEnv = "BERTH_TEST_CLOCK"

// ownClock skips the test if it may not set the clock.
func ownClock(t *testing.T) {
	t.Helper()
	if os.Getenv(clockEnv) == "" {
		t.Skip("the test would set the machine's clock; contrib/guest has its own clock and sets " + clockEnv)
	}
}

// setClock sets the machine's clock and restores it when the test ends.
func setClock(t *testing.T, to time.Time) {
	t.Helper()
	before := time.Now()
	set := func(to time.Time) error {
		ts := unix.NsecToTimespec(to.UnixNano())
		return os.NewSyscallError("clock_settime", unix.ClockSettime(unix.CLOCK_REALTIME, &ts))
	}
	harness.Must(t, set(to))
	t.Cleanup(func() { harness.Must(t, set(before.Add(time.Since(before)))) })
}

// The daemon starts on a machine without a clock, in 1970, and serves. Then the clock is set.
// Containers keep running, and no reported time is zero.
func TestClockOf1970(t *testing.T) {
	ownClock(t)
	// The clock starts with the machine, because the kernel refuses a time before the boot.
	var up unix.Timespec
	harness.Must(t, unix.ClockGettime(unix.CLOCK_BOOTTIME, &up))
	boot := time.Unix(10, 0).Add(time.Duration(up.Nano()))
	setClock(t, boot)
	d := harness.StartDaemon(t)
	d.Pull(t, harness.BaseImage)
	pod := d.RunPod(t)
	running := pod.Run(t, harness.Script("trap '' TERM; while :; do sleep 0.1; done"))
	_, ended := pod.RunToEnd(t, harness.Script("sleep 0.1; exit 3"))
	for what, at := range map[string]int64{
		"pod created": pod.Status(t).CreatedAt, "container created": ended.CreatedAt, "started": ended.StartedAt, "finished": ended.FinishedAt,
		"statistics": harness.Get(d.Cri.ContainerStats(t.Context(), running.Id))(t).Cpu.Timestamp,
	} {
		if at <= 0 || at > boot.Add(time.Hour).UnixNano() {
			t.Errorf("%s: %d", what, at)
		}
	}
	if ended.StartedAt < ended.CreatedAt || ended.FinishedAt <= ended.StartedAt {
		t.Errorf("created %d, started %d, finished %d", ended.CreatedAt, ended.StartedAt, ended.FinishedAt)
	}
	d.Restart(t)
	harness.Equal(t, "state", running.Status(t).State, runtimeapi.ContainerState_CONTAINER_RUNNING)

	setClock(t, time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC))
	harness.Equal(t, "output of an exec", running.Exec(t, "echo", "here"), "here")
	d.Restart(t)
	harness.Equal(t, "state after a restart", running.Status(t).State, runtimeapi.ContainerState_CONTAINER_RUNNING)
	harness.Equal(t, "exit code", pod.Sh(t, "echo 5"), "5\n")
	pod.Remove(t)
}

// The clock jumps during operations. Time limits hold, no operation hangs, and none ends early.
func TestClockJumps(t *testing.T) {
	ownClock(t)
	for name, jump := range map[string]time.Duration{"a year forward": 365 * 24 * time.Hour, "a day back": -24 * time.Hour} {
		t.Run(name, func(t *testing.T) {
			plugin := faults.NewPlugin(t, "portmap")
			d := harness.StartDaemon(t, plugin.Option)
			pod := d.RunPod(t)
			c := pod.Run(t, harness.Script("trap 'echo asked' TERM; while :; do sleep 0.1; done"))
			c2 := pod.Run(t, harness.Script("while :; do :; done"))
			c.WaitStoppable(t)
			harness.Get(d.Cri.ContainerStats(t.Context(), c2.Id))(t)
			url := c2.ExecURL(t, remotecommand.StreamOptions{Stdout: &sessions.Screen{}}, "echo", "here")
			// An undo is retried in the background.
			plugin.Inject(t, "ADD", faults.Fail(1))
			plugin.Inject(t, "DEL", faults.Fail(3))
			_, err := d.Cri.RunPodSandbox(t.Context(), d.PodConfig(t), "")
			harness.WantCode(t, err, codes.Unavailable)

			const grace, limit = 4 * time.Second, 3 * time.Second
			stopped, executed := make(chan error, 1), make(chan error, 1)
			began := time.Now()
			go func() { stopped <- d.Cri.StopContainer(t.Context(), c.Id, int64(grace/time.Second)) }()
			go func() {
				_, _, err := d.Cri.ExecSync(t.Context(), c2.Id, []string{"sleep", "1000"}, limit)
				executed <- err
			}()
			c.WaitOutput(t, "asked")
			setClock(t, time.Now().Add(jump))

			screen := &sessions.Screen{}
			if _, err := sessions.Spdy.Stream(t.Context(), sessions.Plain(), url, remotecommand.StreamOptions{Stdout: screen}); err != nil {
				t.Errorf("a session requested before the jump: %v", err)
			}
			if err := <-executed; err == nil || !strings.Contains(err.Error(), "timed out after "+limit.String()) {
				t.Errorf("the exec ended with %v", err)
			}
			if took := time.Since(began); took < limit {
				t.Errorf("the exec ended after %v, its limit is %v", took, limit)
			}
			harness.Must(t, <-stopped)
			if took := time.Since(began); took < grace {
				t.Errorf("the container was killed after %v, its grace period is %v", took, grace)
			}
			harness.Equal(t, "exit code", c.Status(t).ExitCode, 137)
			harness.EventuallyGot(t, "the undo is retried", func() (bool, any) { n := len(plugin.Calls("DEL")); return n >= 4, n })
			// The container has one process that only uses CPU time. Other processes need CPU time,
			// too.
			if used := harness.Get(d.Cri.ContainerStats(t.Context(), c2.Id))(t).Cpu.UsageNanoCores; used == nil || used.Value < 0.05e9 || used.Value > 1.2e9 {
				t.Errorf("the statistics of a container that uses one core show %v nanocores", used)
			}
			checkLatest(t, d, pod, c2)
		})
	}
}

// checkLatest checks that kubelet regards an object created after the jump as the latest. The next
// daemon must return the same order.
func checkLatest(t *testing.T, d *harness.Daemon, pod *harness.Pod, before *harness.Container) {
	t.Helper()
	after := pod.Run(t, harness.ContainerNamed(before.Config.Metadata.Name), func(c *runtimeapi.ContainerConfig) { c.Metadata.Attempt = 1 })
	pod.Stop(t)
	next := d.RunPod(t, func(c *runtimeapi.PodSandboxConfig) {
		c.Metadata.Name, c.Metadata.Uid, c.Metadata.Attempt = pod.Config.Metadata.Name, pod.Config.Metadata.Uid, 1
	})
	for _, restart := range []bool{false, true} {
		if restart {
			d.Restart(t)
		}
		if a, b := before.Status(t).CreatedAt, after.Status(t).CreatedAt; b <= a {
			t.Errorf("restart %v: the second container was created at %d, the first at %d", restart, b, a)
		}
		if a, b := pod.Status(t).CreatedAt, next.Status(t).CreatedAt; b <= a {
			t.Errorf("restart %v: the second attempt was created at %d, the first at %d", restart, b, a)
		}
	}
	if out := next.Sh(t, "echo here"); strings.TrimSpace(out) != "here" {
		t.Errorf("a container of the new pod prints %q", out)
	}
}
