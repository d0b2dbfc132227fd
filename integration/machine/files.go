package machine

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

// ReadLines returns the lines of a file, or none if reading fails, for example because the process
// of a file in /proc has exited.
func ReadLines(path string) []string {
	content, err := os.ReadFile(path)
	if err != nil {
		return nil
	}
	return strings.Split(strings.TrimRight(string(content), "\n"), "\n")
}

// ReadDir returns the sorted names in a directory, or none if reading fails.
func ReadDir(path string) []string {
	entries, err := os.ReadDir(path)
	if err != nil {
		return nil
	}
	names := make([]string, 0, len(entries))
	for _, e := range entries {
		names = append(names, e.Name())
	}
	sort.Strings(names)
	return names
}

// HostDir creates a temporary directory that contains the named directories and returns its path.
func HostDir(t *testing.T, names ...string) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range names {
		testutil.Must(t, os.MkdirAll(filepath.Join(dir, name), 0o755))
	}
	return dir
}

// Lgetxattr reads an extended attribute of a path, without following a link, into value.
func Lgetxattr(path, name string, value []byte) (int, error) {
	n, err := unix.Lgetxattr(path, name, value)
	if err != nil {
		return 0, &os.PathError{Op: "lgetxattr " + name, Path: path, Err: err}
	}
	return n, nil
}

// Mountpoints returns the mount points of a process's mount namespace, oldest first.
func Mountpoints(t *testing.T, pid int) []string {
	t.Helper()
	var out []string
	for _, line := range ReadLines(fmt.Sprintf("/proc/%d/mountinfo", pid)) {
		out = append(out, strings.Fields(line)[4])
	}
	if len(out) == 0 {
		t.Fatalf("process %d has no mounts", pid)
	}
	return out
}

// IsMountpoint reports whether path is a mount point in the tests' own mount namespace.
func IsMountpoint(t *testing.T, path string) bool {
	t.Helper()
	return slices.Contains(Mountpoints(t, os.Getpid()), path)
}

// MountTmpfs mounts a tmpfs with the given propagation and unmounts it when the test ends.
func MountTmpfs(t *testing.T, path string, propagation uintptr) {
	t.Helper()
	testutil.Must(t, syscall.Mount("test", path, "tmpfs", 0, ""))
	t.Cleanup(func() {
		if err := syscall.Unmount(path, syscall.MNT_DETACH); !errors.Is(err, syscall.EINVAL) { // no longer mounted
			testutil.Must(t, err)
		}
	})
	testutil.Must(t, syscall.Mount("", path, "", propagation, ""))
}

// NamespacePins returns the paths where bind mounts keep namespaces of a kind, for example "user:".
func NamespacePins(kind string) []string {
	var pins []string
	for _, line := range ReadLines("/proc/self/mountinfo") {
		if fields := strings.Fields(line); strings.HasPrefix(fields[3], kind) {
			pins = append(pins, fields[4])
		}
	}
	return pins
}
