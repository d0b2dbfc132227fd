package checkpoint

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
)

// peers compiles testdata/peers.c. The returned function is an option for a container that runs it.
func peers(t *testing.T) func(args ...string) harness.ContainerOption {
	t.Helper()
	path := filepath.Join(t.TempDir(), "peers")
	out, err := exec.Command("cc", "-O2", "-static", "-o", path, "testdata/peers.c").CombinedOutput()
	if err != nil {
		t.Skipf("NOT TESTED: no C compiler with a static C library: %v\n%s", err, out)
	}
	return func(args ...string) harness.ContainerOption {
		return func(c *runtimeapi.ContainerConfig) {
			c.Command = append([]string{"/peers"}, args...)
			c.Mounts = append(c.Mounts, &runtimeapi.Mount{ContainerPath: "/peers", HostPath: path, Readonly: true})
		}
	}
}

// What CRIU cannot dump is refused with the cause in words, and the containers go on.
func TestUndumpableIsRefused(t *testing.T) {
	d := startDaemon(t)
	program := peers(t)
	refused := func(t *testing.T, want string, pod *harness.Pod, list ...*harness.Container) {
		t.Helper()
		dir := outputDir(t, d)
		harness.WantCode(t, checkpointPod(t, pod, dir, list...), codes.FailedPrecondition, want)
		isEmpty(t, dir)
		for _, c := range list {
			harness.Equal(t, "state afterwards", c.Status(t).State, runtimeapi.ContainerState_CONTAINER_RUNNING)
			harness.Equal(t, "exec afterwards", c.Exec(t, "echo", "runs"), "runs")
		}
		pod.Remove(t)
	}
	t.Run("connected unix socket", func(t *testing.T) {
		shared := filepath.Join(d.Dir, "peers")
		harness.Must(t, os.Mkdir(shared, 0o755))
		pod := d.RunPod(t)
		volume := harness.Mount(&runtimeapi.Mount{HostPath: shared, ContainerPath: "/shared"})
		server := pod.Run(t, program("serve", "/shared/socket"), volume, harness.ContainerNamed("server"))
		server.WaitOutput(t, "listening")
		client := pod.Run(t, program("connect", "/shared/socket"), volume, harness.ContainerNamed("client"))
		server.WaitOutput(t, "ready")
		client.WaitOutput(t, "ready")
		refused(t, "unix socket that is connected to another container", pod, server, client)
	})
	t.Run("io_uring", func(t *testing.T) {
		pod := d.RunPod(t)
		c := pod.Create(t, program("io_uring"))
		c.Start(t)
		harness.EventuallyTrue(t, "it is ready or has ended", func() bool {
			return written(t, c) != "" || c.Status(t).State == runtimeapi.ContainerState_CONTAINER_EXITED
		})
		if c.Status(t).State == runtimeapi.ContainerState_CONTAINER_EXITED {
			t.Skipf("NOT TESTED: no io_uring: %s", written(t, c))
		}
		refused(t, "uses io_uring", pod, c)
	})
	for name, test := range map[string]struct{ script, want string }{
		"deleted file with another link": {"echo x >/a; ln /a /b; exec 7</a; rm /a", "deleted open file with another link"},
		"large deleted file":             {"dd if=/dev/zero of=/a bs=1M count=257 2>/dev/null; exec 7</a; rm /a", "deleted open file larger than 256 MiB"},
	} {
		t.Run(name, func(t *testing.T) {
			pod := d.RunPod(t)
			c := pod.Run(t, harness.Script(test.script+"; "+counting))
			waitCounted(t, c, 1)
			refused(t, test.want, pod, c)
		})
	}
}
