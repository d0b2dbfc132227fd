package shim

import (
	"os"
	"strconv"
	"strings"
	"testing"
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
