package crash

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"berth/checkpoint/record"
	"berth/integration/harness"
	"berth/integration/inventory"
	"berth/integration/machine"
)

// leftover makes a difference of one kind. make returns a function that undoes it.
type leftover struct {
	kind string
	make func(*testing.T) (undo func())
}

// TestInventoryShowsEveryDifference checks the inventory itself. It shows each kind of leftover as
// a difference, and no difference without leftovers.
func TestInventoryShowsEveryDifference(t *testing.T) {
	d := harness.StartDaemon(t)
	w := &world{d: d}
	with(podRuns(hostPort), withContainer(exitsOnTerm), started, has(first))(t, w)
	pid := (&harness.Container{Pod: &harness.Pod{D: d, Id: w.podID, Config: w.pod}, Id: w.id, Config: w.container}).Pid(t)
	place := t.TempDir()
	harness.Must(t, unix.Mount("own", place, "tmpfs", 0, ""))
	harness.Must(t, unix.Mount("", place, "", unix.MS_PRIVATE, ""))
	t.Cleanup(func() { harness.Must(t, unix.Unmount(place, 0)) })
	before := d.Settled(t)
	for _, l := range slices.Concat(machineLeftovers(d, pid, place), fileLeftovers(d, w), daemonLeftovers(d, w)) {
		t.Run(l.kind, func(t *testing.T) { l.check(t, d, before) })
	}
	harness.Must(t, stopContainer(0)(t, w))
	if found := strings.Join(d.Settled(t).Differences(before), "\n"); !strings.Contains(found, `missing: process`) || !strings.Contains(found, "status of container") {
		t.Errorf("the differences do not show that the container was stopped: %q", found)
	}
}

// check makes the leftover and expects a difference until it is removed.
func (l leftover) check(t *testing.T, d *harness.Daemon, before inventory.Items) {
	undo := l.make(t)
	err := harness.WaitFor(func() error { // the daemon may accept a connection later
		if found := strings.Join(d.FullState(t).Differences(before), "\n"); !strings.Contains(found, l.kind+": ") {
			return fmt.Errorf("the differences are %q", found)
		}
		return nil
	})
	undo()
	if err != nil {
		t.Errorf("no difference: %v", err)
	}
	if left := d.Becomes(t, before); len(left) > 0 {
		t.Errorf("differences without a leftover:\n%s", strings.Join(left, "\n"))
	}
}

// machineLeftovers are processes, mounts, cgroups, addresses and firewall rules. pid is the
// container's process. place is the mount point of a private tmpfs.
func machineLeftovers(d *harness.Daemon, pid int, place string) []leftover {
	return []leftover{
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
		{"options of mount", func(t *testing.T) func() {
			remount := func(flags uintptr) {
				harness.Must(t, unix.Mount("", place, "", unix.MS_REMOUNT|unix.MS_BIND|flags, ""))
			}
			remount(unix.MS_NOEXEC)
			return func() { remount(0) }
		}},
		{"options of mount", func(t *testing.T) func() {
			harness.Must(t, unix.Mount("", place, "", unix.MS_SHARED, ""))
			return func() { harness.Must(t, unix.Mount("", place, "", unix.MS_PRIVATE, "")) }
		}},
		{"limit of cgroup", func(t *testing.T) func() {
			path := filepath.Join(machine.CgroupDir(t, pid, "pids"), "pids.max")
			old := harness.Get(os.ReadFile(path))(t)
			harness.Must(t, os.WriteFile(path, []byte("1234"), 0))
			return func() { harness.Must(t, os.WriteFile(path, bytes.TrimSpace(old), 0)) }
		}},
		{"rule", func(t *testing.T) func() {
			rule := func(action string) {
				if out, err := exec.Command("iptables", "-t", "nat", action, "PREROUTING", "-d", "10.99.0.1", "-j", "ACCEPT").CombinedOutput(); err != nil {
					t.Fatalf("iptables %s: %v: %s", action, err, out)
				}
			}
			rule("-A")
			return func() { rule("-D") }
		}},
	}
}

// fileLeftovers are differences of files in the daemon's directories.
func fileLeftovers(d *harness.Daemon, w *world) []leftover {
	return []leftover{
		{"file below root", file(filepath.Join(d.Root, "sandboxes/left"), "")},
		{"file below state", file(filepath.Join(d.State, "c/left"), "")},
		{"file of logs", file(filepath.Join(d.LogDir, "uid/left"), "")},
		{"file below state", func(t *testing.T) func() { // changed content
			path := filepath.Join(d.State, "pods", w.podID, "tmpfs/etc/hostname")
			content := harness.Get(os.ReadFile(path))(t)
			harness.Must(t, os.WriteFile(path, []byte("another\n"), 0o644))
			return func() { harness.Must(t, os.WriteFile(path, content, 0o644)) }
		}},
		{"file below root", func(t *testing.T) func() { // changed mode
			path := filepath.Join(d.Root, "rootfs", w.id, "upper")
			harness.Must(t, os.Chmod(path, 0o700))
			return func() { harness.Must(t, os.Chmod(path, 0o755)) }
		}},
		{"file below root", onLayer(w, func(t *testing.T, layer string) func() { // changed attribute
			dir := filepath.Join(layer, "fs/etc")
			harness.Must(t, unix.Lsetxattr(dir, "trusted.left", []byte("x"), 0))
			return func() { harness.Must(t, unix.Lremovexattr(dir, "trusted.left")) }
		})},
		{"file below root", onLayer(w, func(t *testing.T, layer string) func() { // changed time
			path := filepath.Join(layer, "fs/bin/program")
			info := harness.Get(os.Stat(path))(t)
			harness.Must(t, os.Chtimes(path, time.Time{}, info.ModTime().Add(time.Second)))
			return func() { harness.Must(t, os.Chtimes(path, time.Time{}, info.ModTime())) }
		})},
		{"file below root", onLayer(w, unlinkJoined)}, // a copy in place of a hard link
		{"file below root", func(t *testing.T) func() { // changed content of a record
			path := filepath.Join(d.Root, "pods", w.podID+".record")
			content := harness.Get(os.ReadFile(path))(t)
			_, body, err := record.Decode("pod", content)
			harness.Must(t, err)
			changed := map[string]any{}
			harness.Must(t, json.Unmarshal(body, &changed))
			changed["selinux"] = map[string]any{"process": "left"}
			records := harness.Get(record.OpenDir(filepath.Dir(path), "pod", 1, record.Process))(t)
			harness.Must(t, records.Write(w.podID, changed))
			return func() { harness.Must(t, os.WriteFile(path, content, 0o600)) }
		}},
		{"file below state", appended(filepath.Join(d.State, "libcontainer", w.id, "state.json"))},
		{"file of logs", appended(filepath.Join(w.pod.LogDirectory, w.container.LogPath))},
	}
}

// daemonLeftovers are a descriptor of the daemon, a container and an image.
func daemonLeftovers(d *harness.Daemon, w *world) []leftover {
	return []leftover{
		{"fd of the daemon", func(t *testing.T) func() {
			conn := harness.Get(net.Dial("unix", d.Socket))(t)
			return func() { harness.Must(t, conn.Close()) }
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
	}
}

// appended adds a line to a file.
func appended(path string) func(*testing.T) func() {
	return func(t *testing.T) func() {
		info := harness.Get(os.Stat(path))(t)
		f := harness.Get(os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0))(t)
		_, err := f.WriteString("left\n")
		harness.Must(t, errors.Join(err, f.Close()))
		return func() { harness.Must(t, os.Truncate(path, info.Size())) }
	}
}

// onLayer applies change to the layer that contains bin/program.
func onLayer(w *world, change func(t *testing.T, layer string) func()) func(*testing.T) func() {
	return func(t *testing.T) func() {
		found := harness.Get(filepath.Glob(filepath.Join(w.d.Root, "images/layers/*/fs/bin/program")))(t)
		if len(found) != 1 {
			t.Fatalf("%d layers contain the program, want 1", len(found))
		}
		return change(t, strings.TrimSuffix(found[0], "/fs/bin/program"))
	}
}

// unlinkJoined replaces a join's hard link to a layer's file with a copy of the same content, mode,
// owner and time.
func unlinkJoined(t *testing.T, layer string) func() {
	found := harness.Get(filepath.Glob(filepath.Join(layer, "../../joins/*/fs/bin/other")))(t)
	if len(found) != 1 {
		t.Fatalf("%d joins contain the link, want 1", len(found))
	}
	link := found[0]
	info := harness.Get(os.Stat(link))(t)
	dir, err := os.Stat(filepath.Dir(link))
	harness.Must(t, err)
	replace := func(make func() error) {
		harness.Must(t, os.Remove(link))
		harness.Must(t, make())
		harness.Must(t, os.Chtimes(filepath.Dir(link), time.Time{}, dir.ModTime()))
	}
	replace(func() error {
		content, err := os.ReadFile(filepath.Join(layer, "fs/bin/program"))
		return errors.Join(err, os.WriteFile(link, content, info.Mode()), os.Chmod(link, info.Mode()), os.Chtimes(link, time.Time{}, info.ModTime()))
	})
	return func() { replace(func() error { return os.Link(filepath.Join(layer, "fs/bin/program"), link) }) }
}

// file creates a file. The undo function removes it.
func file(path, content string) func(*testing.T) func() {
	return func(t *testing.T) func() {
		harness.Must(t, os.WriteFile(path, []byte(content), 0o600))
		return func() { harness.Must(t, os.Remove(path)) }
	}
}
