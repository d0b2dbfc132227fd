package integration

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"berth/integration/harness"
	"berth/internal/diskusage"
)

// onQuotas puts a daemon's root on a filesystem with project quotas. It skips the test if the
// kernel does not support them.
func onQuotas(t *testing.T, mkfs ...string) func(*testing.T, *harness.Daemon) {
	t.Helper()
	image, place := filepath.Join(t.TempDir(), "image"), t.TempDir()
	harness.Must(t, errors.Join(os.WriteFile(image, nil, 0o600), os.Truncate(image, 512<<20)))
	if out, err := exec.Command(mkfs[0], append(mkfs[1:], image)...).CombinedOutput(); err != nil {
		t.Skipf("%s: %v, %s", mkfs[0], err, out)
	}
	if out, err := exec.Command("mount", "-o", "loop,prjquota", image, place).CombinedOutput(); err != nil {
		t.Skipf("the kernel does not support project quotas here: %v, %s", err, out)
	}
	quotas, err := diskusage.OpenQuotas(place)
	if err != nil {
		harness.Must(t, unix.Unmount(place, 0))
		t.Skip(err)
	}
	harness.Must(t, errors.Join(quotas.Close(), unix.Unmount(place, 0)))
	return func(t *testing.T, d *harness.Daemon) {
		disk := filepath.Join(d.Dir, "disk")
		harness.Must(t, os.Mkdir(disk, 0o711))
		out, err := exec.Command("mount", "-o", "loop,prjquota", image, disk).CombinedOutput()
		if err != nil {
			t.Fatalf("%v, %s", err, out)
		}
		d.Root, d.Mounts = filepath.Join(disk, "root"), append(d.Mounts, disk)
	}
}

// A container cannot write more than writable_layer_limit into its filesystem. Other containers can
// still write up to the limit.
func TestWritableLayerLimit(t *testing.T) {
	for name, mkfs := range map[string][]string{
		"ext4": {"mkfs.ext4", "-q", "-O", "project,quota", "-E", "quotatype=prjquota"},
		"xfs":  {"mkfs.xfs", "-q"},
	} {
		t.Run(name, func(t *testing.T) {
			d := harness.StartDaemon(t, onQuotas(t, mkfs...), harness.WithConfig("writable_layer_limit = 8388608\nstats_period = \"100ms\""))
			pod := d.RunPod(t, harness.HostNetwork)
			a, b := pod.Run(t), pod.Run(t)
			for _, c := range []*harness.Container{a, b} {
				c.Exec(t, "sh", "-c", "! dd if=/dev/zero of=/full bs=64k count=160 2>/dev/null")
				if size := c.Exec(t, "stat", "-c", "%s", "/full"); len(size) != len("8000000") || size < "7000000" || size > "8388608" {
					t.Errorf("the container wrote %s bytes", size)
				}
			}
			// A deleted file counts as long as it is open.
			hold := "exec 5>/open; dd if=/dev/zero bs=64k count=64 >&5 2>/dev/null; rm /open; exec sleep 100000"
			open := pod.Run(t, harness.Script(hold))
			harness.Eventually(t, "the deleted file is counted", func() error {
				if used := containerStats(t, open).WritableLayer.GetUsedBytes().GetValue(); used < 4<<20 || used > 8<<20 { // XFS reserves some space for a growing file
					return fmt.Errorf("the statistics show %d bytes", used)
				}
				return nil
			})
			d.Restart(t)
			b.Exec(t, "sh", "-c", "! dd if=/dev/zero of=/more bs=64k count=160 2>/dev/null && rm -f /full /more && dd if=/dev/zero of=/more bs=64k count=64 2>/dev/null")
			projects := projectsOf(t, d.Root)
			if len(projects) != 3 {
				t.Errorf("projects of three containers: %v", projects)
			}
			for _, c := range []*harness.Container{a, b, open} {
				harness.Must(t, d.Cri.RemoveContainer(t.Context(), c.Id))
			}
			quotas := harness.Get(diskusage.OpenQuotas(d.Root))(t)
			defer quotas.Close()
			harness.Eventually(t, "no file belongs to the projects", func() error {
				for id := range projects {
					if used, err := quotas.Usage(id); err != nil || used != (diskusage.Usage{}) {
						return fmt.Errorf("project %d: %+v, %v", id, used, err)
					}
				}
				return nil
			})
		})
	}
}

// projectsOf returns the quota projects of all layers.
func projectsOf(t *testing.T, root string) map[uint32]bool {
	t.Helper()
	projects := map[uint32]bool{}
	layers := harness.Get(filepath.Glob(root + "/rootfs/*/upper"))(t)
	for _, layer := range layers {
		out := harness.Get(exec.Command("lsattr", "-pd", layer).Output())(t)
		var id uint32
		harness.Get(fmt.Sscan(strings.Fields(string(out))[0], &id))(t)
		projects[id] = true
	}
	return projects
}

// If a configured limit cannot be enforced, the daemon does not start.
func TestWritableLayerLimitWithoutQuotas(t *testing.T) {
	d := harness.NewDaemon(t, harness.WithConfig("writable_layer_limit = 8388608")) // root is on a tmpfs
	out, err := d.ServeCommand().CombinedOutput()
	if err == nil || !strings.Contains(string(out), "writable_layer_limit cannot be enforced") {
		t.Errorf("%v, output:\n%s", err, out)
	}
	for _, place := range []string{d.State + "/pods", d.State, d.State + "-rootfs"} { // created early in the start
		if err := unix.Unmount(place, unix.MNT_DETACH); err != nil && err != unix.EINVAL && err != unix.ENOENT {
			t.Error(err)
		}
	}
}
