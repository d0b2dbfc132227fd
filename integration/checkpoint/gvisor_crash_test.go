package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
)

// runCounter runs a pod with a counter in a sandbox.
func runCounter(t *testing.T, d *harness.Daemon) (*harness.Pod, *harness.Container) {
	t.Helper()
	pod := runGVisor(t, d)
	c := pod.Run(t, harness.Script(counting))
	goesOn(t, c)
	return pod, c
}

// A full filesystem is reported as such, and nothing is left on it.
func TestGVisorOnFullFilesystem(t *testing.T) {
	d := startGVisor(t)
	pod, c := runCounter(t, d)
	dir := outputDir(t, d)
	harness.Must(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"))
	defer func() { harness.Must(t, unix.Unmount(dir, unix.MNT_DETACH)) }()
	harness.WantCode(t, checkpointPod(t, pod, dir, c), codes.ResourceExhausted)
	isEmpty(t, dir)
	goesOn(t, c)
}

// slowly returns a runsc whose command checkpoint writes the file begun, and waits for the file end
// before it begins.
func slowly(t *testing.T) (program, begun, end string) {
	t.Helper()
	dir := t.TempDir()
	program, begun, end = filepath.Join(dir, "runsc"), filepath.Join(dir, "begun"), filepath.Join(dir, "end")
	script := fmt.Sprintf(`#!/bin/sh
case " $* " in *" checkpoint "*) touch %s; while [ ! -e %s ]; do sleep 0.01; done ;; esac
exec %s "$@"
`, begun, end, os.Getenv("BERTH_RUNSC"))
	harness.Must(t, os.WriteFile(program, []byte(script), 0o700))
	return program, begun, end
}

// At its deadline a checkpoint waits for the sandbox, which then runs. No file is left.
func TestGVisorDeadline(t *testing.T) {
	program, begun, end := slowly(t)
	d := startGVisor(t, harness.WithHandler("slow", program))
	config := d.PodConfig(t)
	id := harness.Get(d.Cri.RunPodSandbox(t.Context(), config, "slow"))(t)
	d.Objects = append(d.Objects, id)
	pod := &harness.Pod{D: d, Id: id, Config: config}
	c := pod.Run(t, harness.Script(counting))
	dir := outputDir(t, d)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := harness.Go(func() error {
		_, err := harness.RawRuntime(t, d).CheckpointPod(ctx, podRequest(pod, dir, c))
		return err
	})
	harness.Eventually(t, "the save begins", func() error { _, err := os.Stat(begun); return err })
	cancel()
	harness.WantCode(t, <-ended, codes.Canceled)
	goesOn(t, c)
	harness.WantCode(t, checkpointPodWithin(t, pod, 100*time.Millisecond, outputDir(t, d), c), codes.DeadlineExceeded)
	harness.Must(t, os.WriteFile(end, nil, 0o600))
	harness.EventuallyTrue(t, "the output is empty", func() bool { left, err := os.ReadDir(dir); return err == nil && len(left) == 0 })
	goesOn(t, c)
	harness.Must(t, checkpointPod(t, pod, outputDir(t, d), c))
}

// A stop waits for the end of the save, cancels the rest of the checkpoint, and ends the container.
func TestGVisorStopDuringSave(t *testing.T) {
	program, begun, end := slowly(t)
	d := startGVisor(t, harness.WithHandler("slow", program))
	config := d.PodConfig(t)
	id := harness.Get(d.Cri.RunPodSandbox(t.Context(), config, "slow"))(t)
	d.Objects = append(d.Objects, id)
	pod := &harness.Pod{D: d, Id: id, Config: config}
	c := pod.Run(t, harness.Script(counting))
	dir := outputDir(t, d)
	saving := harness.Go(func() error { return checkpointPod(t, pod, dir, c) })
	harness.Eventually(t, "the save begins", func() error { _, err := os.Stat(begun); return err })
	stopping := harness.Go(func() error { return d.Cri.StopContainer(t.Context(), c.Id, 0) })
	goesOn(t, c)
	harness.Must(t, os.WriteFile(end, nil, 0o600))
	harness.WantCode(t, <-saving, codes.FailedPrecondition, "stopped during its checkpoint")
	isEmpty(t, dir)
	harness.Must(t, <-stopping)
	harness.Equal(t, "exit code", c.WaitExited(t).ExitCode, 137)
}

// checkpointPodWithin makes a checkpoint with a deadline.
func checkpointPodWithin(t *testing.T, pod *harness.Pod, limit time.Duration, dir string, c *harness.Container) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	_, err := harness.RawRuntime(t, pod.D).CheckpointPod(ctx, podRequest(pod, dir, c))
	return err
}

// runscPIDs returns the processes of runsc with a command. They are in this machine's PID
// namespace.
func runscPIDs(command string) (pids []int) {
	found, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range found {
		data, _ := os.ReadFile(path) // the process may have ended
		args := strings.Split(string(data), "\x00")
		var pid int
		if _, err := fmt.Sscanf(path, "/proc/%d/cmdline", &pid); err != nil || !strings.HasPrefix(filepath.Base(args[0]), "runsc") {
			continue
		}
		for _, arg := range args[1:] {
			if arg == command {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

// The command that saves is killed. The sandbox ends its save and goes on; no file is left.
func TestRunscIsKilledDuringCheckpoint(t *testing.T) {
	d := startGVisor(t)
	pod := runGVisor(t, d)
	c := pod.Run(t, harness.Script("dd if=/dev/urandom of=/large bs=1M count=100 2>/dev/null; "+counting))
	goesOn(t, c)
	for round := range 3 {
		dir := outputDir(t, d)
		done := harness.Go(func() error { return checkpointPod(t, pod, dir, c) })
		killed := false
		harness.EventuallyTrue(t, "the command runs", func() bool {
			if round > 0 { // the sandbox writes
				if _, err := os.Stat(filepath.Join(dir, c.Config.Metadata.Name, "checkpoint/pages.img")); err != nil {
					return false
				}
			}
			for _, pid := range runscPIDs("checkpoint") {
				killed = syscall.Kill(pid, syscall.SIGKILL) == nil || killed
			}
			return killed
		})
		harness.WantCode(t, <-done, codes.FailedPrecondition, "killed")
		killedSave(t, d, dir, c)
	}
	harness.Must(t, checkpointPod(t, pod, outputDir(t, d), c))
}

// killedSave checks that the container runs and that nothing of its checkpoint is left.
func killedSave(t *testing.T, d *harness.Daemon, dir string, c *harness.Container) {
	t.Helper()
	killed(t, d, dir, []*harness.Container{c})
	if left := runscPIDs("checkpoint"); len(left) > 0 {
		t.Errorf("commands are left: %v", left)
	}
}

// The daemon is killed at each step of a checkpoint.
func TestDaemonIsKilledDuringGVisorCheckpoint(t *testing.T) {
	for _, point := range []string{"record.renamed", "checkpoint.part-made", "checkpoint.save-sandbox", "program.run", "program.ran",
		"checkpoint.sandbox-saved", "checkpoint.write-file", "checkpoint.rename-manifest"} {
		t.Run(point, func(t *testing.T) {
			var f harness.Failpoints
			d := startGVisor(t, harness.WithFailpoints(&f))
			pod, c := runCounter(t, d)
			dir := outputDir(t, d)
			f.Kill(t, d, point, 1)
			if err := checkpointPod(t, pod, dir, c); err == nil || !d.WaitKilled(t, harness.Patience) {
				t.Fatalf("the daemon was not killed: %v", err)
			}
			goesOn(t, c) // without a daemon
			d.Start(t)
			killedSave(t, d, dir, c)
			harness.Must(t, checkpointPod(t, pod, dir, c))
		})
	}
}

// The daemon is killed while the sandbox writes. The sandbox goes on, and no file is left.
func TestDaemonIsKilledDuringSave(t *testing.T) {
	d := startGVisor(t)
	pod := runGVisor(t, d)
	c := pod.Run(t, harness.Script("dd if=/dev/urandom of=/large bs=1M count=100 2>/dev/null; "+counting))
	goesOn(t, c)
	dir := outputDir(t, d)
	done := harness.Go(func() error { return checkpointPod(t, pod, dir, c) })
	harness.Eventually(t, "the sandbox writes", func() error {
		_, err := os.Stat(filepath.Join(dir, c.Config.Metadata.Name, "checkpoint/pages.img"))
		return err
	})
	d.Kill(t)
	if <-done == nil {
		t.Error("the checkpoint succeeded")
	}
	goesOn(t, c)
	d.Start(t)
	killedSave(t, d, dir, c)
	harness.Must(t, checkpointPod(t, pod, dir, c))
}

// The daemon is killed at each step of the start of a restored container. The next one finds it
// running, or can start it.
func TestDaemonIsKilledDuringGVisorStart(t *testing.T) {
	for _, point := range []string{"launcher.launch-ordered", "launcher.program-create", "launcher.program-created", "launcher.execute",
		"launcher.program-restore", "launcher.program-restored", "launcher.start-waiter", "launcher.executed"} {
		t.Run(point, func(t *testing.T) {
			var f harness.Failpoints
			d := startGVisor(t, harness.WithFailpoints(&f))
			pod, c := runCounter(t, d)
			s := saveGVisor(t, pod, c)
			pod.Remove(t)
			restored, containers := restorePod(t, d, s.identity(t))
			f.FreezeNext(t, harness.LauncherProgram, point, 1)
			ended := harness.Go(func() error { return d.Cri.StartContainer(t.Context(), containers[0].Id) })
			if !f.WaitReached(harness.Patience) {
				t.Fatal("the launcher has not reached the point")
			}
			d.Kill(t)
			if <-ended == nil {
				t.Error("the container started")
			}
			machine.ContinueAll()
			d.Start(t)
			containers[0].Start(t)
			if first, _ := waitCounted(t, containers[0], 3); first < 2 {
				t.Errorf("it continues with %d", first)
			}
			containers[0].Release(t, "/stop")
			harness.Equal(t, "exit code", containers[0].WaitExited(t).ExitCode, 42)
			restored.Remove(t)
		})
	}
}

// The launcher of a restored pod or container is killed. Nothing is left of a pod. A container has
// failed, or has not started.
func TestLauncherIsKilledDuringGVisorRestore(t *testing.T) {
	for _, point := range []string{"launcher.program-created", "launcher.program-restore", "launcher.program-restored"} {
		for _, step := range []string{"RestorePod", "StartContainer"} {
			t.Run(step+" "+point, func(t *testing.T) {
				var f harness.Failpoints
				d := startGVisor(t, harness.WithFailpoints(&f))
				pod, c := runCounter(t, d)
				s := saveGVisor(t, pod, c)
				pod.Remove(t)
				request := s.identity(t)
				if step == "RestorePod" {
					f.KillNext(t, harness.LauncherProgram, point, 1)
					restoreRefused(t, d, request, codes.Internal, "launcher")
				} else {
					restored, containers := restorePod(t, d, request)
					f.KillNext(t, harness.LauncherProgram, point, 1)
					harness.WantCode(t, d.Cri.StartContainer(t.Context(), containers[0].Id), codes.Internal, "launcher")
					harness.Equal(t, "reason", containers[0].Status(t).Reason, "StartError")
					restored.Remove(t)
				}
				restored, containers := restorePod(t, d, s.identity(t))
				containers[0].Start(t)
				waitCounted(t, containers[0], 3)
				restored.Remove(t)
			})
		}
	}
}

// A restored pod whose container has not started can be stopped, and loses its sandbox like any
// other.
func TestGVisorWaitingSandboxEnds(t *testing.T) {
	d := startGVisor(t)
	pod, c := runCounter(t, d)
	s := saveGVisor(t, pod, c)
	pod.Remove(t)
	for _, end := range []string{"stop", "kill", "reboot"} {
		t.Run(end, func(t *testing.T) {
			restored, containers := restorePod(t, d, s.identity(t))
			switch end {
			case "stop":
				harness.Must(t, d.Cri.StopPodSandbox(t.Context(), restored.Id))
			case "kill":
				harness.Must(t, syscall.Kill(sandboxPID(t, restored), syscall.SIGKILL))
				harness.EventuallyTrue(t, "the pod is not ready", func() bool {
					return restored.Status(t).State == runtimeapi.PodSandboxState_SANDBOX_NOTREADY
				})
			case "reboot":
				d.LosePower(t)
				d.Start(t)
			}
			if err := d.Cri.StartContainer(t.Context(), containers[0].Id); err == nil {
				t.Error("the container started")
			}
			harness.Equal(t, "output", written(t, containers[0]), "")
			restored.Remove(t)
		})
	}
}

// sandboxPID returns the process of a pod's sandbox.
func sandboxPID(t *testing.T, pod *harness.Pod) int {
	t.Helper()
	for _, pid := range runscPIDs("boot") {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if !errors.Is(err, os.ErrNotExist) && strings.Contains(string(data), pod.Id) {
			return pid
		}
	}
	t.Fatal("the sandbox does not run")
	return 0
}
