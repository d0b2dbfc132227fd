package stats

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"berth/sandbox/state"
)

// maxUnseen limits the age of the sample of an idle pod. A process of another pod can write to a
// file of an idle pod through a descriptor that was passed to it. For this long such writes do not
// count as the container's ephemeral storage.
const maxUnseen = 10 * time.Minute

// usedCPU returns the CPU time of the container's pod as text from the kernel. It reads the pod's
// cgroup, not the container's, because one container can write to another's files through /proc in
// a shared PID namespace. Pods that have no cgroup (no cgroup_parent) share one value, so such a
// pod is idle only when all such pods are idle. The text is empty when the kernel does not report
// the time of all processes of the container.
func usedCPU(s *Target, node state.Node) (string, error) {
	if s.Init == 0 {
		return "", nil
	}
	group, err := node.Cgroup(s.CgroupsPath)
	if err != nil {
		return "", err
	}
	dir := group.Dir("cpuacct")
	if dir == "" {
		return "", nil
	}
	for _, name := range []string{"cpuacct.usage", "cpu.stat"} { // cgroup v1, v2
		content, err := os.ReadFile(filepath.Join(filepath.Dir(dir), name))
		if err == nil {
			return string(content), nil
		}
		if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENODEV) { // ENODEV: the cgroup was removed after open
			return "", fmt.Errorf("read CPU time: %w", err)
		}
	}
	return "", nil // the cgroup was removed
}

// idleSince returns the last sample with the time now, if no process of the pod has run since that
// sample. Otherwise, or if the sample is too old, it returns nil.
func (l *SampleState) idleSince(usedCPU string, now time.Time) *Sample {
	last := l.last.Load()
	if last == nil || usedCPU == "" || last.usedCPU != usedCPU || now.Sub(last.seen) > maxUnseen {
		return nil
	}
	again := *last
	again.At = now
	return &again
}
