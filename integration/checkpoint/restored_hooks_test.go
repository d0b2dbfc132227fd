package checkpoint

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"berth/integration/harness"
	"berth/integration/machine"
)

// A CDI device adds an environment variable, a device node, a mount and hooks. A restored container
// has the device of the request: its node and mount work, and the hook that prepares the device
// runs again.
func TestRestoredCDIDevice(t *testing.T) {
	dir, host := t.TempDir(), machine.HostDir(t, "lib")
	harness.Must(t, os.WriteFile(filepath.Join(host, "lib/lib.so"), []byte("library\n"), 0o644))
	trace := filepath.Join(host, "trace")
	hook := func(name string) any {
		return map[string]any{"hookName": name, "path": "/bin/sh", "args": []string{"sh", "-c", fmt.Sprintf("cat >/dev/null; echo %s >>%s", name, trace)}}
	}
	spec := map[string]any{"cdiVersion": "0.7.0", "kind": "vendor.example/dev", "devices": []any{map[string]any{
		"name": "zero", "containerEdits": map[string]any{
			"env":         []string{"VENDOR_DEVICE=zero"},
			"deviceNodes": []any{map[string]any{"path": "/dev/vendor0", "hostPath": "/dev/zero", "permissions": "rw"}},
			"mounts":      []any{map[string]any{"hostPath": host + "/lib", "containerPath": "/usr/lib/vendor", "options": []string{"ro", "rbind"}}},
			"hooks":       []any{hook("createRuntime")},
		},
	}}}
	harness.Must(t, os.WriteFile(filepath.Join(dir, "vendor.json"), harness.Get(json.Marshal(spec))(t), 0o644))
	d := startDaemon(t, harness.WithConfig(fmt.Sprintf("devices.cdi_spec_dirs = [%q]", dir)))
	hooks := func() int { return strings.Count(string(harness.Get(os.ReadFile(trace))(t)), "createRuntime") }
	pod := d.RunPod(t)
	c := pod.Run(t, harness.Cdi("zero"), harness.Script("exec 7</dev/vendor0; echo $VENDOR_DEVICE; while :; do head -c 3 <&7 | wc -c; sleep 0.02; done"))
	c.WaitOutput(t, "zero\n3\n")
	harness.Equal(t, "hooks before", hooks(), 1)
	restored, list := revive(t, pod, c)
	list[0].WaitOutput(t, "3\n3\n")
	harness.Equal(t, "hooks after the restore", hooks(), 2)
	harness.Equal(t, "library", list[0].Exec(t, "cat", "/usr/lib/vendor/lib.so"), "library")
	harness.Equal(t, "environment of an exec", list[0].Exec(t, "sh", "-c", "echo $VENDOR_DEVICE"), "zero")
	harness.Equal(t, "node", list[0].Exec(t, "stat", "-c", "%t:%T", "/dev/vendor0"), "1:5")
	restored.Remove(t)
}
