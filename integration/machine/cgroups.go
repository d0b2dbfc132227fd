package machine

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"berth/internal/testutil"
)

// Cgroup2 reports whether the host uses cgroup v2 alone.
func Cgroup2() bool {
	_, err := os.Stat("/sys/fs/cgroup/cgroup.controllers")
	return err == nil
}

// CgroupDir returns the directory of a process's cgroup in the hierarchy of a
// controller, on a host with cgroup v1 or v2.
func CgroupDir(t *testing.T, pid int, controller string) string {
	t.Helper()
	dir, err := FindCgroupDir(pid, controller)
	testutil.Must(t, err)
	return dir
}

// FindCgroupDir is CgroupDir for a process that may have ended.
func FindCgroupDir(pid int, controller string) (string, error) {
	for _, line := range ReadLines(fmt.Sprintf("/proc/%d/cgroup", pid)) {
		fields := strings.SplitN(line, ":", 3)
		if fields[1] == "" && Cgroup2() {
			return filepath.Join("/sys/fs/cgroup", fields[2]), nil
		}
		for _, name := range strings.Split(fields[1], ",") {
			if name == controller {
				return filepath.Join("/sys/fs/cgroup", controller, fields[2]), nil
			}
		}
	}
	return "", fmt.Errorf("process %d has no cgroup for %s", pid, controller)
}

// CgroupFile reads a setting of a process's cgroup. v1 and v2 are the file's names in each version.
func CgroupFile(t *testing.T, pid int, controller, v1, v2 string) string {
	t.Helper()
	name := v1
	if Cgroup2() {
		name = v2
	}
	content, err := os.ReadFile(filepath.Join(CgroupDir(t, pid, controller), name))
	testutil.Must(t, err)
	return strings.TrimSpace(string(content))
}
