package launcher

import (
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"berth/internal/testutil"
)

// A process below the least value is raised to it. One above it keeps its own.
func TestRaiseOOMScore(t *testing.T) {
	cmd := exec.Command("sleep", "1000")
	testutil.Must(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	score := func() string {
		data, err := os.ReadFile("/proc/" + strconv.Itoa(cmd.Process.Pid) + "/oom_score_adj")
		testutil.Must(t, err)
		return strings.TrimSpace(string(data))
	}
	for _, least := range []int{900, 1000, 950, -998} {
		testutil.Must(t, raiseOOMScore(cmd.Process.Pid, least))
		if want := strconv.Itoa(min(max(least, 900), 1000)); least == 900 && score() != want || least != 900 && score() != "1000" {
			t.Errorf("least %d: %s", least, score())
		}
	}
	value := -998
	for want, p := range map[int]*specs.Process{0: {}, -998: {OOMScoreAdj: &value}} {
		if least := leastOOMScore(p); least != want {
			t.Errorf("least %d, want %d", least, want)
		}
	}
}
