package podenv

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"berth/cni"
	"berth/internal/task"
	"berth/internal/testutil"
	"berth/sandbox/state"
)

// openNetwork returns a network below dir whose only plugin is a script.
func openNetwork(t *testing.T, dir, plugin string) (*Networks, *task.Runner) {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	path := func(name string) string { return filepath.Join(dir, name) }
	for name, content := range map[string]string{"bin/plugin": plugin, "net.d/1.conflist": `{"cniVersion": "1.1.0", "name": "n", "plugins": [{"type": "plugin"}]}`} {
		testutil.Must(t, os.MkdirAll(filepath.Dir(path(name)), 0o700))
		testutil.Must(t, os.WriteFile(path(name), []byte(content), 0o700))
	}
	network, err := cni.New(cni.Config{ConfDir: path("net.d"), BinDirs: []string{path("bin")}, CacheDir: path("cache")}, log)
	testutil.Must(t, err)
	t.Cleanup(network.Close)
	tasks := task.NewRunner(log, nil)
	n, err := OpenNetworks(network, dir, tasks, log)
	testutil.Must(t, err)
	return n, tasks
}

// kubelet replaces the sandbox of a pod without an address, so an ADD without an address fails.
func TestAttachNeedsAddress(t *testing.T) {
	n, _ := openNetwork(t, t.TempDir(), "#!/bin/sh\necho '{\"cniVersion\": \"1.0.0\"}'\n")
	spec := &state.PodSpec{ID: "pod", NetNS: "/proc/self/ns/net"}
	attachment, _, err := n.Plan(spec)
	testutil.Must(t, err)
	_, err = n.Attach(t.Context(), spec, &attachment)
	testutil.WantError(t, err, codes.FailedPrecondition, `network "n" returned no address for pod`)
}

// A GC that takes longer than the start waits is not interrupted. It continues in the background.
func TestCollectIsNotInterrupted(t *testing.T) {
	dir := t.TempDir()
	plugin := fmt.Sprintf("#!/bin/sh\n[ $CNI_COMMAND = GC ] || exit 0\ntouch %[1]s/begun\nwhile [ ! -e %[1]s/go ]; do sleep 0.01; done\ntouch %[1]s/done\n", dir)
	n, tasks := openNetwork(t, dir, plugin)
	exists := func(name string) bool { _, err := os.Stat(filepath.Join(dir, name)); return err == nil }
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		for !exists("begun") {
			time.Sleep(time.Millisecond)
		}
		cancel()
	}()
	n.Collect(ctx, func(func(*state.PodSpec) bool) {})
	if !exists("begun") || exists("done") {
		t.Error("the start waited for the plugin")
	}
	testutil.Must(t, os.WriteFile(filepath.Join(dir, "go"), nil, 0o600))
	tasks.Background.Close()
	testutil.Must(t, tasks.Background.Wait(t.Context()))
	if !exists("done") {
		t.Error("the plugin was interrupted")
	}
}
