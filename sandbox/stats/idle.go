package stats

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/cgroup"
)

// maxUnseen is how old a count may become of a pod that does nothing: a file can have been opened for somebody in another pod, by a
// descriptor that was passed. So long a file can grow without counting against its container's ephemeral storage.
const maxUnseen = 10 * time.Minute

// usedCPU returns what the processes of a container's pod have used of the CPU, in the kernel's words. It is the pod's because one container
// can write what counts as another's, through /proc in a shared PID namespace. Without a pod's cgroup (no cgroup_parent in the pod's
// configuration) it is that of all pods that have none, so that such a pod is idle when all of them are. The words are empty where the
// kernel does not say, or not of all of the container's processes.
func usedCPU(s *Target, systemd bool) (string, error) {
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
		content, err := os.ReadFile(filepath.Join(filepath.Dir(dir), name))
		if err == nil {
			return string(content), nil
		}
		if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENODEV) { // that of a group that was removed since it was opened
			return "", fmt.Errorf("CPU time: %w", err)
		}
	}
	return "", nil // it has ended
}

// idleSince returns the last count as one of now if none of the pod's processes has run since then. Else, or when that was too long ago, it
// returns nil.
func (l *SampleState) idleSince(usedCPU string, now time.Time) *Sample {
	last := l.last.Load()
	if last == nil || usedCPU == "" || last.usedCPU != usedCPU || now.Sub(last.seen) > maxUnseen {
		return nil
	}
	again := *last
	again.At = now
	return &again
}
