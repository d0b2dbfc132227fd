package integration

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
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
	reload := func(content, logged string) { t.Helper(); reloadWith(t, d, content, logged) }
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

// SIGHUP moves the metrics to another address. A used address refuses the whole reload.
func TestReloadMetricsAddress(t *testing.T) {
	used := harness.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer used.Close()
	d := harness.StartDaemon(t)
	address := harness.UnusedAddress(t)
	reloadWith(t, d, fmt.Sprintf("metrics.address = %q\n", address), "changed=metrics.address")
	harness.Must(t, tryGet("http://"+address+"/metrics"))
	reloadWith(t, d, fmt.Sprintf("metrics.address = %q\nlog.level = 'error'\n", used.Addr()), "address already in use")
	harness.Must(t, tryGet("http://"+address+"/metrics"))
	harness.Equal(t, "address", settings(t, d)["MetricsAddress"], any(address))
	reloadWith(t, d, "exec.max = 7\n", "options=exec.max")
	if err := tryGet("http://" + address + "/metrics"); err == nil {
		t.Error("the former address is served")
	}
}

// reloadWith replaces a fragment of the configuration, reloads it, and waits for a text in the log.
func reloadWith(t *testing.T, d *harness.Daemon, content, logged string) {
	t.Helper()
	fragment := filepath.Join(d.Dir, "config.d", "50-reload.toml")
	harness.Must(t, os.MkdirAll(filepath.Dir(fragment), 0o700))
	harness.Must(t, os.WriteFile(fragment, []byte(content), 0o600))
	harness.Must(t, d.Cmd.Process.Signal(syscall.SIGHUP))
	harness.Eventually(t, "the daemon logs the reload", func() error {
		if !slices.ContainsFunc(machine.ReadLines(d.LogFile()), func(line string) bool { return strings.Contains(line, logged) }) {
			return fmt.Errorf("no %q in the log", logged)
		}
		return nil
	})
}

func tryGet(url string) error {
	resp, err := http.Get(url)
	if err != nil {
		return err
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("GET %s: %s", url, resp.Status)
	}
	return nil
}

func settings(t *testing.T, d *harness.Daemon) (options map[string]any) {
	t.Helper()
	status := harness.Get(d.Cri.Status(t.Context(), true))(t)
	harness.Must(t, json.Unmarshal([]byte(status.Info["config"]), &options))
	return options
}
