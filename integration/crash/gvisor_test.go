package crash

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"berth/integration/fixture"
	"berth/integration/harness"
)

// gvisors are operations that save and restore a sandbox of gVisor. A command of runsc does the
// work, and continues when the daemon dies.
var gvisors = []operation{
	{name: "CheckpointContainer_runsc", daemon: withRunsc, prepare: savable, request: checkpointContainer, restarted: sandboxContinues, more: true},
	{name: "CheckpointPod_runsc", daemon: withRunsc, prepare: savable, request: checkpointPod, restarted: sandboxContinues, more: true},
	{name: "RestorePod_runsc", daemon: withRunsc, prepare: with(byRunsc, savedAs()), request: restorePod, more: true},
	{name: "StartContainer_restored_runsc", daemon: withRunsc, prepare: with(byRunsc, savedAs(), do(restorePod)), request: startContainer, more: true},
	{name: "RemovePodSandbox_restored_runsc", daemon: withRunsc, prepare: with(byRunsc, savedAs(), do(restorePod), do(startContainer)), request: removePod, more: true},
}

// gvisor is the handler of pods in a sandbox of gVisor.
const gvisor = "runsc"

func byRunsc(_ *testing.T, w *world) { w.handler = gvisor }

// withRunsc configures gVisor's runsc as a handler. It skips the operation if there is none.
func withRunsc(t *testing.T) harness.DaemonOption {
	path := os.Getenv("BERTH_RUNSC")
	if path == "" {
		t.Skip("NOT TESTED: no runsc (BERTH_RUNSC)")
	}
	// gVisor uses the pod's addresses itself, so the bridge plugin finds none to masquerade.
	network := strings.Replace(fixture.Conflist("test", "/run/runsc-network", fixture.Range4), `"ipMasq": true`, `"ipMasq": false`, 1)
	return func(t *testing.T, d *harness.Daemon) {
		harness.WithHandler(gvisor, path)(t, d)
		harness.WithNetwork(network)(t, d)
	}
}

// savable starts a container in a sandbox and makes a directory for its checkpoint.
func savable(t *testing.T, w *world) {
	with(byRunsc, podRuns(), withContainer(waits), started)(t, w)
	w.checkpoint = t.TempDir()
}

// sandboxContinues checks that processes of a saved sandbox run, and that a checkpoint is complete
// or absent. It empties the directory for the next request.
func sandboxContinues(t *testing.T, w *world) {
	c := &harness.Container{Pod: &harness.Pod{D: w.d, Id: w.podID, Config: w.pod}, Id: w.id, Config: w.container}
	harness.Equal(t, "output of an exec", c.Exec(t, "echo", "runs"), "runs")
	left := harness.Get(os.ReadDir(w.checkpoint))(t)
	if len(left) == 1 && filepath.Join(w.checkpoint, left[0].Name()) == w.archivePath() {
		isValid(t, w, w.archivePath())
	} else if len(left) > 0 {
		isValid(t, w, w.checkpoint)
		w.emptyOutput(t)
	}
}
