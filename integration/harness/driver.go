package harness

import (
	"context"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"testing"

	"berth/integration/inventory"
	"berth/integration/machine"
)

// driverEnv names the cgroup driver of the test run: cgroupfs (the default), or systemd on machines
// whose PID 1 is systemd.
const driverEnv = "BERTH_TEST_CGROUP_DRIVER"

func cgroupDriver() string {
	if driver := os.Getenv(driverEnv); driver != "" {
		return driver
	}
	return "cgroupfs"
}

func SystemdDriver() bool { return cgroupDriver() == "systemd" }

// machineGroup returns the cgroup that contains all pods' cgroups.
func machineGroup() string {
	if SystemdDriver() {
		return "/" + Machine + ".slice"
	}
	return "/" + Machine
}

// podPrefix returns the prefix of the names of the pods' cgroups.
func podPrefix() string {
	if SystemdDriver() {
		return Machine + "-pod"
	}
	return "pod"
}

// podCgroups returns the location of the pods' cgroups.
func podCgroups() inventory.Cgroups {
	return inventory.Cgroups{Group: machineGroup(), PodPrefix: podPrefix(), Systemd: SystemdDriver()}
}

// PodCgroup returns the path of a pod's cgroup with that name, below the cgroup mounts.
func PodCgroup(name string) string { return path.Join(machineGroup(), podPrefix()+name) }

// CgroupParent returns the name of a new pod's cgroup, as kubelet would choose it. The cgroup is
// removed with the daemon's pods. A dash in a slice's name separates parent and child, so it
// becomes an underscore.
func (d *Daemon) CgroupParent(name string) string {
	parent := PodCgroup(filepath.Base(d.Dir) + "-" + name)
	if SystemdDriver() {
		name = strings.ReplaceAll(filepath.Base(d.Dir)+"_"+name, "-", "_")
		parent = PodCgroup(name + ".slice")
	}
	d.naming.Lock()
	defer d.naming.Unlock()
	d.Parents = append(d.Parents, parent)
	return parent
}

// connectToSystemd runs and removes a pod. With its first pod the daemon opens connections to D-Bus
// and keeps them.
func (d *Daemon) connectToSystemd(t *testing.T) {
	t.Helper()
	d.RunPod(t, HostNetwork).Remove(t)
	d.removePodCgroups(t)
	d.Objects, d.Parents = nil, nil
}

// removePodCgroups removes the pods' cgroups, as kubelet does after the pods.
func (d *Daemon) removePodCgroups(t *testing.T) {
	t.Helper()
	for _, parent := range d.Parents {
		if SystemdDriver() {
			stopSlice(t, path.Base(parent))
		}
		for _, dir := range cgroupDirs(t, parent) {
			if err := os.Remove(dir); err != nil && !os.IsNotExist(err) {
				t.Errorf("the pod's cgroup is not empty: %v", err)
			}
		}
	}
}

// stopSlice stops a slice and waits until systemd has unloaded it. The slice must be empty, because
// systemd kills the processes in it.
func stopSlice(t *testing.T, slice string) {
	t.Helper()
	group, err := exec.CommandContext(context.Background(), "systemctl", "show", "--property", "ControlGroup", "--value", slice).Output()
	Must(t, err)
	dir := strings.TrimSpace(string(group))
	if dir == "" {
		return // the slice was never used
	}
	for _, dir := range machine.ReadDir("/sys/fs/cgroup" + dir) {
		if strings.HasSuffix(dir, ".scope") {
			t.Errorf("the pod's cgroup is not empty: %s is in %s", dir, slice)
		}
	}
	if out, err := exec.CommandContext(context.Background(), "systemctl", "stop", slice).CombinedOutput(); err != nil {
		t.Errorf("stop %s: %v: %s", slice, err, out)
	}
}

// cgroupDirs returns the existing directories of a cgroup, in every hierarchy.
func cgroupDirs(t *testing.T, group string) (dirs []string) {
	t.Helper()
	for _, pattern := range []string{"/sys/fs/cgroup" + group, "/sys/fs/cgroup/*" + group} {
		found := Get(filepath.Glob(pattern))(t)
		dirs = append(dirs, found...)
	}
	return dirs
}
