package shim

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
)

// oomScores are the values of oom_score_adj for launchers. Idle launchers inherit the daemon's
// value (OOMScoreAdjust=-999 in the unit). Launchers that serve execs must be killable, because
// clients can start hundreds.
type oomScores struct{ own, exec int }

// readOOMScores computes the scores from this process's own.
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

// lend sets the score for the time of an exec. The exec's own process gets the container's score
// from libcontainer.
func (s oomScores) lend(pid int) error { return s.set(pid, s.exec) }

// giveBack restores a launcher's score after an exec, because the launcher may start a monitor or
// become one.
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
