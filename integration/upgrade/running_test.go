package upgrade

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/logs"
	"berth/integration/machine"
	"berth/integration/sessions"
	"berth/shim"
)

// A newer daemon replaces the old one while pods run. Everything keeps running, and the old
// version's monitors serve the new daemon.
func TestRunningPods(t *testing.T) {
	for _, version := range released(t) {
		t.Run(version, func(t *testing.T) {
			bin := programs(t, version)
			d := harness.StartDaemon(t, withCRIU)
			d.Stop(t)
			d.LoseState(t)
			harness.Must(t, os.RemoveAll(d.Root))
			d.UseVersion(t, bin, configure(t, version)...)
			d.Start(t)
			var later *features
			if hasFeatures(version) {
				later = runFeatures(t, d, d.Pull(t, harness.BaseImage))
			}
			pod, host := d.RunPod(t), d.RunPod(t, harness.HostNetwork)
			writes := pod.Run(t, harness.Script("trap 'exit 7' TERM; i=0; while :; do i=$((i+1)); echo $i; sleep 0.01; done"))
			reads := host.Run(t, harness.Script("read line; echo got $line; exit 3"), func(c *runtimeapi.ContainerConfig) { c.Stdin, c.StdinOnce = true, true })
			created := host.Create(t, harness.Script("echo started by the newer; exit 4"))
			ends := host.Run(t, harness.Script("while [ ! -e /tmp/end ]; do sleep 0.01; done; exit 5"))
			lost := host.Run(t)
			ip, pid := pod.Ip(t), writes.Pid(t)
			d.Kill(t)

			// While no daemon runs, one container exits, and the monitor of another is killed.
			harness.Must(t, os.WriteFile(fmt.Sprintf("/proc/%d/root/tmp/end", initOf(t, d, ends)), nil, 0o600))
			machine.KillProcess(t, harness.MonitorOf(t, d, lost))
			d.UseVersion(t, "")
			d.Start(t)

			harness.Equal(t, "pod state", pod.Status(t).State, runtimeapi.PodSandboxState_SANDBOX_READY)
			harness.Equal(t, "pod address", pod.Ip(t), ip)
			harness.Equal(t, "process of the running container", writes.Pid(t), pid)
			harness.Equal(t, "exit code of the container that ended without a daemon", ends.WaitExited(t).ExitCode, 5)
			harness.Equal(t, "exit code of the container that lost its monitor", lost.WaitExited(t).ExitCode, 255)
			harness.Equal(t, "exec", writes.Exec(t, "echo", "hello"), "hello")
			rotate(t, writes)
			checkpointIsRefused(t, writes)
			created.Start(t)
			harness.Equal(t, "exit code of the container created before the upgrade", created.WaitExited(t).ExitCode, 4)
			harness.Equal(t, "answer through attach", attach(t, reads, "line\n"), "got line\n")
			harness.Equal(t, "exit code of the attached container", reads.WaitExited(t).ExitCode, 3)
			writes.Stop(t, 30)
			harness.Equal(t, "exit code after stop", writes.Status(t).ExitCode, 7)
			harness.Equal(t, "a new container in the old pod", pod.Sh(t, "echo fine"), "fine\n")
			if later != nil {
				later.checkAll(t)
			}
			pod.Remove(t)
			host.Remove(t)
		})
	}
}

// withCRIU makes the newer daemon use CRIU, if there is one.
func withCRIU(t *testing.T, d *harness.Daemon) {
	if os.Getenv("BERTH_TEST_CRIU") != "" {
		harness.WithCRIU(t)(t, d)
	}
}

// checkpointIsRefused expects that a container of an old monitor, which cannot freeze it, cannot be
// saved.
func checkpointIsRefused(t *testing.T, c *harness.Container) {
	t.Helper()
	want := "the container's monitor is of an older berth"
	if os.Getenv("BERTH_TEST_CRIU") == "" {
		want = "CRIU is not installed"
	}
	dir := t.TempDir()
	_, err := harness.RawRuntime(t, c.Pod.D).CheckpointContainer(t.Context(),
		&runtimeapi.CheckpointContainerRequest{ContainerId: c.Id, Location: filepath.Join(dir, "archive.tar")})
	harness.WantCode(t, err, codes.FailedPrecondition, want)
	harness.Equal(t, "files left", len(harness.Get(os.ReadDir(dir))(t)), 0)
	before := len(c.Log(t))
	harness.EventuallyTrue(t, "the container runs on", func() bool { return len(c.Log(t)) > before })
}

// initOf returns the container's init from the monitor's record.
func initOf(t *testing.T, d *harness.Daemon, c *harness.Container) int {
	t.Helper()
	harness.MonitorOf(t, d, c) // waits until the record is complete
	return harness.Get(shim.ReadShim(filepath.Join(d.State, "c", c.Id)))(t).InitPID
}

// rotate renames and reopens the log. The monitor writes to the new file.
func rotate(t *testing.T, c *harness.Container) {
	t.Helper()
	old := c.LogPath() + ".1"
	harness.Must(t, os.Rename(c.LogPath(), old))
	harness.Must(t, c.Pod.D.Cri.ReopenContainerLog(t.Context(), c.Id))
	before := logs.Read(t, old)
	harness.Eventually(t, "the new file is written", func() error {
		if info, err := os.Stat(c.LogPath()); err != nil || info.Size() == 0 {
			return fmt.Errorf("the new file is missing or empty: %w", err)
		}
		return nil
	})
	harness.Equal(t, "first line of the new file", c.Log(t)[0].Text, fmt.Sprint(len(before)+1))
}

// attach writes to a container's standard input, closes it, and returns the output.
func attach(t *testing.T, c *harness.Container, input string) string {
	t.Helper()
	var out bytes.Buffer
	o := remotecommand.StreamOptions{Stdin: strings.NewReader(input), Stdout: &out}
	_, err := sessions.Spdy.Stream(t.Context(), sessions.Plain(), c.AttachURL(t, o), o)
	harness.Must(t, err)
	return out.String()
}
