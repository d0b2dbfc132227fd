package checkpoint

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/inventory"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
)

// recordsTCPClose checkpoints a container and returns whether its images record CRIU's option
// tcp-close.
func recordsTCPClose(t *testing.T, d *harness.Daemon, c *harness.Container) bool {
	t.Helper()
	place := filepath.Join(d.Dir, "archive.tar")
	request := &runtimeapi.CheckpointContainerRequest{ContainerId: c.Id, Location: place, Timeout: 60}
	harness.Get(harness.RawRuntime(t, d).CheckpointContainer(t.Context(), request))(t)
	data := tarIn(t, place)["checkpoint/inventory.img"]
	harness.Must(t, os.Remove(place))
	const header = 8 // the magic and the size
	if len(data) < header || int(binary.LittleEndian.Uint32([]byte(data[4:]))) != len(data)-header {
		t.Fatalf("inventory.img is no image: %q", data)
	}
	var entry inventory.InventoryEntry
	harness.Must(t, proto.Unmarshal([]byte(data[header:]), &entry))
	return entry.GetTcpClose()
}

// Runtimes without CRIU's option tcp-close, such as CRI-O, cannot restore images that record it. So
// only images with a connection do.
func TestTCPCloseIsRecordedForConnections(t *testing.T) {
	d := startDaemon(t, harness.WithBuiltInNetwork())
	pod := d.RunPod(t)
	c := pod.Run(t, harness.Script("exec nc -ll -p 7000 -e cat"))
	harness.Equal(t, "tcp-close without a connection", recordsTCPClose(t, d, c), false)
	echo := echoes(t, pod)
	harness.Equal(t, "tcp-close with a connection", recordsTCPClose(t, d, c), true)
	echo("after the checkpoint")
}
