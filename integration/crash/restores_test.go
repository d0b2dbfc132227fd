package crash

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/checkpoint/process/archive"
	"berth/integration/harness"
	"berth/integration/machine"
)

// restores are the operations that make and restore checkpoints. They need CRIU.
var restores = []operation{
	{name: "CheckpointContainer", daemon: harness.WithCRIU, prepare: dumpable, request: checkpointContainer, dead: thawed, restarted: archiveIsValid},
	{name: "CheckpointPod", daemon: harness.WithCRIU, prepare: dumpable, request: checkpointPod, dead: thawed, restarted: outputIsValid},
	{name: "RestorePod", daemon: harness.WithCRIU, prepare: saved, request: restorePod},
	{name: "StartContainer_restored", daemon: harness.WithCRIU, prepare: restored, request: startContainer},
	{name: "RemovePodSandbox_restored", daemon: harness.WithCRIU, prepare: restored, request: removePod},
	{name: "RemovePodSandbox_restored_running", daemon: harness.WithCRIU, prepare: with(restored, do(startContainer)), request: removePod, more: true},
}

// checkpoints are the directories of the daemons' checkpoints. All cases of an operation restore
// the same one.
var checkpoints = map[*harness.Daemon]string{}

// saved makes a checkpoint of a pod and removes the pod. The first case of an operation makes it,
// in a directory that exists until the operation ends.
var saved = savedAs(harness.HostNetwork)

// savedAs is saved for other pods.
func savedAs(options ...harness.PodOption) func(*testing.T, *world) {
	return func(t *testing.T, w *world) {
		w.checkpoint = checkpoints[w.d]
		if w.checkpoint != "" {
			with(withPod(options...), withContainer(waits))(t, w)
			return
		}
		with(podRuns(options...), withContainer(waits), started)(t, w)
		w.checkpoint = t.TempDir()
		checkpoints[w.d] = w.checkpoint
		harness.Must(t, checkpointPod(t, w))
		harness.Must(t, removePod(t, w))
	}
}

// restored makes a pod from a checkpoint, with a container that is not started.
var restored = with(saved, do(restorePod))

// dumpable starts a container and makes a directory for its checkpoint.
func dumpable(t *testing.T, w *world) {
	with(podRuns(harness.HostNetwork), withContainer(waits), started)(t, w)
	harness.EventuallyTrue(t, "the container waits", func() bool { return len(waiting()) == 1 })
	w.checkpoint = t.TempDir()
}

// waiting returns the processes of the container waits.
func waiting() []int { return machine.ProcessesOf("sleep 100000") }

var waits = harness.Script("echo ready; exec sleep 100000")

func checkpointPod(t *testing.T, w *world) error {
	return call(w, func(c runtimeapi.RuntimeServiceClient) error {
		_, err := c.CheckpointPod(t.Context(), &runtimeapi.CheckpointPodRequest{
			PodSandboxId: w.podID, OutputPath: w.checkpoint, ContainerIds: []string{w.id}})
		return err
	})
}

// archivePath is the file of a container's checkpoint.
func (w *world) archivePath() string { return filepath.Join(w.checkpoint, "archive.tar") }

func checkpointContainer(t *testing.T, w *world) error {
	return call(w, func(c runtimeapi.RuntimeServiceClient) error {
		_, err := c.CheckpointContainer(t.Context(), &runtimeapi.CheckpointContainerRequest{
			ContainerId: w.id, Location: w.archivePath(), Timeout: 60})
		return err
	})
}

func restorePod(t *testing.T, w *world) error {
	return call(w, func(c runtimeapi.RuntimeServiceClient) error {
		response, err := c.RestorePod(t.Context(), &runtimeapi.RestorePodRequest{
			CheckpointPath: w.checkpoint, Config: w.pod, ContainerConfigs: []*runtimeapi.ContainerConfig{w.container}, RuntimeHandler: w.handler})
		if err == nil {
			w.podID, w.id = response.PodSandboxId, response.RestoredContainers[0].ContainerId
		}
		return err
	})
}

// call calls the daemon on a connection of its own, which is closed afterwards.
func call(w *world, do func(runtimeapi.RuntimeServiceClient) error) error {
	conn, err := grpc.NewClient("unix://"+w.d.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	return errors.Join(do(runtimeapi.NewRuntimeServiceClient(conn)), conn.Close())
}

// thawed checks that no container stays frozen, or held by CRIU, while there is no daemon.
func thawed(t *testing.T, w *world) {
	pids := waiting()
	if len(pids) != 1 {
		t.Fatalf("processes of the container: %v", pids)
	}
	harness.Eventually(t, "the container is thawed", func() error { return isThawed(pids[0]) })
}

// isThawed returns nil if a process runs, without a tracer, in a cgroup that is not frozen.
func isThawed(pid int) error {
	dir, err := machine.FindCgroupDir(pid, "freezer")
	if err != nil {
		return err
	}
	freezer, err := os.ReadFile(filepath.Join(dir, freezerFile()))
	if err != nil || strings.TrimSpace(string(freezer)) != thawedState() {
		return fmt.Errorf("freezer: %q, %w", freezer, err)
	}
	if tracer, err := machine.ReadStatusField(pid, "TracerPid"); tracer != "0" {
		return fmt.Errorf("process %q traces it, %w", tracer, err)
	}
	if state, err := machine.ReadStatusField(pid, "State"); !strings.HasPrefix(state, "S") {
		return fmt.Errorf("state %q, %w", state, err)
	}
	return nil
}

func freezerFile() string {
	if machine.Cgroup2() {
		return "cgroup.freeze"
	}
	return "freezer.state"
}

func thawedState() string {
	if machine.Cgroup2() {
		return "0"
	}
	return "THAWED"
}

// outputIsValid checks that the output of CheckpointPod is empty, or a complete checkpoint with a
// valid signature. It empties the directory for the next request.
func outputIsValid(t *testing.T, w *world) {
	thawed(t, w)
	if len(harness.Get(os.ReadDir(w.checkpoint))(t)) == 0 {
		return
	}
	isValid(t, w, w.checkpoint)
	w.emptyOutput(t)
}

// emptyOutput empties the directory of a pod's checkpoint.
func (w *world) emptyOutput(t *testing.T) {
	t.Helper()
	dir := harness.Get(os.Open(w.checkpoint))(t)
	harness.Must(t, errors.Join(archive.Clear(dir), dir.Close()))
}

// archiveIsValid checks that CheckpointContainer has left no file, or a complete checkpoint.
func archiveIsValid(t *testing.T, w *world) {
	thawed(t, w)
	for _, file := range harness.Get(os.ReadDir(w.checkpoint))(t) {
		isValid(t, w, filepath.Join(w.checkpoint, file.Name()))
	}
}

// isValid checks all files of a checkpoint, as a restore does.
func isValid(t *testing.T, w *world, path string) {
	t.Helper()
	key := harness.Get(archive.ReadKey(w.d.Root))(t)
	from := harness.Get(os.Open(path))(t)
	copied := t.TempDir()
	to := harness.Get(os.Open(copied))(t)
	a, err := archive.Import(t.Context(), from, to, key)
	harness.Must(t, errors.Join(err, from.Close(), to.Close()))
	if a.Signer != archive.ThisNode {
		t.Errorf("%s is signed by %s", path, a.Signer)
	}
}
