package shim

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
)

// oomScores are the oom_score_adj of launchers. One that serves an exec is no part of what the node needs, as the daemon is,
// from which it has its own (OOMScoreAdjust=-999 in the unit); there may be hundreds, as many as clients want.
type oomScores struct{ own, exec int }

// readOOMScores returns those of this process's launchers.
func readOOMScores() (oomScores, error) {
	data, err := os.ReadFile("/proc/self/oom_score_adj")
	if err != nil {
		return oomScores{}, fmt.Errorf("own oom_score_adj: %w", err)
	}
	own, err := strconv.Atoi(string(bytes.TrimSpace(data)))
	if err != nil {
		return oomScores{}, fmt.Errorf("own oom_score_adj: %w", err)
	}
	return oomScores{own: own, exec: max(own, 0)}, nil
}

// lend prepares a launcher for an exec. What the exec runs has the container's own value, which libcontainer sets.
func (s oomScores) lend(pid int) error { return s.set(pid, s.exec) }

// giveBack prepares a launcher that served an exec for anything else: it may become a monitor.
func (s oomScores) giveBack(pid int) error { return s.set(pid, s.own) }

func (s oomScores) set(pid, score int) error {
	if s.own == s.exec {
		return nil
	}
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid), []byte(strconv.Itoa(score)), 0); err != nil {
		return fmt.Errorf("set oom_score_adj of a launcher: %w", err)
	}
	return nil
}
