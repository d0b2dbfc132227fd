package checkpoint

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
)

// checkpointctl runs the program with the archive and returns what it prints.
func checkpointctl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.Command(os.Getenv("BERTH_CHECKPOINTCTL"), args...).CombinedOutput()
	if err != nil {
		t.Fatalf("checkpointctl %v: %v\n%s", args, err, out)
	}
	return string(out)
}

// checkpointctl reads the archives of CheckpointContainer, as it reads those of CRI-O and
// containerd.
func TestCheckpointctl(t *testing.T) {
	if os.Getenv("BERTH_CHECKPOINTCTL") == "" {
		t.Skip("BERTH_CHECKPOINTCTL is not set: integration/checkpointctl/build prints its path")
	}
	d := startDaemon(t)
	_, list := run(t, d, "counter")
	place := filepath.Join(d.Dir, "archive.tar")
	request := &runtimeapi.CheckpointContainerRequest{ContainerId: list[0].Id, Location: place, Timeout: 60}
	_, err := harness.RawRuntime(t, d).CheckpointContainer(t.Context(), request)
	harness.Must(t, err)
	defer func() { harness.Must(t, os.Remove(place)) }()

	shown := checkpointctl(t, "show", place)
	harness.WantText(t, "checkpointctl show", shown, "counter", list[0].Id[:12], "CRI-O")
	inspected := checkpointctl(t, "inspect", "--all", place)
	harness.WantText(t, "checkpointctl inspect", inspected, list[0].Id, "Process tree", "[cwd]  /", "Destination: /dev/shm")
}
