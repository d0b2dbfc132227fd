package cgroup

import (
	"os"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

// freshProcess is set in the environment of a test's child process, which tests state that exists
// once per process.
const freshProcess = "BERTH_TEST_FRESH_PROCESS"

func TestCgroupsWorkAfterFirstUseWithoutDescriptors(t *testing.T) {
	if os.Getenv(freshProcess) == "" {
		cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run", "^"+t.Name()+"$")
		cmd.Env = append(os.Environ(), freshProcess+"=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
		return
	}
	testutil.Must(t, Prepare())
	var old unix.Rlimit
	testutil.Must(t, unix.Prlimit(0, unix.RLIMIT_NOFILE, nil, &old))
	testutil.Must(t, unix.Prlimit(0, unix.RLIMIT_NOFILE, &unix.Rlimit{Max: old.Max}, nil))
	_, _ = Open("/berth-unit-test", false) // may fail
	testutil.Must(t, unix.Prlimit(0, unix.RLIMIT_NOFILE, &old, nil))
	if _, err := Open("/berth-unit-test", false); err != nil {
		t.Error(err)
	}
}
