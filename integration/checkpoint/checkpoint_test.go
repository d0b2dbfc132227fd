package checkpoint

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/checkpoint/process/archive"
	"berth/integration/harness"
	"berth/integration/machine"
)

// startDaemon starts a daemon with CRIU, or skips the test.
func startDaemon(t *testing.T, options ...harness.DaemonOption) *harness.Daemon {
	t.Helper()
	return harness.StartDaemon(t, append(options, harness.WithCRIU(t))...)
}

// countingTree writes numbers to the log, to a file in the writable layer and to /dev/shm.
const countingTree = `rm -f /bin/yes; echo $$ > /root-file
i=0; while true; do i=$((i+1)); echo $i; echo $i > /counter; echo $i > /dev/shm/counter; sleep 0.02; done`

// countsIn returns the options of a container that counts as user 0. Without CAP_SYS_RESOURCE, CRIU
// cannot read the limits of other users' processes.
func countsIn(name string) []harness.ContainerOption {
	return []harness.ContainerOption{harness.ContainerNamed(name), harness.Script(countingTree)}
}

// last returns the last number in a container's log.
func last(t *testing.T, c *harness.Container) int {
	t.Helper()
	lines := strings.Fields(c.Output(t))
	if len(lines) == 0 {
		return 0
	}
	n, err := strconv.Atoi(lines[len(lines)-1])
	harness.Must(t, err)
	return n
}

// goesOn waits until the container has counted further.
func goesOn(t *testing.T, c *harness.Container) {
	t.Helper()
	before := last(t, c)
	harness.EventuallyTrue(t, "container "+c.Config.Metadata.Name+" goes on", func() bool { return last(t, c) > before+1 })
}

// run starts a pod with counters.
func run(t *testing.T, d *harness.Daemon, names ...string) (*harness.Pod, []*harness.Container) {
	t.Helper()
	pod := d.RunPod(t)
	var list []*harness.Container
	for _, name := range names {
		list = append(list, pod.Run(t, countsIn(name)...))
	}
	for _, c := range list {
		goesOn(t, c)
	}
	return pod, list
}

// outputDir makes an empty directory.
func outputDir(t *testing.T, d *harness.Daemon) string {
	t.Helper()
	dir, err := os.MkdirTemp(d.Dir, "checkpoint-")
	harness.Must(t, err)
	t.Cleanup(func() { harness.Must(t, os.RemoveAll(dir)) })
	return dir
}

func podRequest(pod *harness.Pod, dir string, list ...*harness.Container) *runtimeapi.CheckpointPodRequest {
	req := &runtimeapi.CheckpointPodRequest{PodSandboxId: pod.Id, OutputPath: dir}
	for _, c := range list {
		req.ContainerIds = append(req.ContainerIds, c.Id)
	}
	return req
}

func checkpointPod(t *testing.T, pod *harness.Pod, dir string, list ...*harness.Container) error {
	t.Helper()
	_, err := harness.RawRuntime(t, pod.D).CheckpointPod(t.Context(), podRequest(pod, dir, list...))
	return err
}

// isEmpty checks that a failed checkpoint has left nothing.
func isEmpty(t *testing.T, dir string) {
	t.Helper()
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left in the output: %v, %v", left, err)
	}
}

// tarFiles returns the contents of a tar's files.
func tarFiles(t *testing.T, r io.Reader) map[string]string {
	t.Helper()
	files := map[string]string{}
	for archive := tar.NewReader(r); ; {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		harness.Must(t, err)
		data, err := io.ReadAll(archive)
		harness.Must(t, err)
		files[h.Name] = string(data)
	}
}

func tarIn(t *testing.T, path string) map[string]string {
	t.Helper()
	f, err := os.Open(path)
	harness.Must(t, err)
	defer f.Close()
	return tarFiles(t, f)
}

func TestCheckpointPod(t *testing.T) {
	d := startDaemon(t)
	pod, list := run(t, d, "one", "two")
	dir := outputDir(t, d)
	harness.Must(t, checkpointPod(t, pod, dir, list...))
	for _, c := range list {
		goesOn(t, c)
	}
	for _, name := range []string{"manifest.json", "pod.dump", "pod.options"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			t.Error(err)
		}
	}
	for _, name := range []string{"one", "two"} {
		part := filepath.Join(dir, name)
		for _, file := range []string{"checkpoint/inventory.img", "config.dump", "spec.dump", "status.dump", "bind.mounts", "dump.log", "stats-dump"} {
			if _, err := os.Stat(filepath.Join(part, file)); err != nil {
				t.Error(err)
			}
		}
		files := tarIn(t, filepath.Join(part, "rootfs-diff.tar"))
		_, counted := files["counter"] // it may be empty: the shell truncates it before each number
		if files["root-file"] != "1\n" || !counted {
			t.Errorf("writable layer of %s: %q", name, files)
		}
		data, err := os.ReadFile(filepath.Join(part, "deleted.files"))
		var deleted []string
		if err := errors.Join(err, json.Unmarshal(data, &deleted)); err != nil || !slices.Contains(deleted, "/bin/yes") {
			t.Errorf("deleted files of %s: %q, %v", name, deleted, err)
		}
	}
	files := tarIn(t, filepath.Join(dir, "devshm-checkpoint.tar"))
	if _, counted := files["counter"]; !counted {
		t.Errorf("/dev/shm: %q", files)
	}
	harness.WantCode(t, checkpointPod(t, pod, dir, list...), codes.FailedPrecondition, "not empty")
	again := outputDir(t, d)
	harness.Must(t, checkpointPod(t, pod, again, list...))
	// Stops, execs and removals work as before.
	harness.Equal(t, "exec", list[0].Exec(t, "echo", "works"), "works")
	list[0].Stop(t, 0)
	harness.WantCode(t, checkpointPod(t, pod, outputDir(t, d), list...), codes.FailedPrecondition, "does not run")
}

// Each container sees the numbers of the other in a shared volume. If one ran on before the other
// was captured, the other would have seen a number that the first one's file does not have yet.
func TestCheckpointPodIsConsistentCut(t *testing.T) {
	d := startDaemon(t)
	shared := filepath.Join(d.Dir, "shared")
	harness.Must(t, os.Mkdir(shared, 0o755))
	pod := d.RunPod(t)
	script := func(own, other string) []harness.ContainerOption {
		return []harness.ContainerOption{
			harness.ContainerNamed(own),
			harness.Mount(&runtimeapi.Mount{HostPath: shared, ContainerPath: "/shared"}),
			harness.Script(`i=0; while true; do i=$((i+1)); echo $i > /own.new; mv /own.new /own
echo $i > /shared/` + own + `.new; mv /shared/` + own + `.new /shared/` + own + `
cat /shared/` + other + ` > /seen.new 2>/dev/null && mv /seen.new /seen; done`),
		}
	}
	a, b := pod.Run(t, script("a", "b")...), pod.Run(t, script("b", "a")...)
	seen := filepath.Join(d.Root, "rootfs", b.Id, "upper/seen")
	harness.EventuallyTrue(t, "the containers see each other", func() bool { _, err := os.Stat(seen); return err == nil })
	for range 5 {
		dir := outputDir(t, d)
		harness.Must(t, checkpointPod(t, pod, dir, a, b))
		number := func(c, file string) int {
			n, err := strconv.Atoi(strings.TrimSpace(tarIn(t, filepath.Join(dir, c, "rootfs-diff.tar"))[file]))
			if err != nil {
				return 0 // not seen yet
			}
			return n
		}
		if seen, own := number("b", "seen"), number("a", "own"); seen > own {
			t.Errorf("b has seen %d of a, which has %d", seen, own)
		}
		if seen, own := number("a", "seen"), number("b", "own"); seen > own {
			t.Errorf("a has seen %d of b, which has %d", seen, own)
		}
	}
}

func TestCheckpointContainer(t *testing.T) {
	d := startDaemon(t)
	_, list := run(t, d, "one", "two")
	place := filepath.Join(d.Dir, "archive.tar")
	request := &runtimeapi.CheckpointContainerRequest{ContainerId: list[0].Id, Location: place, Timeout: 60}
	for range 2 {
		_, err := harness.RawRuntime(t, d).CheckpointContainer(t.Context(), request)
		harness.Must(t, err)
		info, err := os.Lstat(place)
		harness.Must(t, err)
		harness.Equal(t, "mode", info.Mode(), 0o600)
	}
	goesOn(t, list[0])
	goesOn(t, list[1])
	files := tarIn(t, place)
	for _, name := range []string{archive.ManifestFile, archive.ConfigFile, archive.SpecFile, "checkpoint/inventory.img",
		"checkpoint/descriptors.json", archive.RootfsDiffFile, archive.ShmFile, archive.StatusFile, archive.BindMountsFile} {
		if _, has := files[name]; !has {
			t.Errorf("%s is missing", name)
		}
	}
	harness.WantText(t, "spec.dump", files[archive.SpecFile], "io.kubernetes.cri-o.Annotations", "io.kubernetes.cri-o.Metadata")
	harness.Must(t, os.Remove(place))
	for name, tt := range map[string]struct {
		request *runtimeapi.CheckpointContainerRequest
		want    codes.Code
	}{
		"unknown":  {&runtimeapi.CheckpointContainerRequest{ContainerId: "unknown", Location: place}, codes.NotFound},
		"relative": {&runtimeapi.CheckpointContainerRequest{ContainerId: list[0].Id, Location: "archive"}, codes.InvalidArgument},
		"no folder": {&runtimeapi.CheckpointContainerRequest{ContainerId: list[0].Id, Location: place + "/missing/a"},
			codes.FailedPrecondition},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := harness.RawRuntime(t, d).CheckpointContainer(t.Context(), tt.request)
			harness.WantCode(t, err, tt.want)
		})
	}
}

// A checkpoint at its deadline leaves containers that run and no file.
func TestCheckpointDeadline(t *testing.T) {
	d := startDaemon(t)
	pod, list := run(t, d, "one", "two")
	for _, limit := range []time.Duration{time.Millisecond, 20 * time.Millisecond, 60 * time.Millisecond, 120 * time.Millisecond} {
		dir := outputDir(t, d)
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		_, err := harness.RawRuntime(t, d).CheckpointPod(ctx, podRequest(pod, dir, list...))
		cancel()
		for _, c := range list {
			goesOn(t, c)
		}
		if err != nil {
			harness.WantCode(t, err, codes.DeadlineExceeded)
			harness.EventuallyTrue(t, "the output is empty", func() bool { left, err := os.ReadDir(dir); return err == nil && len(left) == 0 })
		}
	}
	// The daemon answers after it has undone everything, so the next one finds nothing in its way.
	harness.EventuallyTrue(t, "a checkpoint succeeds again", func() bool { return checkpointPod(t, pod, outputDir(t, d), list...) == nil })
}

// A stop during a checkpoint cancels it.
func TestStopDuringCheckpoint(t *testing.T) {
	var f harness.Failpoints
	d := startDaemon(t, harness.WithFailpoints(&f))
	pod, list := run(t, d, "one", "two")
	dir := outputDir(t, d)
	done := harness.Go(func() error { return checkpointPod(t, pod, dir, list...) })
	harness.EventuallyTrue(t, "the checkpoint has begun", func() bool { left, err := os.ReadDir(dir); return err != nil || len(left) > 0 })
	list[0].Stop(t, 0)
	if err := <-done; err != nil { // the checkpoint may have been faster
		if code := harness.CodeOf(err); code != codes.FailedPrecondition && code != codes.Unavailable && code != codes.Internal {
			t.Errorf("%v", err)
		}
		isEmpty(t, dir)
	}
	goesOn(t, list[1])
	list[0].WaitExited(t)
}

func TestCheckpointRefusals(t *testing.T) {
	d := startDaemon(t)
	pod, list := run(t, d, "one", "two")
	other, _ := run(t, d, "three")
	dir := outputDir(t, d)
	request := func(change func(*runtimeapi.CheckpointPodRequest)) error {
		req := podRequest(pod, dir, list...)
		change(req)
		_, err := harness.RawRuntime(t, d).CheckpointPod(t.Context(), req)
		isEmpty(t, dir)
		return err
	}
	harness.WantCode(t, request(func(r *runtimeapi.CheckpointPodRequest) { r.Options = map[string]string{"a": "b"} }), codes.InvalidArgument, "option")
	harness.WantCode(t, request(func(r *runtimeapi.CheckpointPodRequest) { r.ContainerIds = r.ContainerIds[:1] }), codes.FailedPrecondition)
	harness.WantCode(t, request(func(r *runtimeapi.CheckpointPodRequest) { r.PodSandboxId = other.Id }), codes.InvalidArgument)
	harness.WantCode(t, request(func(r *runtimeapi.CheckpointPodRequest) { r.OutputPath += "/missing" }), codes.FailedPrecondition)
	// An exec that does not end within a second.
	session := harness.Go(func() error {
		_, _, err := d.Cri.ExecSync(t.Context(), list[0].Id, []string{"sh", "-c", "touch /exec; while [ ! -e /done ]; do sleep 0.01; done"}, 0)
		return err
	})
	harness.EventuallyTrue(t, "the exec runs", func() bool {
		_, err := os.Stat(filepath.Join(d.Root, "rootfs", list[0].Id, "upper/exec"))
		return err == nil
	})
	harness.WantCode(t, request(func(*runtimeapi.CheckpointPodRequest) {}), codes.FailedPrecondition, "exec")
	list[0].Release(t, "/done")
	harness.Must(t, <-session)
	for _, c := range list {
		goesOn(t, c)
	}
	harness.Must(t, checkpointPod(t, pod, dir, list...))
}

// With a shared PID namespace the pause adopts orphans. CRIU would leave them out of the dump.
func TestOrphansAreRefused(t *testing.T) {
	d := startDaemon(t)
	pod := d.RunPod(t, harness.SharedPID)
	c := pod.Run(t, countsIn("one")...)
	goesOn(t, c)
	dir := outputDir(t, d)
	c.Exec(t, "sh", "-c", "sleep 1000 </dev/null >/dev/null 2>&1 &")
	harness.WantCode(t, checkpointPod(t, pod, dir, c), codes.FailedPrecondition, "adopted")
	isEmpty(t, dir)
	goesOn(t, c)
	c.Exec(t, "killall", "-9", "sleep")
	harness.EventuallyTrue(t, "a checkpoint without orphans succeeds", func() bool {
		err := checkpointPod(t, pod, dir, c)
		if err != nil {
			t.Log(err)
		}
		return err == nil
	})
}

// Without CRIU nothing is frozen and the error says what is missing.
func TestCheckpointWithoutCRIU(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithConfig(`checkpoint.criu = "/nonexistent/criu"`))
	pod, list := run(t, d, "one")
	dir := outputDir(t, d)
	harness.WantCode(t, checkpointPod(t, pod, dir, list...), codes.FailedPrecondition, "CRIU is not installed")
	isEmpty(t, dir)
	goesOn(t, list[0])
}

// A full filesystem is reported as such, and nothing is left on it.
func TestCheckpointOnFullFilesystem(t *testing.T) {
	d := startDaemon(t)
	pod, list := run(t, d, "one", "two")
	dir := outputDir(t, d)
	harness.Must(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=128k"))
	defer func() { harness.Must(t, unix.Unmount(dir, unix.MNT_DETACH)) }()
	harness.WantCode(t, checkpointPod(t, pod, dir, list...), codes.ResourceExhausted)
	isEmpty(t, dir)
	for _, c := range list {
		goesOn(t, c)
	}
}

// killed restarts the daemon after something was killed, and checks that the containers run and
// that nothing is left.
func killed(t *testing.T, d *harness.Daemon, dir string, list []*harness.Container) {
	t.Helper()
	for _, c := range list {
		goesOn(t, c)
	}
	harness.EventuallyTrue(t, "the output is empty", func() bool { left, err := os.ReadDir(dir); return err == nil && len(left) == 0 })
	harness.EventuallyTrue(t, "no checkpoint is recorded", func() bool {
		left, err := os.ReadDir(filepath.Join(d.Root, "checkpoints"))
		return err == nil && len(left) == 0
	})
}

// The daemon is killed at each step of a checkpoint.
func TestDaemonIsKilledDuringCheckpoint(t *testing.T) {
	for _, point := range []string{
		"record.renamed", "checkpoint.part-made", "checkpoint.freeze", "checkpoint.frozen", "dump.run",
		"checkpoint.file-made", "checkpoint.file-filled", "dump.ran", "dump.close", "dump.closed", "checkpoint.write-file",
	} {
		t.Run(point, func(t *testing.T) {
			var f harness.Failpoints
			d := startDaemon(t, harness.WithFailpoints(&f))
			pod, list := run(t, d, "one", "two")
			dir := outputDir(t, d)
			f.Kill(t, d, point, 1)
			if err := checkpointPod(t, pod, dir, list...); err == nil {
				t.Fatal("the daemon was not killed")
			}
			if !d.WaitKilled(t, harness.Patience) {
				t.Fatal("the daemon was not killed")
			}
			for _, c := range list {
				goesOn(t, c) // without a daemon
			}
			d.Start(t)
			killed(t, d, dir, list)
			harness.Must(t, checkpointPod(t, pod, dir, list...))
		})
	}
}

// The launcher of a dump is killed at each step.
func TestLauncherIsKilledDuringCheckpoint(t *testing.T) {
	for _, point := range []string{"launcher.dump-ordered", "launcher.criu-started", "launcher.descriptors-written",
		"launcher.criu-dump", "launcher.criu-dumped", "launcher.dump-ended"} {
		t.Run(point, func(t *testing.T) {
			var f harness.Failpoints
			d := startDaemon(t, harness.WithFailpoints(&f))
			pod, list := run(t, d, "one", "two")
			dir := outputDir(t, d)
			f.KillNext(t, harness.LauncherProgram, point, 1)
			if err := checkpointPod(t, pod, dir, list...); err == nil {
				t.Fatal("the launcher was not killed")
			}
			killed(t, d, dir, list)
			harness.Must(t, checkpointPod(t, pod, dir, list...))
		})
	}
}

// The launcher has told the result before it waits for CRIU's end. Without it, the daemon does
// that.
func TestLauncherIsKilledAfterCheckpoint(t *testing.T) {
	var f harness.Failpoints
	d := startDaemon(t, harness.WithFailpoints(&f))
	pod, list := run(t, d, "one", "two")
	dir := outputDir(t, d)
	f.KillNext(t, harness.LauncherProgram, "launcher.end-criu", 1)
	harness.Must(t, checkpointPod(t, pod, dir, list...))
	for _, c := range list {
		goesOn(t, c)
	}
	if left := criuPIDs(); len(left) > 0 {
		t.Errorf("CRIU runs: %v", left)
	}
}

// A CRIU that is killed before it touches the container fails the checkpoint, and the container
// goes on. A later kill can end the container; integration/crash checks that.
func TestCRIUIsKilledBeforeDump(t *testing.T) {
	var f harness.Failpoints
	d := startDaemon(t, harness.WithFailpoints(&f))
	pod, list := run(t, d, "one", "two")
	dir := outputDir(t, d)
	f.FreezeNext(t, harness.LauncherProgram, "launcher.criu-dump", 1)
	done := harness.Go(func() error { return checkpointPod(t, pod, dir, list...) })
	if !f.WaitReached(harness.Patience) {
		f.Disarm()
		t.Fatal("the point was not reached")
	}
	before := 0
	for _, pid := range criuPIDs() {
		if criuWaits(pid) {
			harness.Must(t, syscall.Kill(pid, syscall.SIGKILL))
			before++
		}
	}
	if before == 0 {
		t.Error("no CRIU waits for its request")
	}
	var err error
	harness.EventuallyTrue(t, "the checkpoint ends", func() bool {
		machine.ContinueAll() // again: the launcher stops after it was reported
		select {
		case err = <-done:
			return true
		default:
			return false
		}
	})
	if err == nil {
		t.Fatal("the checkpoint succeeded")
	}
	killed(t, d, dir, list)
	harness.Must(t, checkpointPod(t, pod, dir, list...))
}

// criuWaits returns whether CRIU has got no dump request. It renames itself when it gets one.
func criuWaits(pid int) bool {
	return strings.HasSuffix(strings.TrimSpace(machine.CommandLine(pid)), "swrk 3")
}

// criuPIDs returns the processes in the cgroups of this machine's CRIUs.
func criuPIDs() (pids []int) {
	files, _ := filepath.Glob("/sys/fs/cgroup/*/" + harness.Machine + "/*/berth-criu-*/cgroup.procs")
	more, _ := filepath.Glob("/sys/fs/cgroup/" + harness.Machine + "/*/berth-criu-*/cgroup.procs")
	for _, file := range append(files, more...) {
		data, _ := os.ReadFile(file)
		for _, field := range strings.Fields(string(data)) {
			if pid, err := strconv.Atoi(field); err == nil {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

// The monitor of one container is killed. berth kills that container, as always; the other goes on.
func TestMonitorIsKilledDuringCheckpoint(t *testing.T) {
	for _, point := range []string{"monitor.freeze", "monitor.frozen", "monitor.thaw", "monitor.thawed"} {
		t.Run(point, func(t *testing.T) {
			var f harness.Failpoints
			d := startDaemon(t, harness.WithFailpoints(&f))
			pod, list := run(t, d, "one", "two")
			dir := outputDir(t, d)
			f.KillNext(t, harness.MonitorProgram, point, 1)
			if err := checkpointPod(t, pod, dir, list...); err == nil {
				t.Fatal("the checkpoint succeeded")
			}
			isEmpty(t, dir)
			harness.EventuallyTrue(t, "one container has exited", func() bool {
				return list[0].Status(t).State != list[1].Status(t).State
			})
			for _, c := range list {
				if c.Status(t).State == runtimeapi.ContainerState_CONTAINER_RUNNING {
					goesOn(t, c)
				}
			}
		})
	}
}
