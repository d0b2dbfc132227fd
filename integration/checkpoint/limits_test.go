package checkpoint

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/checkpoint/process/archive"
	"berth/integration/harness"
	"berth/integration/machine"
)

// A program hangs in each phase of a checkpoint until the deadline is over. The containers go on,
// and the output is empty, or complete if the deadline came after the last step.
func TestCheckpointDeadlineInEachPhase(t *testing.T) {
	var f harness.Failpoints
	d := startDaemon(t, harness.WithFailpoints(&f))
	pod, list := run(t, d, "one", "two")
	for _, phase := range []struct{ program, point string }{
		{harness.LauncherProgram, "launcher.dump-ordered"}, // preparation
		{harness.LauncherProgram, "launcher.descriptors-written"},
		{harness.MonitorProgram, "monitor.freeze"},
		{harness.MonitorProgram, "monitor.frozen"},
		{harness.DaemonProgram, "checkpoint.frozen"},
		{harness.LauncherProgram, "launcher.criu-dump"},
		{harness.LauncherProgram, "launcher.criu-dumped"},
		{harness.DaemonProgram, "checkpoint.file-made"}, // copies of files
		{harness.DaemonProgram, "checkpoint.file-filled"},
		{harness.MonitorProgram, "monitor.thaw"},
		{harness.DaemonProgram, "dump.closed"},
		{harness.DaemonProgram, "checkpoint.write-file"}, // manifest
		{harness.DaemonProgram, "checkpoint.sync"},
		{harness.DaemonProgram, "checkpoint.rename-manifest"},
	} {
		t.Run(phase.point, func(t *testing.T) {
			dir := outputDir(t, d)
			f.FreezeNext(t, phase.program, phase.point, 1)
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
			defer cancel()
			ended := harness.Go(func() error {
				_, err := harness.RawRuntime(t, d).CheckpointPod(ctx, podRequest(pod, dir, list...))
				return err
			})
			if !f.WaitReached(harness.Patience) {
				f.Disarm()
				t.Fatal("the point was not reached")
			}
			<-ctx.Done()
			if phase.program == harness.DaemonProgram { // another program hangs on
				machine.ContinueAll()
			}
			harness.WantCode(t, <-ended, codes.DeadlineExceeded)
			if phase.program == harness.MonitorProgram { // it also writes the log
				machine.ContinueAll()
			}
			for _, c := range list {
				goesOn(t, c)
			}
			machine.ContinueAll()
			emptyOrComplete(t, d, dir)
			harness.EventuallyTrue(t, "a checkpoint succeeds again", func() bool { return checkpointPod(t, pod, outputDir(t, d), list...) == nil })
		})
	}
}

// emptyOrComplete waits until no checkpoint is in progress, and checks the output.
func emptyOrComplete(t *testing.T, d *harness.Daemon, dir string) {
	t.Helper()
	harness.EventuallyTrue(t, "no checkpoint is recorded", func() bool {
		left, err := os.ReadDir(filepath.Join(d.Root, "checkpoints"))
		return err == nil && len(left) == 0
	})
	if len(harness.Get(os.ReadDir(dir))(t)) == 0 {
		return
	}
	from, to := harness.Get(os.Open(dir))(t), harness.Get(os.Open(t.TempDir()))(t)
	defer from.Close()
	defer to.Close()
	if _, err := archive.Import(t.Context(), from, to, harness.Get(archive.ReadKey(d.Root))(t)); err != nil {
		t.Errorf("the output is neither empty nor complete: %v", err)
	}
}

// limited mounts a small filesystem at a directory until release is called.
func limited(t *testing.T, dir, size string) (release func()) {
	t.Helper()
	harness.Must(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size="+size))
	mounted := true
	release = func() {
		if mounted {
			harness.Must(t, unix.Unmount(dir, unix.MNT_DETACH))
			mounted = false
		}
	}
	t.Cleanup(release)
	return release
}

// largeFile is a script that makes a file of some MiB that does not compress, and then counts.
func largeFile(mib int) string {
	return fmt.Sprintf("head -c %d /dev/urandom >/large && %s", mib<<20, counting)
}

// The filesystem of a checkpoint has space for the processes, but not for the writable layer or the
// tar.
func TestCheckpointOnFullFilesystemDuringCopies(t *testing.T) {
	d := startDaemon(t)
	pod := d.RunPod(t)
	c := pod.Run(t, harness.Script(largeFile(8)))
	waitCounted(t, c, 1)
	t.Run("writable layer", func(t *testing.T) {
		dir := outputDir(t, d)
		release := limited(t, dir, "4m")
		harness.WantCode(t, checkpointPod(t, pod, dir, c), codes.ResourceExhausted)
		isEmpty(t, dir)
		release()
	})
	t.Run("tar", func(t *testing.T) {
		dir := outputDir(t, d)
		release := limited(t, dir, "4m")
		_, err := harness.RawRuntime(t, d).CheckpointContainer(t.Context(), &runtimeapi.CheckpointContainerRequest{
			ContainerId: c.Id, Location: filepath.Join(dir, "archive.tar"), Timeout: 60})
		harness.WantCode(t, err, codes.ResourceExhausted)
		isEmpty(t, dir)
		var s unix.Statfs_t
		harness.Must(t, unix.Statfs(dir, &s))
		if used := s.Blocks - s.Bfree; used > 1 {
			t.Errorf("%d blocks are used", used)
		}
		release()
	})
	waitCounted(t, c, 1)
	harness.Must(t, checkpointPod(t, pod, outputDir(t, d), c))
}

// The node's filesystem has no space for the copy of the checkpoint, or for the copy but not for
// the writable layer. RestorePod says so and leaves nothing.
func TestRestoreOnFullFilesystem(t *testing.T) {
	root := t.TempDir()
	limited(t, root, "200m")
	d := startDaemon(t, func(_ *testing.T, d *harness.Daemon) { d.Root = filepath.Join(root, "root") })
	pod := d.RunPod(t)
	c := pod.Run(t, harness.Script(largeFile(8)))
	waitCounted(t, c, 1)
	s := save(t, pod, c)
	pod.Remove(t)
	harness.Eventually(t, "the pod's files are removed", func() error { return usesAtMost(root, 8<<20) })
	for _, test := range []struct {
		name string
		free uint64
		code codes.Code
	}{
		{"copy", 4 << 20, codes.FailedPrecondition},
		{"writable layer", 14 << 20, codes.ResourceExhausted},
	} {
		t.Run(test.name, func(t *testing.T) {
			release := ballast(t, root, test.free)
			restoreRefused(t, d, s.identity(t), test.code, "space")
			release()
			harness.Eventually(t, "nothing is left", func() error { return usesAtMost(root, 8<<20) })
		})
	}
	restored, containers := restorePod(t, d, s.identity(t))
	containers[0].Start(t)
	waitCounted(t, containers[0], 1)
	restored.Remove(t)
}

// usesAtMost returns an error if more bytes of a filesystem are used. The images take less.
func usesAtMost(dir string, most uint64) error {
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return err
	}
	if used := (s.Blocks - s.Bfree) * uint64(s.Bsize); used > most {
		return fmt.Errorf("%d bytes are used", used)
	}
	return nil
}
