package harness

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func Cdi(names ...string) ContainerOption {
	return func(c *runtimeapi.ContainerConfig) {
		for _, name := range names {
			c.CDIDevices = append(c.CDIDevices, &runtimeapi.CDIDevice{Name: "vendor.example/dev=" + name})
		}
	}
}

// HostDir makes a directory of the host with the given directories in it.
func HostDir(t *testing.T, names ...string) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range names {
		Must(t, os.MkdirAll(filepath.Join(dir, name), 0o755))
	}
	return dir
}

// MountTmpfs mounts a tmpfs on the host with the given propagation until the test ends.
func MountTmpfs(t *testing.T, path string, propagation uintptr) {
	t.Helper()
	Must(t, syscall.Mount("test", path, "tmpfs", 0, ""))
	t.Cleanup(func() { Must(t, ignoreErrno(syscall.Unmount(path, syscall.MNT_DETACH), syscall.EINVAL)) })
	Must(t, syscall.Mount("", path, "", propagation, ""))
}

func ignoreErrno(err error, except syscall.Errno) error {
	if errors.Is(err, except) {
		return nil
	}
	return err
}

func IsMountpoint(t *testing.T, path string) bool {
	t.Helper()
	return slices.Contains(Mountpoints(t, os.Getpid()), path)
}

// WithStdin keeps the container's stdin open, for one session only if once.
func WithStdin(once bool) ContainerOption {
	return func(c *runtimeapi.ContainerConfig) { c.Stdin, c.StdinOnce = true, once }
}

func WithTerminal(c *runtimeapi.ContainerConfig) { c.Stdin, c.Tty = true, true }

// NamespacePins returns where namespaces of a kind ("user:") are kept by bind mounts.
func NamespacePins(kind string) []string {
	var pins []string
	for _, line := range ReadLines("/proc/self/mountinfo") {
		if fields := strings.Fields(line); strings.HasPrefix(fields[3], kind) {
			pins = append(pins, fields[4])
		}
	}
	return pins
}
