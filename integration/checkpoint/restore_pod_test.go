package checkpoint

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/fixture"
	"berth/integration/harness"
)

// saved is a checkpoint of a pod, and the request that restores it.
type saved struct {
	d       *harness.Daemon
	request *runtimeapi.RestorePodRequest
}

// save makes a checkpoint of a pod with these containers.
func save(t *testing.T, pod *harness.Pod, containers ...*harness.Container) *saved {
	t.Helper()
	dir, err := os.MkdirTemp(pod.D.Dir, "checkpoint-")
	harness.Must(t, err)
	t.Cleanup(func() { harness.Must(t, os.RemoveAll(dir)) })
	s := &saved{pod.D, &runtimeapi.RestorePodRequest{CheckpointPath: dir, Config: pod.Config}}
	request := &runtimeapi.CheckpointPodRequest{PodSandboxId: pod.Id, OutputPath: dir}
	for _, c := range containers {
		request.ContainerIds = append(request.ContainerIds, c.Id)
		s.request.ContainerConfigs = append(s.request.ContainerConfigs, c.Config)
	}
	_, err = harness.RawRuntime(t, pod.D).CheckpointPod(t.Context(), request)
	harness.Must(t, err)
	return s
}

// identity gives the request a pod of another identity, with files of its own.
func (s *saved) identity(t *testing.T, change ...harness.PodOption) *runtimeapi.RestorePodRequest {
	t.Helper()
	request := proto.CloneOf(s.request)
	other := s.d.PodConfig(t, change...)
	request.Config.Metadata, request.Config.LogDirectory = other.Metadata, other.LogDirectory
	request.Config.Linux.CgroupParent = other.Linux.CgroupParent
	for _, c := range request.ContainerConfigs {
		harness.Must(t, os.MkdirAll(filepath.Dir(filepath.Join(other.LogDirectory, c.LogPath)), 0o755))
	}
	return request
}

// restorePod calls RestorePod and returns the created containers.
func restorePod(t *testing.T, d *harness.Daemon, request *runtimeapi.RestorePodRequest) (*harness.Pod, []*harness.Container) {
	t.Helper()
	response, err := harness.RawRuntime(t, d).RestorePod(t.Context(), request)
	harness.Must(t, err)
	pod := &harness.Pod{D: d, Id: response.PodSandboxId, Config: request.Config}
	d.Objects = append(d.Objects, pod.Id)
	var containers []*harness.Container
	for i, c := range response.RestoredContainers {
		harness.Equal(t, "name of a restored container", c.Name, request.ContainerConfigs[i].Metadata.Name)
		containers = append(containers, &harness.Container{Pod: pod, Id: c.ContainerId, Config: request.ContainerConfigs[i]})
		harness.Equal(t, "state of a restored container", containers[i].Status(t).State, runtimeapi.ContainerState_CONTAINER_CREATED)
		d.Objects = append(d.Objects, c.ContainerId)
	}
	return pod, containers
}

// restoreRefused calls RestorePod and expects an error with this code and text.
func restoreRefused(t *testing.T, d *harness.Daemon, request *runtimeapi.RestorePodRequest, code codes.Code, text string) {
	t.Helper()
	before := len(harness.Get(d.Cri.ListPodSandbox(t.Context(), nil))(t))
	response, err := harness.RawRuntime(t, d).RestorePod(t.Context(), request)
	if status.Code(err) != code || !strings.Contains(err.Error(), text) {
		t.Errorf("RestorePod: %v, %v; want %v with %q", response, err, code, text)
	}
	harness.Equal(t, "number of pods after the refusal", len(harness.Get(d.Cri.ListPodSandbox(t.Context(), nil))(t)), before)
}

// written returns the content of a container's log, which need not exist.
func written(t *testing.T, c *harness.Container) string {
	t.Helper()
	content, err := os.ReadFile(c.LogPath())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return string(content)
}

// counting is a script that counts in its log.
const counting = "i=0; while [ ! -e /stop ]; do i=$((i+1)); echo $i; sleep 0.02; done; exit 42"

// outputNumbers returns the numbers in a container's log.
func outputNumbers(t *testing.T, c *harness.Container) (list []int) {
	t.Helper()
	for _, field := range strings.Fields(c.Output(t)) {
		list = append(list, harness.Get(strconv.Atoi(field))(t))
	}
	return list
}

// waitCounted waits until the log has more numbers and expects that none is missing. It returns the
// first and the last.
func waitCounted(t *testing.T, c *harness.Container, more int) (first, last int) {
	t.Helper()
	var list []int
	harness.EventuallyTrue(t, "the container counts", func() bool { list = outputNumbers(t, c); return len(list) > more })
	for i, n := range list {
		if n != list[0]+i {
			t.Fatalf("numbers %v", list)
		}
	}
	return list[0], list[len(list)-1]
}

// A restored container continues, in a new log. It is like any other: exec, attach and statistics
// work, and it stops with its own exit code. The same checkpoint can be restored again, as another
// pod, and does not change.
func TestRestoredPodContinues(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithCRIU(t))
	pod := d.RunPod(t)
	a := pod.Run(t, harness.Script(counting), harness.Env("A", "1"))
	b := pod.Run(t, harness.Script(counting))
	waitCounted(t, a, 3)
	waitCounted(t, b, 3)
	s := save(t, pod, a, b)
	_, reachedA := waitCounted(t, a, 3)
	pod.Remove(t)
	for round := range 2 {
		restored, containers := restorePod(t, d, s.identity(t))
		for _, c := range containers {
			harness.Equal(t, "log of a created container", written(t, c), "")
			c.Start(t)
		}
		first, _ := waitCounted(t, containers[0], 3)
		if first < 3 || first > reachedA+1 {
			t.Errorf("round %d: it continues with %d, it had reached %d", round, first, reachedA)
		}
		waitCounted(t, containers[1], 3)
		harness.Equal(t, "environment of an exec", containers[0].Exec(t, "sh", "-c", "echo $A; hostname"), "1\n"+restored.Config.Hostname)
		harness.Equal(t, "exec sees the processes", strings.Contains(containers[0].Exec(t, "ps"), "sleep 0.02"), true)
		stats := harness.Get(d.Cri.ContainerStats(t.Context(), containers[0].Id))(t)
		if stats.GetMemory().GetUsageBytes().GetValue() == 0 || stats.GetCpu().GetUsageCoreNanoSeconds().GetValue() == 0 {
			t.Errorf("statistics %v", stats)
		}
		containers[0].Release(t, "/stop")
		harness.Equal(t, "exit code", containers[0].WaitExited(t).ExitCode, 42)
		containers[1].Stop(t, 0)
		harness.Equal(t, "exit code after a kill", containers[1].WaitExited(t).ExitCode, 137)
		restored.Remove(t)
	}
}

// buildWorkload returns an option that mounts and runs testdata/workload.c.
func buildWorkload(t *testing.T) harness.ContainerOption {
	t.Helper()
	path := program(t, "workload")
	return func(c *runtimeapi.ContainerConfig) {
		c.Command = []string{"/workload"}
		c.Mounts = append(c.Mounts, &runtimeapi.Mount{ContainerPath: "/workload", HostPath: path, Readonly: true})
	}
}

// state is a line of the workload.
type state struct{ tick, threads, file, pair, shared int }

func workloadLines(t *testing.T, c *harness.Container) (lines []state) {
	t.Helper()
	for line := range strings.Lines(c.Output(t)) {
		var s state
		_, err := fmt.Sscanf(line, "tick=%d threads=%d file=%d pair=%d shared=%d", &s.tick, &s.threads, &s.file, &s.pair, &s.shared)
		if err != nil {
			t.Fatalf("line %q: %v", line, err)
		}
		lines = append(lines, s)
	}
	return lines
}

// Threads, timers in an epoll set, a deleted open file, socket pairs, shared memory and a listening
// socket continue, with the pod's network and with that of the node.
func TestRestoreKeepsOpenFiles(t *testing.T) {
	for name, option := range map[string]harness.PodOption{"own network": func(*runtimeapi.PodSandboxConfig) {}, "host network": harness.HostNetwork} {
		t.Run(name, func(t *testing.T) {
			d := harness.StartDaemon(t, harness.WithCRIU(t))
			pod := d.RunPod(t, option)
			c := pod.Run(t, buildWorkload(t))
			harness.EventuallyTrue(t, "it works", func() bool { return len(workloadLines(t, c)) > 3 })
			s := save(t, pod, c)
			before := workloadLines(t, c)
			pod.Remove(t)
			restored, containers := restorePod(t, d, s.identity(t, option))
			containers[0].Start(t)
			var lines []state
			harness.EventuallyTrue(t, "it continues", func() bool { lines = workloadLines(t, containers[0]); return len(lines) > 5 })
			if lines[0].tick < 4 || lines[0].tick > before[len(before)-1].tick+1 {
				t.Errorf("it continues with %+v, it had reached %+v", lines[0], before[len(before)-1])
			}
			for i, l := range lines {
				if l.tick != lines[0].tick+i || l.file != l.tick || l.pair != l.tick || l.shared != l.tick {
					t.Errorf("line %d: %+v", i, l)
				}
			}
			if last := lines[len(lines)-1]; last.threads <= lines[0].threads {
				t.Errorf("the threads do not count: %+v, %+v", lines[0], last)
			}
			if out := containers[0].Exec(t, "nc", "127.0.0.1", "7000"); harness.Get(strconv.Atoi(out))(t) < lines[0].tick {
				t.Errorf("the socket answers %q", out)
			}
			restored.Remove(t)
		})
	}
}

// The writable layer and /dev/shm are as they were: new, changed, deleted and replaced files.
func TestRestoreKeepsFiles(t *testing.T) {
	const change = `cd / && echo new >new && mkdir -p dir/below && echo x >dir/below/file && chmod 700 dir && ln -s new link &&
		echo changed >/etc/passwd && rm /bin/yes && rm -r /var && mkdir /var && echo only >/var/only &&
		echo shared >/dev/shm/file && mknod fifo p && touch -d @86400 new`
	const show = `cd /; cat new dir/below/file link /etc/passwd /var/only /dev/shm/file; ls /bin/yes 2>&1; ls -A /var; stat -c "%a %F" dir fifo; stat -c %Y new`
	d := harness.StartDaemon(t, harness.WithCRIU(t))
	pod := d.RunPod(t)
	c := pod.Run(t, harness.Script(change+" && "+counting))
	waitCounted(t, c, 1)
	want := c.Exec(t, "sh", "-c", show)
	s := save(t, pod, c)
	pod.Remove(t)
	restored, containers := restorePod(t, d, s.identity(t))
	containers[0].Start(t)
	waitCounted(t, containers[0], 1)
	harness.Equal(t, "files", containers[0].Exec(t, "sh", "-c", show), want)
	harness.Equal(t, "the hidden directory", containers[0].Exec(t, "ls", "-A", "/var"), "only")
	restored.Remove(t)
}

// declaring pushes an image with VOLUMEs: one with a file, and a missing one.
func declaring(t *testing.T, tag string) (name string) {
	t.Helper()
	img := harness.BuildImage(t, v1.Config{Volumes: map[string]struct{}{"/data": {}, "/missing": {}}}, fixture.Tree{
		fixture.Dir("data", 0o750).Owned(7, 8), fixture.File("data/file", 0o644, "image\n"), fixture.File("data/gone", 0o644, ""),
	})
	name, _ = harness.Push(t, harness.Registry, "declaring:"+tag, img)
	return name
}

// The volumes of an image are as they were, with an open file. The container's next attempt gets
// new ones.
func TestRestoreKeepsVolumes(t *testing.T) {
	name := declaring(t, "saved")
	const show = `cat /data/file /missing/new /missing/open; ls -A /data; stat -c "%a %u:%g" /data /missing`
	d := startDaemon(t)
	pod := d.RunPod(t)
	c := pod.Run(t, harness.Image(name), harness.Script("exec 7>/missing/open; echo changed >>/data/file && rm /data/gone && echo new >/missing/new; echo open >&7; "+counting))
	waitCounted(t, c, 1)
	want := c.Exec(t, "sh", "-c", show)
	s := save(t, pod, c)
	pod.Remove(t)
	restored, containers := restorePod(t, d, s.identity(t))
	d.Restart(t)
	containers[0].Start(t)
	waitCounted(t, containers[0], 1)
	harness.Equal(t, "files", containers[0].Exec(t, "sh", "-c", show), want)
	harness.Equal(t, "the open file", containers[0].Exec(t, "sh", "-c", "echo more >/data/more; readlink /proc/1/fd/7"), "/missing/open")
	harness.Equal(t, "files of another container", restored.Sh(t, "cat /data/file; ls -A /data /missing", harness.Image(name)),
		"image\n/data:\nfile\ngone\n\n/missing:\n")
	restored.Remove(t)

	request := s.identity(t)
	request.ContainerConfigs[0].Mounts = append(request.ContainerConfigs[0].Mounts, &runtimeapi.Mount{HostPath: t.TempDir(), ContainerPath: "/data/sub"})
	restoreRefused(t, d, request, codes.FailedPrecondition, "mount of /data/sub")
}

// A container with a terminal and standard input continues, and both can be attached again.
func TestRestoreTerminal(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithCRIU(t))
	pod := d.RunPod(t)
	c := pod.Run(t, harness.Script("tty; while sleep 0.05; do echo tick; done"), harness.WithTerminal)
	c.WaitOutput(t, "tick")
	s := save(t, pod, c)
	pod.Remove(t)
	restored, containers := restorePod(t, d, s.identity(t))
	containers[0].Start(t)
	containers[0].WaitOutput(t, "tick")
	if out := containers[0].Output(t); strings.Contains(out, "tty") {
		t.Errorf("it started anew: %q", out)
	}
	harness.Equal(t, "its terminal", containers[0].Exec(t, "readlink", "/proc/1/fd/0"), "/dev/pts/0")
	restored.Remove(t)
}

// A daemon that ends between RestorePod and StartContainer leaves containers that can be started.
// The checkpoint itself is not needed any more.
func TestRestoreAcrossDaemons(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithCRIU(t))
	pod := d.RunPod(t)
	c := pod.Run(t, harness.Script(counting))
	waitCounted(t, c, 3)
	s := save(t, pod, c)
	pod.Remove(t)
	request := s.identity(t)
	moved := request.CheckpointPath + "-moved"
	restored, containers := restorePod(t, d, request)
	harness.Must(t, os.Rename(request.CheckpointPath, moved))
	d.Kill(t)
	d.Start(t)
	containers[0].Start(t)
	if first, _ := waitCounted(t, containers[0], 3); first < 4 {
		t.Errorf("it continues with %d", first)
	}
	d.Kill(t)
	d.Start(t)
	harness.Equal(t, "exec after another restart", containers[0].Exec(t, "echo", "fine"), "fine")
	containers[0].Release(t, "/stop")
	harness.Equal(t, "exit code", containers[0].WaitExited(t).ExitCode, 42)
	restored.Remove(t)
	harness.Must(t, os.Rename(moved, request.CheckpointPath))
}

// A restored pod that was not started ends with the node. The boot ID changes, as with a new
// kernel, or stays. The checkpoint can be restored afterwards.
func TestRestoreAfterReboot(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithCRIU(t))
	pod := d.RunPod(t)
	c := pod.Run(t, harness.Script(counting))
	waitCounted(t, c, 3)
	s := save(t, pod, c)
	pod.Remove(t)
	for _, boot := range []func(*testing.T){d.Boot, d.Start} {
		restored, containers := restorePod(t, d, s.identity(t))
		d.LosePower(t)
		boot(t)
		harness.Equal(t, "state after the reboot", containers[0].Status(t).State, runtimeapi.ContainerState_CONTAINER_EXITED)
		restored.Remove(t)
		again, containers := restorePod(t, d, s.identity(t))
		containers[0].Start(t)
		waitCounted(t, containers[0], 3)
		again.Remove(t)
	}
}

// RestorePod refuses requests for other containers than those of the checkpoint, and checkpoints
// that were changed. Nothing is left.
func TestRestoreRefuses(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithCRIU(t))
	pod := d.RunPod(t)
	c := pod.Run(t, harness.Script(counting), harness.Env("A", "1"))
	waitCounted(t, c, 1)
	s := save(t, pod, c)
	pod.Remove(t)
	for _, test := range []struct {
		name   string
		change func(*runtimeapi.RestorePodRequest, *runtimeapi.ContainerConfig)
		code   codes.Code
		text   string
	}{
		{"command", func(_ *runtimeapi.RestorePodRequest, c *runtimeapi.ContainerConfig) {
			c.Command = []string{"sleep", "1"}
		},
			codes.FailedPrecondition, "command"},
		{"environment", func(_ *runtimeapi.RestorePodRequest, c *runtimeapi.ContainerConfig) { c.Envs[0].Value = []byte("2") },
			codes.FailedPrecondition, "environment variable A"},
		{"directory", func(_ *runtimeapi.RestorePodRequest, c *runtimeapi.ContainerConfig) { c.WorkingDir = "/tmp" },
			codes.FailedPrecondition, "working directory"},
		{"user", func(_ *runtimeapi.RestorePodRequest, c *runtimeapi.ContainerConfig) {
			c.Linux.SecurityContext.RunAsUser = &runtimeapi.Int64Value{Value: 7}
		}, codes.FailedPrecondition, "user"},
		{"privileges", func(_ *runtimeapi.RestorePodRequest, c *runtimeapi.ContainerConfig) { c.Metadata.Name = "other" },
			codes.InvalidArgument, "container_configs"},
		{"options", func(r *runtimeapi.RestorePodRequest, _ *runtimeapi.ContainerConfig) {
			r.Options = map[string]string{"a": "b"}
		},
			codes.InvalidArgument, "options"},
		{"handler", func(r *runtimeapi.RestorePodRequest, _ *runtimeapi.ContainerConfig) { r.RuntimeHandler = "unknown" },
			codes.NotFound, "unknown"},
		{"path", func(r *runtimeapi.RestorePodRequest, _ *runtimeapi.ContainerConfig) { r.CheckpointPath += "/missing" },
			codes.InvalidArgument, "missing"},
	} {
		t.Run(test.name, func(t *testing.T) {
			request := s.identity(t)
			test.change(request, request.ContainerConfigs[0])
			restoreRefused(t, d, request, test.code, test.text)
		})
	}
	t.Run("changed image", func(t *testing.T) {
		images := harness.Get(filepath.Glob(filepath.Join(s.request.CheckpointPath, "*/checkpoint/core-1.img")))(t)
		f := harness.Get(os.OpenFile(images[0], os.O_WRONLY, 0))(t)
		harness.Get(f.WriteAt([]byte("x"), 40))(t)
		harness.Must(t, f.Close())
		restoreRefused(t, d, s.identity(t), codes.InvalidArgument, "core-1.img")
	})
}

// A process cannot get rights from a checkpoint that its config does not give.
func TestRestoreRefusesRights(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithCRIU(t))
	pod := d.RunPod(t)
	c := pod.Run(t, harness.Script(counting))
	waitCounted(t, c, 1)
	s := save(t, pod, c)
	pod.Remove(t)
	for want, change := range map[string]func(*runtimeapi.LinuxContainerSecurityContext){
		"no_new_privs": func(s *runtimeapi.LinuxContainerSecurityContext) { s.NoNewPrivs = true },
		"capabilities": func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.Capabilities = &runtimeapi.Capability{DropCapabilities: []string{"ALL"}}
		},
		"seccomp profile": func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.Seccomp = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault}
		},
	} {
		request := s.identity(t)
		change(request.ContainerConfigs[0].Linux.SecurityContext)
		restoreRefused(t, d, request, codes.FailedPrecondition, want+": the checkpoint has")
	}
}
