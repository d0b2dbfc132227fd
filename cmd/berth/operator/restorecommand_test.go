package operator

import (
	"encoding/json"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/checkpoint/process/archive"
	"berth/cmd/berth/client/clienttest"
	"berth/internal/testutil"
)

// savedFile writes a checkpoint of a pod, signed by the node with that root directory.
func savedFile(t *testing.T, root string) string {
	t.Helper()
	key, err := archive.LoadKey(root)
	testutil.Must(t, err)
	dir := t.TempDir()
	testutil.Must(t, os.MkdirAll(filepath.Join(dir, "app/checkpoint"), 0o700))
	for _, name := range []string{"config.dump", "spec.dump", "checkpoint/inventory.img", "checkpoint/descriptors.json"} {
		testutil.Must(t, os.WriteFile(filepath.Join(dir, "app", name), []byte("{}"), 0o600))
	}
	open, err := os.Open(dir)
	testutil.Must(t, err)
	defer open.Close()
	m := savedPod(t, nil, nil)
	m.Pod.Handler, m.Node = "", archive.Node{Berth: "0.3", CRIU: 40201, Kernel: "6.1", Architecture: runtime.GOARCH}
	testutil.Must(t, archive.Seal(t.Context(), open, m, key, nil, false))
	return dir
}

// nodeConsole is a console of a runtime with that root directory and checkpoint.restore, and the
// image of savedPod.
func nodeConsole(t *testing.T, root, restore string) *console {
	t.Helper()
	config, err := json.Marshal(map[string]any{"Root": root, "CheckpointRestore": restore, "DefaultHandler": "berth"})
	testutil.Must(t, err)
	c := newConsole(t, &clienttest.Server{Config: string(config)})
	c.Registry["busybox"] = &runtimeapi.Image{Id: testImageID, RepoTags: []string{"busybox:latest"}}
	return c
}

// A restored pod gets the cgroup that the user chooses, never that of the checkpoint.
func TestRestoreCommand(t *testing.T) {
	root := t.TempDir()
	file := savedFile(t, root)
	for _, test := range []struct {
		args []string
		want string
	}{{nil, ""}, {[]string{"--cgroup-parent", "/berth.slice"}, "/berth.slice"}} {
		c := nodeConsole(t, root, "trusted")
		c.must(append([]string{"restore", file, "--run-dir", c.runDir, "--name", "copy"}, test.args...)...)
		configs := c.PodConfigs()
		if len(configs) != 1 || configs[0].GetLinux().GetCgroupParent() != test.want || configs[0].GetMetadata().GetName() != "copy" {
			t.Errorf("%q: pods %v", test.args, configs)
		}
		if want := []string{"RestorePod copy", "StartContainer app/0"}; !slices.Equal(c.Calls(), want) {
			t.Errorf("calls %q, want %q", c.Calls(), want)
		}
	}
}

// While restores are off, the commands say so, also those that restore nothing.
func TestRestoreCommandOff(t *testing.T) {
	root := t.TempDir()
	file := savedFile(t, root)
	for _, args := range [][]string{{"restore", file}, {"restore", file, "--dry-run"}} {
		c := nodeConsole(t, root, "off")
		c.must("pull", "busybox")
		stdout, stderr, code := c.do(args...)
		if code != 1 || !strings.Contains(stdout+stderr, "checkpoint.restore is off") || !strings.Contains(stdout+stderr, "web") {
			t.Errorf("%q: exit code %d\n%s%s", args, code, stdout, stderr)
		}
		if slices.ContainsFunc(c.Calls(), func(call string) bool { return strings.HasPrefix(call, "RestorePod") }) {
			t.Errorf("%q: calls %q", args, c.Calls())
		}
	}
}
