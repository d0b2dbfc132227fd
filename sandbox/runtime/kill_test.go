package runtime

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/cgroups/manager"
	"golang.org/x/sys/unix"

	"berth/internal/testutil"
	"berth/shim/ociruntime"
)

// Kill ends a sandbox even if its runtime program always fails, because the sandbox is in the
// cgroup.
func TestKillWithFailingRuntime(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to make cgroups")
	}
	sandbox, init := startProcess(t, "sleep", "1000")
	path := fmt.Sprintf("/berth-unit-test-%d", os.Getpid())
	mgr, err := manager.New(&cgroups.Cgroup{Path: path, Resources: &cgroups.Resources{SkipDevices: true}})
	if err == nil {
		err = mgr.Apply(sandbox.Process.Pid)
	}
	testutil.Must(t, err)
	program := filepath.Join(t.TempDir(), "runtime")
	testutil.Must(t, os.WriteFile(program, []byte("#!/bin/sh\necho oh no >&2\nexit 1\n"), 0o700))
	run := newRunning(init, init, sandbox.Process.Pid, time.Now())
	err = Processes{}.Kill(t.Context(), "c", path, &ociruntime.Runtime{Path: program, Root: t.TempDir(), Sandboxed: true}, run)
	t.Log(err) // depends on whether the process was gone at the call
	_ = sandbox.Wait()
	if status, ok := sandbox.ProcessState.Sys().(syscall.WaitStatus); !ok || status.Signal() != unix.SIGKILL {
		t.Errorf("sandbox exit: %v", sandbox.ProcessState)
	}
	testutil.Must(t, mgr.Destroy())
	testutil.Must(t, init.Close())
}
