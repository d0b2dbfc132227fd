package integration

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"berth/integration/harness"
	"berth/integration/machine"
)

// The layout of distributions with an immutable system: /usr is read-only, /etc is a read-only
// overlay, and CNI plugins and networks are below /opt and /var. Pods with a network run, and the
// daemon writes only below its root, its state and /run.
func TestReadOnlySystem(t *testing.T) {
	readOnly(t, "/usr", "/usr", "", unix.MS_BIND)
	upper := machine.HostDir(t, "upper", "work")
	machine.MountTmpfs(t, upper, unix.MS_PRIVATE)
	for _, dir := range []string{"upper", "work"} {
		harness.Must(t, os.Mkdir(filepath.Join(upper, dir), 0o755))
	}
	readOnly(t, "overlay", "/etc", "lowerdir=/etc,upperdir="+upper+"/upper,workdir="+upper+"/work", 0)
	for _, dir := range []string{"/usr/bin", "/etc"} {
		if err := os.WriteFile(filepath.Join(dir, "berth-test"), nil, 0o600); !strings.Contains(err.Error(), "read-only file system") {
			t.Fatalf("%s is not read-only: %v", dir, err)
		}
	}

	plugins := filepath.Join(machine.HostDir(t), "opt-cni-bin")
	harness.Must(t, exec.Command("cp", "-rL", harness.PluginDir, plugins).Run())
	d := harness.StartDaemon(t, func(_ *testing.T, d *harness.Daemon) { d.BinDirs = []string{plugins} })
	pod := d.RunPod(t)
	c := pod.Run(t)
	harness.Equal(t, "output of an exec", c.Exec(t, "cat", "/etc/hostname"), pod.Config.Hostname)
	harness.WantText(t, "addresses", c.Exec(t, "ip", "address"), pod.Ip(t))
	d.Restart(t)
	harness.Equal(t, "output of an exec after a restart", c.Exec(t, "echo", "text"), "text")
}

// readOnly mounts something read-only at a directory until the test ends.
func readOnly(t *testing.T, source, target, options string, flags uintptr) {
	t.Helper()
	kind := "overlay"
	if flags&unix.MS_BIND != 0 {
		kind, flags = "", flags|unix.MS_REC
	}
	harness.Must(t, unix.Mount(source, target, kind, flags, options))
	t.Cleanup(func() { harness.Must(t, unix.Unmount(target, unix.MNT_DETACH)) })
	harness.Must(t, unix.Mount("", target, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""))
}
