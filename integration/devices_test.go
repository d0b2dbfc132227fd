package integration

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
)

// The tests' devices are null and full, under other names.
const (
	nullDevice = 1<<8 | 3
	fullDevice = 1<<8 | 7
)

func device(d *runtimeapi.Device) harness.ContainerOption {
	return func(c *runtimeapi.ContainerConfig) { c.Devices = append(c.Devices, d) }
}

// hostDevices creates a host directory with device nodes and a subdirectory of device nodes.
func hostDevices(t *testing.T) string {
	t.Helper()
	dir := machine.HostDir(t, "many/below")
	for name, dev := range map[string]int{"null": nullDevice, "many/full": fullDevice, "many/below/null": nullDevice} {
		harness.Must(t, unix.Mknod(filepath.Join(dir, name), unix.S_IFCHR|0o600, dev))
	}
	harness.Must(t, os.Symlink("null", filepath.Join(dir, "link")))
	harness.Must(t, os.WriteFile(filepath.Join(dir, "file"), nil, 0o600))
	return dir
}

func TestDevices(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	dir := hostDevices(t)
	c := pod.Run(t,
		device(&runtimeapi.Device{HostPath: dir + "/link", ContainerPath: "/dev/one", Permissions: "rw"}),
		device(&runtimeapi.Device{HostPath: dir + "/many", ContainerPath: "/dev/many", Permissions: "rwm"}))
	harness.Equal(t, "nodes", c.Exec(t, "sh", "-c", "stat -c '%n %t:%T %a' /dev/one /dev/many/full /dev/many/below/null"),
		"/dev/one 1:3 600\n/dev/many/full 1:7 600\n/dev/many/below/null 1:3 600")
	c.Exec(t, "sh", "-c", "echo x >/dev/one && head -c 1 /dev/many/full")
	for _, test := range []struct{ path, says string }{
		{dir + "/missing", "does not exist"}, {dir + "/file", "is not a device"}, {dir + "/many/below/../..", ""},
	} {
		_, err := pod.TryCreate(t, device(&runtimeapi.Device{HostPath: test.path, ContainerPath: "/dev/x"}))
		if test.says == "" {
			harness.Must(t, err) // a directory of devices is accepted
			continue
		}
		harness.WantCode(t, err, codes.InvalidArgument, test.path, test.says)
	}
}

// Device permissions limit reads and writes. The device cgroup allows mknod to every process with
// CAP_MKNOD, as in other runtimes.
func TestDevicePermissions(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	dir := machine.HostDir(t)
	const loop0 = 7 << 8 // no container has it by default
	harness.Must(t, unix.Mknod(filepath.Join(dir, "loop"), unix.S_IFBLK|0o600, loop0))
	const try = "exec 2>/dev/null; dd if=/dev/x of=/dev/null count=0 && echo r; dd if=/dev/null of=/dev/x count=0 conv=notrunc && echo w; true"
	for _, c := range []struct{ permissions, want string }{{"r", "r\n"}, {"w", "w\n"}, {"rw", "r\nw\n"}, {"m", ""}} {
		harness.Equal(t, "allowed with "+c.permissions, pod.Sh(t, try,
			device(&runtimeapi.Device{HostPath: dir + "/loop", ContainerPath: "/dev/x", Permissions: c.permissions})), c.want)
	}
}

// A privileged container has the host's devices.
func TestDevicesPrivileged(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork, privilegedPod)
	harness.Must(t, unix.Mknod("/dev/berth-test", unix.S_IFCHR|0o640, nullDevice))
	t.Cleanup(func() { harness.Must(t, os.Remove("/dev/berth-test")) })
	const look = "stat -c '%t:%T %a' /dev/berth-test 2>/dev/null || echo none"
	harness.Equal(t, "node in a privileged container", pod.Sh(t, look, harness.Security(harness.Privileged)), "1:3 640\n")
	harness.Equal(t, "node in another", pod.Sh(t, look), "none\n")
}

// With devices.ownership_from_security_context a user other than root can use a device.
func TestDeviceOwnership(t *testing.T) {
	dir := hostDevices(t)
	who := harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.RunAsUser, s.RunAsGroup = &runtimeapi.Int64Value{Value: 1001}, &runtimeapi.Int64Value{Value: 2001}
	})
	for setting, want := range map[string]string{"true": "1001:2001\nwritten\n", "false": "0:0\nrefused\n"} {
		t.Run(setting, func(t *testing.T) {
			d := harness.StartDaemon(t, harness.WithConfig("devices.ownership_from_security_context = "+setting))
			harness.Equal(t, "owner and use", d.RunPod(t, harness.HostNetwork).Sh(t, "stat -c %u:%g /dev/x; (echo x >/dev/x) 2>/dev/null && echo written || echo refused",
				who, device(&runtimeapi.Device{HostPath: dir + "/null", ContainerPath: "/dev/x", Permissions: "rw"})), want)
		})
	}
}

// cdiDir makes a directory for CDI specs and an option that makes the daemon read it.
func cdiDir(t *testing.T) (dir string, option harness.DaemonOption) {
	t.Helper()
	dir = t.TempDir()
	return dir, harness.WithConfig(fmt.Sprintf("devices.cdi_spec_dirs = [%q, %q]", dir, dir+"/missing"))
}

// writeCDI writes a spec of vendor.example/dev.
func writeCDI(t *testing.T, file string, devices map[string]any) {
	t.Helper()
	var list []any
	for name, edits := range devices {
		list = append(list, map[string]any{"name": name, "containerEdits": edits})
	}
	content := harness.Get(json.Marshal(map[string]any{"cdiVersion": "0.7.0", "kind": "vendor.example/dev", "devices": list}))(t)
	harness.Must(t, os.WriteFile(file, content, 0o600))
}

func TestCDI(t *testing.T) {
	dir, option := cdiDir(t)
	devices := hostDevices(t)
	lib := machine.HostDir(t)
	harness.Must(t, os.WriteFile(filepath.Join(lib, "lib.so"), []byte("library\n"), 0o600))
	writeCDI(t, filepath.Join(dir, "vendor.json"), map[string]any{
		"zero": map[string]any{
			"env":            []string{"VENDOR_DEVICE=zero"},
			"additionalGids": []int{4711},
			"deviceNodes":    []any{map[string]any{"path": "/dev/vendor0", "hostPath": devices + "/null", "permissions": "rw"}},
			"mounts":         []any{map[string]any{"hostPath": lib, "containerPath": "/usr/lib/vendor", "options": []string{"ro", "rbind"}}},
		},
		"one": map[string]any{"deviceNodes": []any{map[string]any{"path": "/dev/vendor1", "type": "b", "major": 7, "minor": 1, "uid": 1001, "gid": 2001}}},
	})
	harness.Must(t, os.WriteFile(filepath.Join(dir, "broken.json"), []byte("{"), 0o600)) // ignored: no container uses it
	d := harness.StartDaemon(t, option)
	pod := d.RunPod(t, harness.HostNetwork)
	c := pod.Run(t, harness.Cdi("zero", "one"))
	harness.Equal(t, "nodes", c.Exec(t, "stat", "-c", "%n %t:%T %u:%g", "/dev/vendor0", "/dev/vendor1"), "/dev/vendor0 1:3 0:0\n/dev/vendor1 7:1 1001:2001")
	c.Exec(t, "sh", "-c", "echo x >/dev/vendor0")
	harness.Equal(t, "the device's library", c.Exec(t, "cat", "/usr/lib/vendor/lib.so"), "library")
	if _, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"touch", "/usr/lib/vendor/new"}, 0); err == nil {
		t.Error("the library's directory is writable")
	}
	harness.Equal(t, "environment of an exec", c.Exec(t, "sh", "-c", "echo $VENDOR_DEVICE"), "zero")
	harness.Equal(t, "environment", pod.Sh(t, "echo $VENDOR_DEVICE", harness.Cdi("zero")), "zero\n")
	if groups := strings.Fields(machine.StatusField(t, c.Pid(t), "Groups")); !slices.Contains(groups, "4711") {
		t.Errorf("groups are %q", groups)
	}
	harness.Equal(t, "devices of a container without CDI devices", pod.Sh(t, "ls /dev | grep vendor; true"), "")
	// Annotations have no effect (CVE-2026-53492).
	harness.Equal(t, "devices of a container with an annotation", pod.Sh(t, "ls /dev | grep vendor; true",
		func(c *runtimeapi.ContainerConfig) { c.Annotations["cdi.k8s.io/vendor"] = "vendor.example/dev=zero" }), "")

	_, err := pod.TryCreate(t, harness.Cdi("zero", "missing"))
	harness.WantCode(t, err, codes.FailedPrecondition, "vendor.example/dev=missing", "broken.json")
	_, err = pod.TryCreate(t, func(c *runtimeapi.ContainerConfig) { c.CDIDevices = []*runtimeapi.CDIDevice{{Name: "zero"}} })
	harness.WantCode(t, err, codes.InvalidArgument, `"zero"`)
	// The daemon reads new spec files without a restart.
	writeCDI(t, filepath.Join(dir, "late.json"), map[string]any{"missing": map[string]any{"env": []string{"VENDOR_DEVICE=late"}}})
	harness.Equal(t, "environment of the late device", pod.Sh(t, "echo $VENDOR_DEVICE", harness.Cdi("missing")), "late\n")
}

// Hooks of a CDI spec run in the namespaces that the runtime-spec requires. Their standard input
// contains the state with the bundle.
func TestCDIHooks(t *testing.T) {
	dir, option := cdiDir(t)
	trace := machine.HostDir(t)
	hook := func(name string) any {
		script := fmt.Sprintf(`cat >%[1]s/%[2]s.state; bundle=$(sed 's/.*"bundle":"\([^"]*\)".*/\1/' %[1]s/%[2]s.state); `+
			`cp $bundle/config.json %[1]s/%[2]s.config; readlink /proc/self/ns/mnt >%[1]s/%[2]s.ns; `+
			`root=$(sed 's/.*"root":{"path":"\([^"]*\)".*/\1/' $bundle/config.json); echo %[2]s >>$root/hooks`, trace, name)
		return map[string]any{"hookName": name, "path": "/bin/sh", "args": []string{"sh", "-c", script}, "env": []string{"PATH=/usr/bin:/bin"}}
	}
	writeCDI(t, filepath.Join(dir, "vendor.json"), map[string]any{
		"hooked": map[string]any{"hooks": []any{hook("createRuntime"), hook("createContainer")}},
		"bad":    map[string]any{"hooks": []any{map[string]any{"hookName": "createContainer", "path": "/bin/false"}}},
		"after":  map[string]any{"hooks": []any{map[string]any{"hookName": "poststop", "path": "/bin/true"}}},
	})
	d := harness.StartDaemon(t, option)
	pod := d.RunPod(t, harness.HostNetwork)
	c := pod.Run(t, harness.Cdi("hooked"))
	harness.Equal(t, "output of the hooks in the root directory", c.Exec(t, "cat", "/hooks"), "createRuntime\ncreateContainer")
	for _, name := range []string{"createRuntime", "createContainer"} {
		var state struct{ ID, Status, Bundle string }
		content, err := os.ReadFile(filepath.Join(trace, name+".state"))
		harness.Must(t, err)
		harness.Must(t, json.Unmarshal(content, &state))
		harness.Equal(t, "container of "+name, state.ID, c.Id)
		harness.Equal(t, "bundle of "+name, state.Bundle, filepath.Join(d.State, "c", c.Id))
		if _, err := os.Stat(filepath.Join(trace, name+".config")); err != nil {
			t.Errorf("%s found no config.json: %v", name, err)
		}
	}
	ns := harness.Get(os.ReadFile(filepath.Join(trace, "createContainer.ns")))(t)
	harness.Equal(t, "mount namespace of createContainer", strings.TrimSpace(string(ns)), machine.Namespace(t, c.Pid(t), "mnt"))

	failing := pod.Create(t, harness.Cdi("bad"))
	harness.WantCode(t, d.Cri.StartContainer(t.Context(), failing.Id), codes.Internal, "createContainer hook", "exit status 1")
	_, err := pod.TryCreate(t, harness.Cdi("after"))
	harness.WantCode(t, err, codes.Unimplemented, "poststop", "vendor.example/dev=after")
}
