package shim

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// The OOM killer prefers a launcher while it serves an exec, and spares it again afterwards.
func TestOOMScores(t *testing.T) {
	scores, err := readOOMScores()
	if err != nil {
		t.Fatal(err)
	}
	if scores.exec < 0 || scores.exec < scores.own {
		t.Errorf("scores %+v", scores)
	}
	scores.exec = min(scores.own+100, 1000) // lower ones than its own a test may not be able to have
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	for _, step := range []struct {
		set  func(int) error
		want int
	}{{scores.lend, scores.exec}, {scores.giveBack, scores.own}} {
		if err := step.set(cmd.Process.Pid); err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", cmd.Process.Pid))
		if got := strings.TrimSpace(string(data)); err != nil || got != fmt.Sprint(step.want) {
			t.Errorf("oom_score_adj is %s (%v), want %d", got, err, step.want)
		}
	}
}
