package crash

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"berth/checkpoint/record"
	"berth/image"
	"berth/integration/harness"
	"berth/internal/failpoint/points"
)

// starts lists starts of the daemon on a state that was changed while no daemon ran.
var starts = []operation{
	{name: "Start", spoil: nothing, prepare: with(podRuns(hostPort), withContainer(exitsOnTerm), started), request: doNothing},
	{name: "Start_lost_records", spoil: loseRecords, prepare: with(otherPod, podRuns(hostPort), withContainer(exitsOnTerm), started), request: doNothing, more: true},
	{name: "Start_lost_records_userNamespace_imageVolume", spoil: loseRecords,
		prepare: with(otherPod, podRuns(podInUserNamespace), withContainer(exitsOnTerm, containerInUserNamespace, imageVolume), started), request: doNothing, more: true},
	{name: "Start_lost_records_crun", daemon: withCrun, spoil: loseRecords,
		prepare: with(otherPod, byCrun, podRuns(harness.HostNetwork), withContainer(exitsOnTerm), started), request: doNothing, more: true},
	{name: "Start_lost_records_shim", daemon: withShim, spoil: loseRecords,
		prepare: with(otherPod, byShim, podRuns(harness.HostNetwork), withContainer(exitsOnTerm), started), request: doNothing, more: true},
	{name: "Start_lost_record_of_created_container", spoil: loseContainerRecord, prepare: with(podRuns(hostPort), withContainer(), created), request: doNothing, more: true},
	{name: "Start_damaged_records", named: record.SetAsideDir, spoil: with(damageRecords, emptyAddress), prepare: with(otherPod, podRuns(hostPort), withContainer(exitsOnTerm), started), request: doNothing},
	{name: "Start_other_programs", spoil: with(renameProgram("pause"), renameProgram("monitor")), prepare: with(podRuns(hostPort), withContainer(exitsOnTerm), started), request: doNothing, more: true},
	{name: "Start_damaged_layer", named: record.SetAsideDir, spoil: damageLayers, prepare: has(first), request: pull(first), more: true},
	{name: "Start_lost_state_of_running_pod", spoil: loseProcesses, prepare: with(podRuns(hostPort), withContainer(exitsOnTerm), started), request: doNothing, more: true},
	{name: "Start_lost_state", spoil: func(t *testing.T, w *world) { w.d.LoseState(t) }, prepare: nothing, request: doNothing, more: true},
}

// doNothing sends no request. After the daemon's start kubelet needs none.
func doNothing(*testing.T, *world) error { return nil }

func (w *world) podRecord() string { return filepath.Join(w.d.Root, "pods", w.podID+".record") }
func (w *world) containerRecord() string {
	return filepath.Join(w.d.Root, "containers", w.id+".record")
}

// otherPod runs a pod whose record the case keeps. Without any record of a running pod no daemon
// starts.
func otherPod(t *testing.T, w *world) {
	harness.Get(w.d.Cri.RunPodSandbox(t.Context(), w.d.PodConfig(t, w.named("other", "other"), harness.HostNetwork), ""))(t)
}

// loseProcesses kills all pods and empties the state directory, as a restart of a node that is a
// container does.
func loseProcesses(t *testing.T, w *world) {
	w.d.KillAll(t)
	w.d.LoseState(t)
}

// loseRecords removes records, as a power failure can.
func loseRecords(t *testing.T, w *world) {
	harness.Must(t, os.Remove(w.podRecord()))
	loseContainerRecord(t, w)
}

func loseContainerRecord(t *testing.T, w *world) { harness.Must(t, os.Remove(w.containerRecord())) }

// damageRecords truncates records and leaves a temporary file.
func damageRecords(t *testing.T, w *world) {
	cutShort(t, w.podRecord())
	cutShort(t, w.containerRecord())
	harness.Must(t, os.WriteFile(filepath.Join(filepath.Dir(w.podRecord()), "."+w.podID+".tmp"), []byte("berth"), 0o600))
}

// damageLayers truncates the records of all layers.
func damageLayers(t *testing.T, w *world) {
	var records []string
	for _, root := range image.LayerRoots(filepath.Join(w.d.Root, "images")) {
		records = append(records, harness.Get(filepath.Glob(filepath.Join(root, "layers/*/layer.json")))(t)...)
	}
	if len(records) == 0 {
		t.Fatal("no layers found")
	}
	for _, path := range records {
		cutShort(t, path)
	}
}

// cutShort truncates a file to the header that all records of its kind share.
func cutShort(t *testing.T, path string) { harness.Must(t, os.Truncate(path, 16)) }

// emptyAddress creates an empty address file of host-local. A power failure between creation and
// write leaves such a file.
func emptyAddress(t *testing.T, w *world) {
	harness.Must(t, os.WriteFile(filepath.Join(w.d.DataDir, "test/10.88.0.99"), nil, 0o600))
}

// renameProgram renames an installed program as if another version had installed it.
func renameProgram(name string) func(*testing.T, *world) {
	return func(t *testing.T, w *world) {
		installed := harness.Get(filepath.Glob(filepath.Join(w.d.Root, "bin", name+"-*")))(t)
		if len(installed) != 1 {
			t.Fatalf("installed programs are %v, want one", installed)
		}
		harness.Must(t, os.Rename(installed[0], filepath.Join(w.d.Root, "bin", name+"-0123456789abcdef")))
	}
}

// unkilled lists points that never kill the daemon in an operation, with reasons.
var unkilled = map[string]string{
	"launch.processes-removed": "needs a lost launcher, which TestShimCrash tests",
	"exec.kill-left":           lostExec,
	"exec.remove-directory":    lostExec,
	"exec.directory-removed":   lostExec,
	"exec.left-killed":         lostExec,
	"killtree.frozen":          lostExec,
	"killtree.signalled":       lostExec,
	"checkpoint.save-sandbox":  sandboxes,
	"checkpoint.sandbox-saved": sandboxes,
}

const sandboxes = "needs gVisor; TestDaemonIsKilledDuringGVisorCheckpoint tests it"

const lostExec = "reached only for an exec whose launcher is lost; if the daemon is lost, too, the exec ends with its container"

// allKilled fails unless each failpoint of the daemon killed it in some operation.
func allKilled(t *testing.T, killed map[string]bool) {
	t.Helper()
	all := harness.Get(points.Below("../.."))(t)
	for _, p := range all {
		if area, _, _ := strings.Cut(p.Name, "."); area == "launcher" || area == "monitor" || area == "stream" {
			// TestShimCrash tests these programs, TestProcessOfSessionsIsKilled berth-stream.
			continue
		}
		switch {
		case !killed[p.Name] && unkilled[p.Name] == "":
			t.Errorf("%s: no operation killed the daemon at %q", p.Place, p.Name)
		case killed[p.Name] && unkilled[p.Name] != "":
			t.Errorf("%s: the daemon was killed at %q; remove it from the list", p.Place, p.Name)
		}
	}
}
