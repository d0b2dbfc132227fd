package harness

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// WithHandler configures a runtime handler.
func WithHandler(name, path string, args ...string) DaemonOption {
	lines := []string{"[handlers." + name + "]"}
	if path != "" {
		lines = append(lines, fmt.Sprintf("path = %q", path))
	}
	if len(args) > 0 {
		lines = append(lines, fmt.Sprintf(`args = ["%s"]`, strings.Join(args, `", "`)))
	}
	return WithConfig(lines...)
}

// Crun returns the path of crun: $BERTH_CRUN, or the one in PATH. A wrapper hides cgroup v2's
// controllers from it, because crun refuses hybrid mode with controllers in version 2.
func Crun(t *testing.T) string {
	t.Helper()
	path := os.Getenv("BERTH_CRUN")
	if path == "" {
		var err error
		if path, err = exec.LookPath("crun"); err != nil {
			t.Skip("NOT TESTED: crun is not installed, and BERTH_CRUN is not set")
		}
	}
	const file = "/sys/fs/cgroup/unified/cgroup.controllers"
	if _, err := os.Stat(file); err == nil {
		empty := filepath.Join(t.TempDir(), "empty")
		Must(t, os.WriteFile(empty, nil, 0o600))
		Must(t, unix.Mount(empty, file, "", unix.MS_BIND, ""))
		t.Cleanup(func() { Must(t, unix.Unmount(file, 0)) })
	}
	return path
}

// ContainerdEnv names the directory of containerd's programs.
const ContainerdEnv = "BERTH_CONTAINERD"

// Containerd returns the directory of containerd's programs. It skips the test if there is none.
func Containerd(t *testing.T) string {
	t.Helper()
	dir := os.Getenv(ContainerdEnv)
	if dir == "" {
		t.Skipf("NOT TESTED: %s is not set: export %[1]s=$(integration/containerd/build)", ContainerdEnv)
	}
	return dir
}

// WithRuncShim configures a handler with containerd's shim for runc.
func WithRuncShim(t *testing.T, name string) DaemonOption {
	t.Helper()
	return WithConfig(RuncShim(t, name)...)
}

// RuncShim returns the configuration of a handler with containerd's shim for runc.
func RuncShim(t *testing.T, name string) []string {
	t.Helper()
	dir := Containerd(t)
	return []string{"[handlers." + name + "]", `type = "shim"`, fmt.Sprintf("path = %q", dir+"/containerd-shim-runc-v2"),
		fmt.Sprintf("options = [%q]", "BinaryName="+dir+"/runc")}
}
