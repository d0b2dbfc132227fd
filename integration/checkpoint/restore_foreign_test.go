package checkpoint

import (
	"fmt"
	"os"
	"path/filepath"
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

// A checkpoint of another node is refused by default. With checkpoint.restore_foreign, all of its
// content is compared with the request, and it continues.
func TestRestoreOfAnotherNode(t *testing.T) {
	d := harness.StartDaemon(t, criuOption(t))
	pod := d.RunPod(t)
	c := pod.Run(t, harness.Script("echo x >/dev/shm/x; rm /bin/yes; "+counting), confinedConfig)
	waitCounted(t, c, 3)
	s := save(t, pod, c)
	_, reached := waitCounted(t, c, 3)
	pod.Remove(t)
	otherNode(t, d)
	restoreRefused(t, d, s.identity(t), codes.FailedPrecondition, "checkpoint.restore_foreign")
	d.Stop(t)
	criu := fmt.Sprintf("checkpoint.criu = %q", os.Getenv("BERTH_TEST_CRIU"))
	d.SetConfig(t, criu, criu+"\ncheckpoint.restore_foreign = true")
	d.Start(t)
	restored, containers := restorePod(t, d, s.identity(t))
	containers[0].Start(t)
	if first, _ := waitCounted(t, containers[0], 3); first < 4 || first > reached+1 {
		t.Errorf("it continues with %d, it had reached %d", first, reached)
	}
	harness.Equal(t, "files", containers[0].Exec(t, "sh", "-c", "cat /dev/shm/x; ls /bin/yes 2>&1; true"), "x\nls: /bin/yes: No such file or directory")
	restored.Remove(t)

	t.Run("with fewer rights", func(t *testing.T) {
		for name, change := range map[string]func(*runtimeapi.ContainerConfig){
			"capabilities": func(c *runtimeapi.ContainerConfig) {
				c.Linux.SecurityContext.Capabilities = &runtimeapi.Capability{DropCapabilities: []string{"ALL"}}
			},
			"seccomp": func(c *runtimeapi.ContainerConfig) { // the default profile depends on capabilities
				c.Linux.SecurityContext.Capabilities = &runtimeapi.Capability{AddCapabilities: []string{"SYS_ADMIN"}}
			},
			"read-only paths": func(c *runtimeapi.ContainerConfig) {
				c.Linux.SecurityContext.ReadonlyPaths = append(c.Linux.SecurityContext.ReadonlyPaths, "/proc/irq")
			},
		} {
			t.Run(name, func(t *testing.T) {
				request := s.identity(t)
				change(request.ContainerConfigs[0])
				restoreRefused(t, d, request, codes.FailedPrecondition, "the checkpoint has")
			})
		}
	})
}
