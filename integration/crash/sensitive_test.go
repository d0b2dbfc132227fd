package crash

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"berth/integration/harness"
)

// What the enumeration must not miss, it sees: each kind of leftover is a difference, and none without one.
func TestDifferencesAreSeen(t *testing.T) {
	d := harness.StartDaemon(t)
	w := &world{d: d}
	with(podRuns(hostPort), withContainer(obedient), started)(t, w)
	before := d.Settled(t)
	for _, c := range []struct {
		kind string
		make func(*testing.T) (undo func())
	}{
		{"process", func(t *testing.T) func() {
			cmd := exec.Command("sleep", "100000")
			harness.Must(t, cmd.Start())
			return func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }
		}},
		{"mount", func(t *testing.T) func() {
			dir := t.TempDir()
			harness.Must(t, syscall.Mount("left", dir, "tmpfs", 0, ""))
			return func() { harness.Must(t, syscall.Unmount(dir, 0)) }
		}},
		{"network namespace", file("/run/netns/berth-left", "")},
		{"cgroup", func(t *testing.T) func() {
			dirs, err := filepath.Glob("/sys/fs/cgroup/*/" + harness.Machine)
			if err != nil || len(dirs) == 0 {
				dirs = []string{"/sys/fs/cgroup/" + harness.Machine}
			}
			harness.Must(t, os.Mkdir(dirs[0]+"/left", 0o755))
			return func() { harness.Must(t, os.Remove(dirs[0]+"/left")) }
		}},
		{"CNI address", file(filepath.Join(d.DataDir, "test/10.88.0.99"), "left")},
		{"file below root", file(filepath.Join(d.Root, "sandboxes/left"), "")},
		{"file below state", file(filepath.Join(d.State, "c/left"), "")},
		{"file of logs", file(filepath.Join(d.LogDir, "uid/left"), "")},
		{"file below root", func(t *testing.T) func() { // its content
			path := filepath.Join(d.Root, "sandboxes", w.podID, "hostname")
			content, err := os.ReadFile(path)
			harness.Must(t, err)
			harness.Must(t, os.WriteFile(path, []byte("another\n"), 0o644))
			return func() { harness.Must(t, os.WriteFile(path, content, 0o644)) }
		}},
		{"file below root", func(t *testing.T) func() { // its mode
			path := filepath.Join(d.Root, "rootfs", w.id, "upper")
			harness.Must(t, os.Chmod(path, 0o700))
			return func() { harness.Must(t, os.Chmod(path, 0o755)) }
		}},
		{"listed container", func(t *testing.T) func() {
			other := *w
			withContainer(harness.ContainerNamed("other"))(t, &other)
			created(t, &other)
			return func() { harness.Must(t, removeContainer(t, &other)) }
		}},
		{"listed image", func(t *testing.T) func() {
			has(second)(t, w)
			return func() { harness.Must(t, removeImage(second)(t, w)) }
		}},
	} {
		t.Run(c.kind, func(t *testing.T) {
			undo := c.make(t)
			found := strings.Join(d.FullState(t).Differences(before), "\n")
			undo()
			if !strings.Contains(found, c.kind+": ") {
				t.Errorf("not seen; the differences are %q", found)
			}
			if left := d.Becomes(t, before); len(left) > 0 {
				t.Errorf("differences without a cause:\n%s", strings.Join(left, "\n"))
			}
		})
	}
	harness.Must(t, stopContainer(0)(t, w))
	if found := strings.Join(d.Settled(t).Differences(before), "\n"); !strings.Contains(found, `missing: process`) || !strings.Contains(found, "status of container") {
		t.Errorf("that the container was stopped is not seen: %q", found)
	}
}

// file makes a file.
func file(path, content string) func(*testing.T) func() {
	return func(t *testing.T) func() {
		harness.Must(t, os.WriteFile(path, []byte(content), 0o600))
		return func() { harness.Must(t, os.Remove(path)) }
	}
}
