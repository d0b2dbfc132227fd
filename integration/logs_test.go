package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestLogFormat(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	c, _ := pod.runToEnd(t, script(`echo one; sleep 0.05; echo two >&2; sleep 0.05; printf 'no newline'`))
	lines := c.log(t)
	if len(lines) != 3 {
		t.Fatalf("the log has %d records: %v", len(lines), lines)
	}
	equal(t, "first", lines[0].stream+" "+lines[0].text, "stdout one")
	equal(t, "second", lines[1].stream+" "+lines[1].text, "stderr two")
	equal(t, "third", lines[2].stream+" "+lines[2].text, "stdout no newline")
	for i := 1; i < len(lines); i++ {
		if lines[i].time.Before(lines[i-1].time) {
			t.Errorf("record %d is older than the one before it", i)
		}
	}
	info, err := os.Stat(c.logPath())
	must(t, err)
	equal(t, "mode", info.Mode().Perm(), os.FileMode(0o640))
}

// Long lines are split into records tagged as partial; nothing is lost.
func TestLogPartialLines(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	const long = 100_000
	c, _ := pod.runToEnd(t, script(fmt.Sprintf("head -c %d /dev/zero | tr '\\0' x; echo; echo short", long)))
	lines := c.log(t)
	partial := 0
	for _, l := range lines {
		if len(l.text) > 16384 {
			t.Errorf("a record has %d bytes", len(l.text))
		}
		if l.partial {
			partial++
		}
	}
	if partial < long/16384 {
		t.Errorf("%d partial records for a line of %d bytes", partial, long)
	}
	equal(t, "text", c.output(t), strings.Repeat("x", long)+"\nshort\n")
}

func TestLogHighVolume(t *testing.T) {
	d := startDaemon(t)
	const n = 50_000
	c, _ := d.runPod(t, hostNetwork).runToEnd(t, script(fmt.Sprintf("seq 1 %d", n)))
	lines := c.log(t)
	equal(t, "number of lines", len(lines), n)
	for i, l := range lines {
		if l.text != fmt.Sprint(i+1) {
			t.Fatalf("line %d is %q", i+1, l.text)
		}
	}
}

// After a rotation by kubelet the new file is written, and no line is lost.
func TestReopenContainerLog(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	c := pod.run(t, script("i=0; while :; do i=$((i+1)); echo $i; sleep 0.005; done"))
	c.waitOutput(t, "3\n")
	rotated := c.logPath() + ".1"
	must(t, os.Rename(c.logPath(), rotated))
	must(t, d.cri.ReopenContainerLog(t.Context(), c.id))
	eventually(t, "the new file is written", func() error {
		if info, err := os.Stat(c.logPath()); err != nil || info.Size() == 0 {
			return fmt.Errorf("not yet: %w", err)
		}
		return nil
	})
	c.stop(t, 0)
	lines := append(readLog(t, rotated), c.log(t)...)
	for i, l := range lines {
		if l.text != fmt.Sprint(i+1) {
			t.Fatalf("record %d over both files is %q", i+1, l.text)
		}
	}
}

// The log is rotated again and again while the container writes as fast as it can: each line is in one of the
// files, once and in order.
func TestRotationAtFullSpeed(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	const lines = 300_000
	c := pod.run(t, script(fmt.Sprintf("seq 1 %d", lines)))
	var files []string
	for c.status(t).State == runtimeapi.ContainerState_CONTAINER_RUNNING {
		rotated := fmt.Sprintf("%s.%d", c.logPath(), len(files))
		must(t, os.Rename(c.logPath(), rotated))
		files = append(files, rotated)
		if err := d.cri.ReopenContainerLog(t.Context(), c.id); err != nil {
			equal(t, "state after a reopening that failed", c.waitExited(t).ExitCode, 0)
			break
		}
	}
	c.waitExited(t)
	if _, err := os.Stat(c.logPath()); err == nil {
		files = append(files, c.logPath())
	}
	if len(files) < 3 {
		t.Errorf("%d files only: the log was hardly rotated while it was written", len(files))
	}
	n := 0
	for _, file := range files {
		for _, l := range readLog(t, file) {
			if n++; l.text != fmt.Sprint(n) {
				t.Fatalf("%s: line %d is %q", file, n, l.text)
			}
		}
	}
	equal(t, "number of lines", n, lines)
}

func TestMaxLogLine(t *testing.T) {
	const limit = 300
	d := startDaemon(t, withConfig(fmt.Sprintf("max_log_line = %d", limit)))
	long := strings.Repeat("0123456789", 100)
	c, _ := d.runPod(t, hostNetwork).runToEnd(t, script("echo "+long+"; echo short"))
	lines := c.log(t)
	equal(t, "number of records", len(lines), len(long)/limit+2)
	for i, l := range lines[:len(long)/limit] {
		equal(t, fmt.Sprintf("length of record %d", i), len(l.text), limit)
		equal(t, fmt.Sprintf("partial of record %d", i), l.partial, true)
	}
	equal(t, "text", c.output(t), long+"\nshort\n")
}

// A full disk costs log lines and nothing else: the container runs on and ends by itself, no record is torn, and
// when there is room again the log goes on. Reopening fails, without a new file, where no file can be made.
func TestLogDiskFull(t *testing.T) {
	d := startDaemon(t)
	config := d.podConfig(t, hostNetwork)
	must(t, unix.Mount("tmpfs", config.LogDirectory, "tmpfs", 0, "size=256k,nr_inodes=5"))
	t.Cleanup(func() { must(t, unix.Unmount(config.LogDirectory, 0)) })
	pod := d.runPodConfig(t, config)
	ballast := filepath.Join(config.LogDirectory, "ballast")
	must(t, os.WriteFile(ballast, make([]byte, 128<<10), 0o600))

	const lines = 50_000 // many times what the disk has room for
	c := pod.run(t, script(fmt.Sprintf("seq 1 %d; echo all >/tmp/written; while [ ! -e /tmp/go ]; do sleep 0.02; done; echo there is room; exit 7", lines)))
	eventually(t, "everything is written", func() error {
		_, _, err := d.cri.ExecSync(t.Context(), c.id, []string{"cat", "/tmp/written"}, time.Minute)
		return err
	})
	kept := c.log(t)
	if len(kept) == 0 || len(kept) >= lines {
		t.Errorf("the log has %d of %d lines", len(kept), lines)
	}
	for i, l := range kept {
		if l.text != fmt.Sprint(i+1) {
			t.Fatalf("line %d is %q", i+1, l.text)
		}
	}

	must(t, os.WriteFile(ballast+"2", nil, 0o600)) // the last inode
	rotated := filepath.Join(config.LogDirectory, "rotated")
	must(t, os.Rename(c.logPath(), rotated))
	if err := d.cri.ReopenContainerLog(t.Context(), c.id); err == nil {
		t.Error("reopening the log succeeds where no file can be made")
	}
	if _, err := os.Stat(c.logPath()); err == nil {
		t.Error("there is a new log file although reopening failed")
	}
	must(t, os.Remove(ballast))
	must(t, os.Remove(ballast+"2"))
	must(t, d.cri.ReopenContainerLog(t.Context(), c.id))
	c.exec(t, "touch", "/tmp/go")
	equal(t, "exit code", c.waitExited(t).ExitCode, 7)
	equal(t, "the new file", c.output(t), "there is room\n")
	equal(t, "the old file", len(readLog(t, rotated)), len(kept))
}

// When reopening fails no new file may exist, and the old one is still written.
func TestReopenContainerLogFailures(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	exited, _ := pod.runToEnd(t, command("true"))
	must(t, os.Remove(exited.logPath()))
	created := pod.create(t)
	for _, c := range []*container{exited, created} {
		wantCode(t, d.cri.ReopenContainerLog(t.Context(), c.id), codes.FailedPrecondition, c.id)
		if _, err := os.Stat(c.logPath()); err == nil {
			t.Errorf("there is a new log file for container %s, which does not run", c.config.Metadata.Name)
		}
	}

	c := pod.run(t, script("echo before; while [ ! -e /tmp/go ]; do sleep 0.02; done; echo after; sleep 1000"))
	c.waitOutput(t, "before")
	dir := filepath.Dir(c.logPath())
	must(t, os.Rename(dir, dir+".moved"))
	if err := d.cri.ReopenContainerLog(t.Context(), c.id); err == nil {
		t.Error("reopening a log whose directory is gone succeeds")
	}
	if _, err := os.Stat(c.logPath()); err == nil {
		t.Error("there is a new log file although reopening failed")
	}
	must(t, os.Rename(dir+".moved", dir))
	c.exec(t, "touch", "/tmp/go")
	c.waitOutput(t, "after")
}

// Without log_path nothing is written, and the container does not block on its output.
func TestNoLogPath(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	_, status := pod.runToEnd(t, script("seq 1 100000"), func(c *runtimeapi.ContainerConfig) { c.LogPath = "" })
	equal(t, "exit code", status.ExitCode, 0)
	equal(t, "log files", fmt.Sprint(readDir(pod.config.LogDirectory)), "[]")
}

// The log goes on while there is no daemon.
func TestLogWithoutDaemon(t *testing.T) {
	d := startDaemon(t)
	c := d.runPod(t, hostNetwork).run(t, script("i=0; while :; do i=$((i+1)); echo $i; sleep 0.005; done"))
	c.waitOutput(t, "3\n")
	d.stop(t)
	reached := len(c.log(t))
	eventually(t, "the log grows", func() error {
		if n := len(c.log(t)); n < reached+20 {
			return fmt.Errorf("%d lines", n)
		}
		return nil
	})
	d.start(t)
	c.stop(t, 0)
	for i, l := range c.log(t) {
		if l.text != fmt.Sprint(i+1) {
			t.Fatalf("line %d is %q", i+1, l.text)
		}
	}
}
