package integration

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/inventory"
	"berth/integration/machine"
)

// reset runs `berth reset` for a daemon's directories and returns its output.
func reset(d *harness.Daemon, args ...string) (string, error) {
	cmd := d.Command(append([]string{"reset"}, append(append(d.Flags(), "--grace-period", "3s"), args...)...)...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// resettable is a daemon with two pods. One is on the built-in network and has two containers, and
// the first of them handles SIGTERM. The other pod is on the node's network.
type resettable struct {
	d       *harness.Daemon
	before  inventory.Items
	stopped string // file that exists after the container handled SIGTERM
	pids    []int
}

func newResettable(t *testing.T) *resettable {
	t.Helper()
	r := &resettable{before: harness.MachineSnapshot(nil)}
	r.d = harness.NewDaemon(t, harness.WithBuiltInNetwork())
	r.d.Start(t)
	volume := t.TempDir()
	r.stopped = volume + "/stopped"
	pod := r.d.RunPod(t, harness.HostPort(18090, 80, runtimeapi.Protocol_TCP))
	graceful := pod.Run(t, harness.Script("trap 'touch /volume/stopped; exit 0' TERM; while :; do sleep 0.1; done"),
		harness.Mount(&runtimeapi.Mount{ContainerPath: "/volume", HostPath: volume}))
	for _, c := range []*harness.Container{graceful, pod.Run(t), r.d.RunPod(t, harness.HostNetwork).Run(t)} {
		r.pids = append(r.pids, c.Pid(t))
	}
	return r
}

// checkGone checks that nothing of the pods and of berth is left.
func (r *resettable) checkGone(t *testing.T) {
	t.Helper()
	for _, pid := range r.pids {
		harness.Equal(t, fmt.Sprintf("process %d is alive", pid), machine.Alive(pid), false)
	}
	for _, path := range []string{r.d.Root, r.d.State, r.d.State + "-rootfs"} {
		if _, err := os.Lstat(path); !os.IsNotExist(err) {
			t.Errorf("%s: %v, want that it does not exist", path, err)
		}
	}
	if _, err := os.Stat(r.stopped); err != nil {
		t.Errorf("a container got no SIGTERM: %v", err)
	}
	mounts := slices.DeleteFunc(machine.Mountpoints(t, os.Getpid()), func(m string) bool { return !strings.HasPrefix(m, r.d.Dir) })
	harness.Equal(t, "mounts of berth", strings.Join(mounts, " "), "")
	harness.NoMachineLeaks(t, r.before, r.d)
}

func TestResetRemovesEverything(t *testing.T) {
	r := newResettable(t)
	r.d.Stop(t)
	for _, pid := range r.pids {
		harness.Equal(t, "a container runs without the daemon", machine.Alive(pid), true)
	}
	out, err := reset(r.d, "--yes")
	harness.Must(t, err)
	for _, part := range []string{"containers: 2)", "images: 1", "bridge berth0", "nftables table inet berth-net-", "mount " + r.d.State, "directory " + r.d.Root, "Removed."} {
		if !strings.Contains(out, part) {
			t.Errorf("the output lacks %q:\n%s", part, out)
		}
	}
	r.checkGone(t)
	out, err = reset(r.d, "--yes")
	harness.Must(t, err)
	harness.Equal(t, "a second reset", out, "Berth has nothing on this node.\n")
}

func TestResetDryRunChangesNothing(t *testing.T) {
	r := newResettable(t)
	out, err := reset(r.d, "--dry-run")
	harness.Must(t, err)
	if !strings.Contains(out, fmt.Sprintf("daemon, process %d", r.d.Cmd.Process.Pid)) || !strings.Contains(out, "bridge berth0") {
		t.Errorf("output:\n%s", out)
	}
	for _, pid := range r.pids {
		harness.Equal(t, "a container runs", machine.Alive(pid), true)
	}
	r.d.StateSettles(t)
	out, err = reset(r.d, "--yes", "--stop-daemon")
	harness.Must(t, err)
	_ = out
	r.checkGone(t)
}

func TestResetRefusesRunningDaemon(t *testing.T) {
	d := harness.StartDaemon(t)
	c := d.RunPod(t).Run(t)
	out, err := reset(d, "--yes")
	if err == nil || !strings.Contains(out, fmt.Sprintf("berth is running (process %d)", d.Cmd.Process.Pid)) {
		t.Errorf("%v\n%s", err, out)
	}
	d.Stop(t)
	out, err = reset(d)
	if err == nil || !strings.Contains(out, "confirm the removal with --yes") {
		t.Errorf("%v\n%s", err, out)
	}
	d.Start(t)
	harness.Equal(t, "state of the container", c.Status(t).State, runtimeapi.ContainerState_CONTAINER_RUNNING)
}

// A daemon was killed while it had pods. Their processes and mounts are removed, too.
func TestResetAfterKilledDaemon(t *testing.T) {
	r := newResettable(t)
	r.d.Kill(t)
	if out, err := reset(r.d, "--yes"); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	r.checkGone(t)
}

// A pod that cannot be removed keeps its records, so that a later reset removes the rest of it.
func TestResetContinuesAfterFailure(t *testing.T) {
	before := harness.MachineSnapshot(nil)
	// The bridge of the CNI plugin is not berth's own, so reset must not remove it.
	t.Cleanup(func() { harness.RemoveLink(t, "berth0") })
	d := harness.NewDaemon(t)
	d.Start(t)
	pod := d.RunPod(t)
	pid := pod.Run(t).Pid(t)
	d.Stop(t)
	plugins := d.BinDirs
	d.BinDirs = []string{d.Dir + "/no-plugins"}
	out, err := reset(d, "--yes")
	if err == nil || !strings.Contains(out, "remove pods: pod "+pod.Id[:12]) || !strings.Contains(out, "no-plugins") {
		t.Errorf("a reset without CNI plugins: %v\n%s", err, out)
	}
	harness.Equal(t, "the container is alive", machine.Alive(pid), false)
	d.BinDirs = plugins
	if out, err = reset(d, "--yes"); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if _, err := os.Lstat(d.Root); !os.IsNotExist(err) {
		t.Errorf("%s: %v, want that it does not exist", d.Root, err)
	}
	harness.NoMachineLeaks(t, before, d)
}

// A mount point and the target of a link belong to the administrator: a reset empties them.
func TestResetKeepsMountPoints(t *testing.T) {
	for name, prepare := range map[string]func(t *testing.T, root string){
		"mount point": func(t *testing.T, root string) {
			harness.Must(t, os.MkdirAll(root, 0o700))
			harness.Must(t, unix.Mount("x", root, "tmpfs", 0, ""))
			t.Cleanup(func() { harness.Must(t, unix.Unmount(root, 0)) })
		},
		"link": func(t *testing.T, root string) { harness.Must(t, os.Symlink(t.TempDir(), root)) },
	} {
		t.Run(name, func(t *testing.T) {
			d := harness.NewDaemon(t)
			harness.Must(t, os.RemoveAll(d.Root))
			prepare(t, d.Root)
			d.Start(t)
			d.Stop(t)
			if out, err := reset(d, "--yes"); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			harness.Equal(t, "entries", len(harness.Get(os.ReadDir(d.Root))(t)), 0)
			d.Start(t) // the directory still works
			d.Stop(t)
			harness.Get(reset(d, "--yes"))(t)
		})
	}
}
