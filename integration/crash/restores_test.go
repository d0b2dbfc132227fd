package crash

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
)

// restores are the operations that restore a checkpoint. They need CRIU.
var restores = []operation{
	{name: "RestorePod", daemon: withCRIU, prepare: saved, request: restorePod},
}

// withCRIU makes the daemon use CRIU. It skips the operation if there is none.
func withCRIU(t *testing.T) harness.DaemonOption {
	path := os.Getenv("BERTH_TEST_CRIU")
	if path == "" {
		t.Skip("NOT TESTED: no CRIU (BERTH_TEST_CRIU)")
	}
	return harness.WithConfig(fmt.Sprintf("checkpoint.criu = %q", path))
}

// checkpoints are the directories of the daemons' checkpoints. All cases of an operation restore the same
// one.
var checkpoints = map[*harness.Daemon]string{}

// saved makes a checkpoint of a pod and removes the pod. The first case of an operation makes it, in a
// directory that exists until the operation ends.
func saved(t *testing.T, w *world) {
	w.checkpoint = checkpoints[w.d]
	if w.checkpoint != "" {
		with(withPod(harness.HostNetwork), withContainer(waits))(t, w)
		return
	}
	with(podRuns(harness.HostNetwork), withContainer(waits), started)(t, w)
	w.checkpoint = t.TempDir()
	checkpoints[w.d] = w.checkpoint
	harness.Must(t, call(w, func(c runtimeapi.RuntimeServiceClient) error {
		_, err := c.CheckpointPod(t.Context(), &runtimeapi.CheckpointPodRequest{
			PodSandboxId: w.podID, OutputPath: w.checkpoint, ContainerIds: []string{w.id}})
		return err
	}))
	harness.Must(t, removePod(t, w))
}

var waits = harness.Script("echo ready; exec sleep 100000")

func restorePod(t *testing.T, w *world) error {
	return call(w, func(c runtimeapi.RuntimeServiceClient) error {
		response, err := c.RestorePod(t.Context(), &runtimeapi.RestorePodRequest{
			CheckpointPath: w.checkpoint, Config: w.pod, ContainerConfigs: []*runtimeapi.ContainerConfig{w.container}})
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
