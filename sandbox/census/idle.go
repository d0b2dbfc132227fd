package census

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"berth/internal/cgroup"
)

// usedCPU returns what the processes of a container's cgroup have used of the CPU, in the kernel's words. They are empty where the
// kernel does not say, or not of all of the container's processes.
func usedCPU(s *Subject, systemd bool) (string, error) {
	if s.Init == 0 {
		return "", nil
	}
	group, err := cgroup.Open(s.CgroupsPath, systemd)
	if err != nil {
		return "", err
	}
	dir := group.Dir("cpuacct")
	if dir == "" {
		return "", nil
	}
	for _, name := range []string{"cpuacct.usage", "cpu.stat"} { // of cgroup v1 and v2
		content, err := os.ReadFile(filepath.Join(dir, name))
		if err == nil {
			return string(content), nil
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return "", fmt.Errorf("CPU time: %w", err)
		}
	}
	return "", nil // it has ended
}

// idleSince returns the last count as one of now if none of the container's processes has run since then: it has neither written nor
// opened anything. Else it returns nil.
func (l *Ledger) idleSince(usedCPU string, now time.Time) *Count {
	last := l.last.Load()
	if last == nil || usedCPU == "" || last.usedCPU != usedCPU {
		return nil
	}
	again := *last
	again.At = now
	return &again
}
