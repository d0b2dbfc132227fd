package checkpoint

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
)

// confinedConfig is the configuration of an ordinary pod: a seccomp profile, no new privileges,
// limits.
func confinedConfig(c *runtimeapi.ContainerConfig) {
	security := c.Linux.SecurityContext
	security.NoNewPrivs = true
	security.Seccomp = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault}
	c.Linux.Resources.MemoryLimitInBytes = 256 << 20
}

// otherNode makes the daemon another node: it signs with another key.
func otherNode(t *testing.T, d *harness.Daemon) {
	t.Helper()
	d.Stop(t)
	harness.Must(t, os.Remove(filepath.Join(d.Root, "checkpoint.key")))
	d.Start(t)
}

// A checkpoint of another node is refused.
func TestRestoreOfAnotherNode(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithCRIU(t))
	s := confined(t, d)
	otherNode(t, d)
	restoreRefused(t, d, s.identity(t), codes.FailedPrecondition, "is not signed with the key of this node")
}

// Nodes with the same key restore each other's checkpoints.
func TestRestoreWithSharedKey(t *testing.T) {
	first := harness.StartDaemon(t, harness.WithCRIU(t))
	s := confined(t, first)
	key := harness.Get(os.ReadFile(filepath.Join(first.Root, "checkpoint.key")))(t)
	second := harness.StartDaemon(t, harness.WithCRIU(t), func(t *testing.T, d *harness.Daemon) {
		t.Helper()
		harness.Must(t, os.MkdirAll(d.Root, 0o711))
		harness.Must(t, os.WriteFile(filepath.Join(d.Root, "checkpoint.key"), key, 0o600))
	})
	second.Pull(t, s.request.ContainerConfigs[0].Image.Image)
	there := &saved{d: second, request: s.request}
	restored, containers := restorePod(t, second, there.identity(t))
	containers[0].Start(t)
	waitCounted(t, containers[0], 1)
	restored.Remove(t)
}

// By default CRIU restores nothing. A pod that an earlier daemon has restored, but not started,
// stays created, and starts when the option permits it again.
func TestRestoresAreOffByDefault(t *testing.T) {
	const off = "checkpoint.restore is off"
	d := harness.StartDaemon(t, harness.WithCRIU(t))
	pod := d.RunPod(t)
	c := pod.Run(t, harness.Script(counting))
	waitCounted(t, c, 1)
	s := save(t, pod, c)
	pod.Remove(t)
	restored, containers := restorePod(t, d, s.identity(t))
	d.Stop(t)
	d.SetConfig(t, harness.TrustedRestores, "")
	d.Start(t)
	restoreRefused(t, d, s.identity(t), codes.FailedPrecondition, off)
	harness.WantCode(t, d.Cri.StartContainer(t.Context(), containers[0].Id), codes.FailedPrecondition, off)
	harness.Equal(t, "state", containers[0].Status(t).State, runtimeapi.ContainerState_CONTAINER_CREATED)
	for _, command := range [][]string{
		{"restore", s.request.CheckpointPath}, {"restore", "--dry-run", s.request.CheckpointPath},
	} {
		cmd := d.Command(command...)
		cmd.Env = append(cmd.Env, "BERTH_SOCKET=unix://"+d.Socket)
		out, err := cmd.CombinedOutput()
		if cmd.ProcessState.ExitCode() != 1 || !strings.Contains(string(out), off) {
			t.Errorf("%q: %v: %s", command, err, out)
		}
	}
	d.Stop(t)
	d.SetConfig(t, "", harness.TrustedRestores)
	d.Start(t)
	containers[0].Start(t)
	waitCounted(t, containers[0], 1)
	restored.Remove(t)
}
