package shim

import (
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestOOMScoreAdj(t *testing.T) {
	e := newEnv(t)
	own, err := os.ReadFile("/proc/self/oom_score_adj")
	if err != nil {
		t.Fatal(err)
	}
	now, err := strconv.Atoi(strings.TrimSpace(string(own)))
	if err != nil {
		t.Fatal(err)
	}
	lowest := now
	if os.WriteFile("/proc/self/oom_score_adj", []byte("-998"), 0) == nil {
		lowest = -998
		if err := os.WriteFile("/proc/self/oom_score_adj", own, 0); err != nil {
			t.Fatal(err)
		}
	}
	for want, ask := range map[int]int{lowest: -998, now: now, 1000: 1000} {
		c := e.run("oom-score-"+strconv.Itoa(ask), "cat /proc/self/oom_score_adj", func(r *LaunchRequest) { r.Spec.Process.OOMScoreAdj = &ask })
		c.wait()
		if got := strings.TrimSpace(c.output("stdout")); got != strconv.Itoa(want) {
			t.Errorf("asked for %d: got %s, want %d", ask, got, want)
		}
	}
}

func TestReadOnlyRootfs(t *testing.T) {
	e := newEnv(t)
	c := e.run("readonly", "touch /file; echo $?", func(r *LaunchRequest) { r.Rootfs.Upper, r.Rootfs.Work = "", "" })
	c.wait()
	if got := c.output("stdout"); got != "1\n" {
		t.Errorf("touch on a read-only root said %q, %q", got, c.output("stderr"))
	}
}

// What quiets Go's runtime in launchers and init (shim/launcher/sysmon) reaches neither the container's command nor one that is executed there:
// both have the timer slack of the thread that has started their launcher.
func TestTimerSlack(t *testing.T) {
	for name, slack := range map[string]int{"usual": 50_000, "unusual": 70_000} {
		t.Run(name, func(t *testing.T) {
			runtime.LockOSThread() // for good: the thread ends with this function
			if err := unix.Prctl(unix.PR_SET_TIMERSLACK, uintptr(slack), 0, 0, 0); err != nil {
				t.Fatal(err)
			}
			e := newEnv(t, func(c *Config) { c.Warm = false }) // this thread starts the launchers
			c := e.run("slack", "cat /proc/self/timerslack_ns; exec sleep 1000")
			e.until("the container speaks", func() bool { return c.output("stdout") != "" })
			if got := strings.TrimSpace(c.output("stdout")); got != strconv.Itoa(slack) {
				t.Errorf("its command has a timer slack of %s ns, want %d", got, slack)
			}
			for i := range 5 {
				if got, _, _ := c.execIn(itoa(i), "cat /proc/self/timerslack_ns"); strings.TrimSpace(got) != strconv.Itoa(slack) {
					t.Errorf("a command that is executed there has one of %s ns, want %d", got, slack)
				}
			}
		})
	}
}
