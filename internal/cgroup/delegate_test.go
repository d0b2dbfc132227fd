package cgroup

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"berth/internal/testutil"
)

func TestDelegateLeavesLimits(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to change owners")
	}
	dir := t.TempDir()
	for name, want := range map[string]uint32{"cgroup.procs": 1001, "cgroup.subtree_control": 1001, "memory.max": 0, "cgroup.kill": 0} {
		testutil.Must(t, os.WriteFile(filepath.Join(dir, name), nil, 0o644))
		testutil.Must(t, Delegate(dir, 1001)) // other files do not exist
		for path, want := range map[string]uint32{dir: 1001, filepath.Join(dir, name): want} {
			info, err := os.Stat(path)
			testutil.Must(t, err)
			if uid := info.Sys().(*syscall.Stat_t).Uid; uid != want {
				t.Errorf("%s belongs to %d, want %d", path, uid, want)
			}
		}
	}
}
