package testutil

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
)

// inside is set in the environment of the process that runs the tests.
const inside = "BERTH_MOUNTTEST"

// MainInMountNamespace runs the tests of m in a child process with a private mount namespace and
// returns the exit code for TestMain. The tests' mounts end with the child. If the user is not
// root, it skips all tests.
func MainInMountNamespace(m *testing.M) int {
	if os.Getenv(inside) != "" {
		return m.Run()
	}
	MainNeedsRoot()
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Env = append(os.Environ(), inside+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	// Unshareflags also makes every mount private, before the program starts.
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	err := cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return exit.ExitCode()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "run tests in a mount namespace:", err)
		return 1
	}
	return 0
}

// DiskDir is t.TempDir on a disk, for files that the kernel mounts. It cannot mount files of a
// tmpfs.
func DiskDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "berth-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}
