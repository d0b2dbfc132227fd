package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/logs"
	"berth/integration/machine"
)

func TestLogFormat(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	c, _ := pod.RunToEnd(t, harness.Script(`echo one; sleep 0.05; echo two >&2; sleep 0.05; printf 'no newline'`))
	lines := c.Log(t)
	if len(lines) != 3 {
		t.Fatalf("the log has %d records: %v", len(lines), lines)
	}
	harness.Equal(t, "first", lines[0].Stream+" "+lines[0].Text, "stdout one")
	harness.Equal(t, "second", lines[1].Stream+" "+lines[1].Text, "stderr two")
	harness.Equal(t, "third", lines[2].Stream+" "+lines[2].Text, "stdout no newline")
	for i := 1; i < len(lines); i++ {
		if lines[i].Time.Before(lines[i-1].Time) {
			t.Errorf("record %d is older than the one before it", i)
		}
	}
	info := harness.Get(os.Stat(c.LogPath()))(t)
	harness.Equal(t, "mode", info.Mode().Perm(), os.FileMode(0o640))
}

// Long lines are split into records with the partial tag. No text is lost.
func TestLogPartialLines(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	const long = 100_000
	c, _ := pod.RunToEnd(t, harness.Script(fmt.Sprintf("head -c %d /dev/zero | tr '\\0' x; echo; echo short", long)))
	lines := c.Log(t)
	partial := 0
	for _, l := range lines {
		if len(l.Text) > 16384 {
			t.Errorf("a record has %d bytes", len(l.Text))
		}
		if l.Partial {
			partial++
		}
	}
	if partial < long/16384 {
		t.Errorf("%d partial records for a line of %d bytes", partial, long)
	}
	harness.Equal(t, "text", c.Output(t), strings.Repeat("x", long)+"\nshort\n")
}

func TestLogHighVolume(t *testing.T) {
	d := harness.StartDaemon(t)
	const n = 50_000
	c, _ := d.RunPod(t, harness.HostNetwork).RunToEnd(t, harness.Script(fmt.Sprintf("seq 1 %d", n)))
	lines := c.Log(t)
	harness.Equal(t, "number of lines", len(lines), n)
	logs.Numbered(t, lines)
}

// After a rotation by kubelet the container writes to the new file, and no line is lost.
func TestReopenContainerLog(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	c := pod.Run(t, harness.Script("i=0; while :; do i=$((i+1)); echo $i; sleep 0.005; done"))
	c.WaitOutput(t, "3\n")
	rotated := c.LogPath() + ".1"
	harness.Must(t, os.Rename(c.LogPath(), rotated))
	harness.Must(t, d.Cri.ReopenContainerLog(t.Context(), c.Id))
	harness.Eventually(t, "the new file is written", func() error {
		if info, err := os.Stat(c.LogPath()); err != nil || info.Size() == 0 {
			return fmt.Errorf("no lines in the new file: %w", err)
		}
		return nil
	})
	c.Stop(t, 0)
	logs.Numbered(t, append(logs.Read(t, rotated), c.Log(t)...))
}

// The log is rotated many times while the container writes at full speed. Each line is in one of
// the files, once and in order.
func TestRotationAtFullSpeed(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	c := pod.Run(t, harness.Script("i=0; while [ ! -e /tmp/enough ]; do seq $((i+1)) $((i+1000)); i=$((i+1000)); done; echo $i lines"))
	var files []string
	for i := range 20 {
		rotated := fmt.Sprintf("%s.%d", c.LogPath(), i)
		harness.Must(t, os.Rename(c.LogPath(), rotated))
		files = append(files, rotated)
		harness.Must(t, d.Cri.ReopenContainerLog(t.Context(), c.Id))
	}
	c.Release(t, "/tmp/enough")
	harness.Equal(t, "exit code", c.WaitExited(t).ExitCode, 0)
	lines := c.Log(t)
	for _, file := range slices.Backward(files) {
		lines = append(logs.Read(t, file), lines...)
	}
	last := len(lines) - 1
	logs.Numbered(t, lines[:last])
	harness.Equal(t, "last line", lines[last].Text, fmt.Sprintf("%d lines", last))
}

func TestMaxLogLine(t *testing.T) {
	const limit = 300
	d := harness.StartDaemon(t, harness.WithConfig(fmt.Sprintf("container.max_log_line = %d", limit)))
	long := strings.Repeat("0123456789", 100)
	c, _ := d.RunPod(t, harness.HostNetwork).RunToEnd(t, harness.Script("echo "+long+"; echo short"))
	lines := c.Log(t)
	harness.Equal(t, "number of records", len(lines), len(long)/limit+2)
	for i, l := range lines[:len(long)/limit] {
		harness.Equal(t, fmt.Sprintf("length of record %d", i), len(l.Text), limit)
		harness.Equal(t, fmt.Sprintf("partial of record %d", i), l.Partial, true)
	}
	harness.Equal(t, "text", c.Output(t), long+"\nshort\n")
}

// A full disk costs only log lines. The container keeps running and exits normally, no record is
// incomplete, and the log continues when the disk has space. If no new file can be created,
// ReopenContainerLog fails.
func TestLogDiskFull(t *testing.T) {
	d := harness.StartDaemon(t)
	config := d.PodConfig(t, harness.HostNetwork)
	harness.Must(t, unix.Mount("tmpfs", config.LogDirectory, "tmpfs", 0, "size=256k,nr_inodes=5"))
	t.Cleanup(func() { harness.Must(t, unix.Unmount(config.LogDirectory, 0)) })
	pod := d.RunPodConfig(t, config)
	ballast := filepath.Join(config.LogDirectory, "ballast")
	harness.Must(t, os.WriteFile(ballast, make([]byte, 128<<10), 0o600))

	const lines = 50_000 // exceeds the disk many times
	c := pod.Run(t, harness.Script(fmt.Sprintf("seq 1 %d; echo all >/tmp/written; while [ ! -e /tmp/go ]; do sleep 0.02; done; echo there is room; exit 7", lines)))
	harness.Eventually(t, "everything is written", func() error {
		_, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"cat", "/tmp/written"}, time.Minute)
		return err
	})
	kept := c.Log(t)
	if len(kept) == 0 || len(kept) >= lines {
		t.Errorf("the log has %d of %d lines", len(kept), lines)
	}
	logs.Numbered(t, kept)

	harness.Must(t, os.WriteFile(ballast+"2", nil, 0o600)) // the last inode
	rotated := filepath.Join(config.LogDirectory, "rotated")
	harness.Must(t, os.Rename(c.LogPath(), rotated))
	if err := d.Cri.ReopenContainerLog(t.Context(), c.Id); err == nil {
		t.Error("reopening the log succeeds where no file can be made")
	}
	if _, err := os.Stat(c.LogPath()); err == nil {
		t.Error("a new log file exists although reopening failed")
	}
	harness.Must(t, os.Remove(ballast))
	harness.Must(t, os.Remove(ballast+"2"))
	harness.Must(t, d.Cri.ReopenContainerLog(t.Context(), c.Id))
	c.Release(t, "/tmp/go")
	harness.Equal(t, "exit code", c.WaitExited(t).ExitCode, 7)
	harness.Equal(t, "the new file", c.Output(t), "there is room\n")
	harness.Equal(t, "the old file", len(logs.Read(t, rotated)), len(kept))
}

// When reopening fails, no new file exists and the container writes to the old file.
func TestReopenContainerLogFailures(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	exited, _ := pod.RunToEnd(t, harness.Command("true"))
	harness.Must(t, os.Remove(exited.LogPath()))
	created := pod.Create(t)
	for _, c := range []*harness.Container{exited, created} {
		harness.WantCode(t, d.Cri.ReopenContainerLog(t.Context(), c.Id), codes.FailedPrecondition, c.Id)
		if _, err := os.Stat(c.LogPath()); err == nil {
			t.Errorf("a new log file exists for container %s, which does not run", c.Config.Metadata.Name)
		}
	}

	c := pod.Run(t, harness.Script("echo before; while [ ! -e /tmp/go ]; do sleep 0.02; done; echo after; sleep 1000"))
	c.WaitOutput(t, "before")
	dir := filepath.Dir(c.LogPath())
	harness.Must(t, os.Rename(dir, dir+".moved"))
	if err := d.Cri.ReopenContainerLog(t.Context(), c.Id); err == nil {
		t.Error("reopening a log whose directory is gone succeeds")
	}
	if _, err := os.Stat(c.LogPath()); err == nil {
		t.Error("a new log file exists although reopening failed")
	}
	harness.Must(t, os.Rename(dir+".moved", dir))
	c.Release(t, "/tmp/go")
	c.WaitOutput(t, "after")
}

// Without log_path no log is written, and the container does not block on its output.
func TestNoLogPath(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	_, status := pod.RunToEnd(t, harness.Script("seq 1 100000"), func(c *runtimeapi.ContainerConfig) { c.LogPath = "" })
	harness.Equal(t, "exit code", status.ExitCode, 0)
	harness.Equal(t, "log files", fmt.Sprint(machine.ReadDir(pod.Config.LogDirectory)), "[]")
}

// The monitor writes the log while no daemon runs.
func TestLogWithoutDaemon(t *testing.T) {
	d := harness.StartDaemon(t)
	c := d.RunPod(t, harness.HostNetwork).Run(t, harness.Script("i=0; while :; do i=$((i+1)); echo $i; sleep 0.005; done"))
	c.WaitOutput(t, "3\n")
	d.Stop(t)
	reached := len(c.Log(t))
	harness.EventuallyGot(t, "the log grows", func() (bool, any) { n := len(c.Log(t)); return n >= reached+20, n })
	d.Start(t)
	c.Stop(t, 0)
	logs.Numbered(t, c.Log(t))
}
