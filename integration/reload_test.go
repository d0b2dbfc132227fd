package integration

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"berth/integration/harness"
	"berth/integration/machine"
)

// SIGHUP applies the options that can change. It refuses a faulty file as a whole.
func TestReload(t *testing.T) {
	d := harness.StartDaemon(t)
	fragment := filepath.Join(d.Dir, "config.d", "50-reload.toml")
	harness.Must(t, os.Mkdir(filepath.Dir(fragment), 0o700))
	reload := func(content, logged string) {
		t.Helper()
		harness.Must(t, os.WriteFile(fragment, []byte(content), 0o600))
		harness.Must(t, d.Cmd.Process.Signal(syscall.SIGHUP))
		harness.Eventually(t, "the daemon logs the reload", func() error {
			if !slices.ContainsFunc(machine.ReadLines(d.LogFile()), func(line string) bool { return strings.Contains(line, logged) }) {
				return fmt.Errorf("no %q in the log", logged)
			}
			return nil
		})
	}
	id := d.Pull(t, harness.BaseImage)

	reload("[handlers.second]\n[image]\npinned = ['a/UPPER']\n", "configuration not reloaded")
	if announced, _ := handlersOf(t, d); announced["second"] != nil {
		t.Error("a refused configuration added a handler")
	}
	reload(fmt.Sprintf("exec.max = 7\n[image]\npinned = [%q]\n[handlers.second]\n", id), "options=exec.max")
	if settings(t, d)["MaxExecs"] == 7.0 {
		t.Error("Status shows an option that needs a restart")
	}
	if !d.ImageStatus(t, id).Pinned {
		t.Error("the image is not pinned")
	}
	announced, _ := handlersOf(t, d)
	if announced["second"] == nil {
		t.Errorf("handlers after the reload: %v", announced)
	}
}

func settings(t *testing.T, d *harness.Daemon) (options map[string]any) {
	t.Helper()
	status := harness.Get(d.Cri.Status(t.Context(), true))(t)
	harness.Must(t, json.Unmarshal([]byte(status.Info["config"]), &options))
	return options
}
