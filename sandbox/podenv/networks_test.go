package podenv

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"berth/cni"
	"berth/internal/task"
	"berth/sandbox/state"
)

// A GC that takes longer than the start waits is not interrupted. It continues in the background.
func TestCollectIsNotInterrupted(t *testing.T) {
	dir, log := t.TempDir(), slog.New(slog.DiscardHandler)
	path := func(name string) string { return filepath.Join(dir, name) }
	plugin := fmt.Sprintf("#!/bin/sh\n[ $CNI_COMMAND = GC ] || exit 0\ntouch %[1]s/begun\nwhile [ ! -e %[1]s/go ]; do sleep 0.01; done\ntouch %[1]s/done\n", dir)
	for name, content := range map[string]string{"bin/plugin": plugin, "net.d/1.conflist": `{"cniVersion": "1.1.0", "name": "n", "plugins": [{"type": "plugin"}]}`} {
		if err := os.MkdirAll(filepath.Dir(path(name)), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path(name), []byte(content), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	network, err := cni.New(cni.Config{ConfDir: path("net.d"), BinDirs: []string{path("bin")}, CacheDir: path("cache")}, log)
	if err != nil {
		t.Fatal(err)
	}
	defer network.Close()
	tasks := task.NewRunner(log, nil)
	n, err := OpenNetworks(network, dir, tasks, log)
	if err != nil {
		t.Fatal(err)
	}
	exists := func(name string) bool { _, err := os.Stat(path(name)); return err == nil }
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		for !exists("begun") {
			time.Sleep(time.Millisecond)
		}
		cancel()
	}()
	n.Collect(ctx, func(func(*state.PodSpec) bool) {})
	if !exists("begun") || exists("done") {
		t.Error("the start did not go on while the plugin works")
	}
	if err := os.WriteFile(path("go"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	tasks.Background.Close()
	if err := tasks.Background.Wait(t.Context()); err != nil {
		t.Error(err)
	}
	if !exists("done") {
		t.Error("the plugin was interrupted")
	}
}
