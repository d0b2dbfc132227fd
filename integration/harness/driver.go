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

// driverEnv names the cgroup driver that the suite is run with: cgroupfs, which is
// the default, or systemd, where that is PID 1.
const driverEnv = "BERTH_TEST_CGROUP_DRIVER"

func cgroupDriver() string {
	if driver := os.Getenv(driverEnv); driver != "" {
		return driver
	}
	return "cgroupfs"
}

func SystemdDriver() bool { return cgroupDriver() == "systemd" }

// machineGroup is the cgroup that holds all pods' cgroups.
func machineGroup() string {
	if SystemdDriver() {
		return "/" + Machine + ".slice"
	}
	return "/" + Machine
}

// podPrefix begins the names of the pods' cgroups.
func podPrefix() string {
	if SystemdDriver() {
		return Machine + "-pod"
	}
	return "pod"
}

// podCgroups is where the cgroups of pods are.
func podCgroups() inventory.Cgroups {
	return inventory.Cgroups{Group: machineGroup(), PodPrefix: podPrefix(), Systemd: SystemdDriver()}
}

// PodCgroup is where a pod's cgroup of that name is below the cgroup mounts.
func PodCgroup(name string) string { return path.Join(machineGroup(), podPrefix()+name) }

// CgroupParent names a pod's cgroup as kubelet would, and has it removed with the
// daemon's pods. A dash in a slice's name stands for a slice above.
func (d *Daemon) CgroupParent(name string) string {
	parent := PodCgroup(filepath.Base(d.Dir) + "-" + name)
	if SystemdDriver() {
		name = strings.ReplaceAll(filepath.Base(d.Dir)+"_"+name, "-", "_")
		parent = PodCgroup(name + ".slice")
	}
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

// removePodCgroups does what kubelet does when pods are gone.
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
		return // nothing was ever in it
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
		found, err := filepath.Glob(pattern)
		Must(t, err)
		dirs = append(dirs, found...)
	}
	return dirs
}
