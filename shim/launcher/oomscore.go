package launcher

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"berth/internal/failpoint"
)

// leastOOMScore returns the oom_score_adj of a spec. A restored process must not have a lower
// value.
func leastOOMScore(p *specs.Process) int {
	if p.OOMScoreAdj == nil {
		return 0
	}
	return *p.OOMScoreAdj
}

// raiseOOMScore raises the oom_score_adj of a process to least. CRIU does not set the value if it
// is 0, so the process has the launcher's value. With that value the kernel would kill it last of
// all processes.
func raiseOOMScore(pid, least int) error {
	path := fmt.Sprintf("/proc/%d/oom_score_adj", pid)
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if score, err := strconv.Atoi(strings.TrimSpace(string(data))); err != nil || score >= least {
		return err
	}
	failpoint.Reach("launcher.raise-oom-score")
	err = os.WriteFile(path, []byte(strconv.Itoa(least)), 0)
	failpoint.Reach("launcher.oom-score-raised")
	return err
}
