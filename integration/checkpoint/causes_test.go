package checkpoint

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
)

// undumpable compiles testdata/undumpable.c. The returned function is an option for a container
// that runs it.
func undumpable(t *testing.T) func(args ...string) harness.ContainerOption {
	t.Helper()
	path := filepath.Join(t.TempDir(), "undumpable")
	out, err := exec.Command("cc", "-O2", "-static", "-o", path, "testdata/undumpable.c").CombinedOutput()
	if err != nil {
		t.Skipf("NOT TESTED: no C compiler with a static C library: %v\n%s", err, out)
	}
	return func(args ...string) harness.ContainerOption {
		return func(c *runtimeapi.ContainerConfig) {
			c.Command = append([]string{"/undumpable"}, args...)
			c.Mounts = append(c.Mounts, &runtimeapi.Mount{ContainerPath: "/undumpable", HostPath: path, Readonly: true})
		}
	}
}

// Refusals of docs/checkpoint.md that berth finds before it freezes anything, or in the copy of the
// writable layer. The containers go on.
func TestRefusalsNameTheCause(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithCRIU(t), harness.WithHandler("crun", harness.Crun(t)))
	program := undumpable(t)
	card := filepath.Join(t.TempDir(), "card0")
	harness.Must(t, os.WriteFile(card, nil, 0o600))
	none := func(*runtimeapi.PodSandboxConfig) {}
	for _, test := range []struct {
		name, want string
		pod        harness.PodOption
		container  harness.ContainerOption
	}{
		{"pidfd of a thread", "has a pidfd of a thread", none, program("pidfd")},
		{"System V shared memory", "uses System V shared memory", none, program("sysv")},
		{"accelerator", "uses the device /dev/dri/card0", none, func(c *runtimeapi.ContainerConfig) {
			program("open", "/dev/dri/card0")(c)
			harness.Mount(&runtimeapi.Mount{ContainerPath: "/dev/dri/card0", HostPath: card})(c)
		}},
		{"deep directory", "nested deeper than", none,
			harness.Script("i=0; while [ $i -lt 300 ]; do mkdir d && cd d || exit 1; i=$((i+1)); done; echo ready; exec sleep 100000")},
	} {
		t.Run(test.name, func(t *testing.T) {
			pod := d.RunPod(t, test.pod)
			c := pod.Create(t, test.container)
			c.Start(t)
			c.WaitOutput(t, "ready")
			refusedWith(t, test.want, pod, c)
			pod.Remove(t)
		})
	}
	t.Run("handler of another runtime", func(t *testing.T) {
		config := d.PodConfig(t)
		id := harness.Get(d.Cri.RunPodSandbox(t.Context(), config, "crun"))(t)
		d.Objects = append(d.Objects, id)
		pod := &harness.Pod{D: d, Id: id, Config: config}
		c := pod.Run(t, harness.Script("echo ready; exec sleep 100000"))
		c.WaitOutput(t, "ready")
		refusedWith(t, "the runtime of its handler is not berth's own", pod, c)
		pod.Remove(t)
	})
}

// refusedWith checks that checkpoints of a container are refused with a cause, leave nothing and do
// not change the container.
func refusedWith(t *testing.T, want string, pod *harness.Pod, c *harness.Container) {
	t.Helper()
	dir := outputDir(t, pod.D)
	harness.WantCode(t, checkpointPod(t, pod, dir, c), codes.FailedPrecondition, want)
	isEmpty(t, dir)
	_, err := harness.RawRuntime(t, pod.D).CheckpointContainer(t.Context(), &runtimeapi.CheckpointContainerRequest{
		ContainerId: c.Id, Location: filepath.Join(dir, "archive.tar"), Timeout: 60})
	harness.WantCode(t, err, codes.FailedPrecondition, want)
	isEmpty(t, dir)
	harness.Equal(t, "exec afterwards", c.Exec(t, "echo", "runs"), "runs")
}

// ballast fills a filesystem but for some bytes, until the returned function is called.
func ballast(t *testing.T, dir string, free uint64) (release func()) {
	t.Helper()
	var s unix.Statfs_t
	harness.Must(t, unix.Statfs(dir, &s))
	path := filepath.Join(dir, "ballast")
	file := harness.Get(os.Create(path))(t)
	defer file.Close()
	harness.Must(t, unix.Fallocate(int(file.Fd()), 0, 0, int64(s.Bavail*uint64(s.Bsize)-free)))
	return func() { harness.Must(t, os.Remove(path)) }
}
