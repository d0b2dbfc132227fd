package test

import (
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// group makes a directory that looks like a cgroup's.
func group(t *testing.T, dir string, pids ...int) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	var list strings.Builder
	for _, pid := range pids {
		fmt.Fprintln(&list, pid)
	}
	if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(list.String()), 0o600); err != nil {
		t.Fatal(err)
	}
}

func killTree(t *testing.T, dir string) (none bool) {
	t.Helper()
	return binary.BigEndian.Uint32(ask(t, 'k', []byte(dir))) != 0
}

// The monitor also checks cgroups below the top one after it has signalled all processes.
func TestKillTree(t *testing.T) {
	top := t.TempDir()
	group(t, top)
	group(t, filepath.Join(top, "empty"))
	if !killTree(t, top) {
		t.Error("something is left in empty groups")
	}
	victim := exec.Command("sleep", "1000")
	t.Cleanup(func() { _ = victim.Process.Kill() }) // it is already dead unless the test fails
	if err := victim.Start(); err != nil {
		t.Fatal(err)
	}
	group(t, filepath.Join(top, "some"))
	group(t, filepath.Join(top, "some", "below"), victim.Process.Pid)
	if killTree(t, top) {
		t.Error("nothing is left, where a file still lists a process")
	}
	if err := victim.Wait(); err == nil || victim.ProcessState.ExitCode() != -1 {
		t.Errorf("the process was not killed: %v", err)
	}
	if !killTree(t, filepath.Join(top, "nowhere")) {
		t.Error("something is left in no group")
	}
}

// Deeply nested cgroups exhaust neither the stack nor the descriptors.
func TestKillDeepTree(t *testing.T) {
	top := t.TempDir()
	dir := top
	for range 200 {
		group(t, dir)
		dir = filepath.Join(dir, "d")
	}
	if killTree(t, top) {
		t.Error("nothing is left in groups that were not looked into")
	}
}
