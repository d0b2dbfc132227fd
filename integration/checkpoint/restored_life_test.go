package checkpoint

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/logs"
	"berth/integration/machine"
)

// A restored container writes to the log of its request. The old log stays as it was. After a
// rotation the container writes to the new file, and no line is lost.
func TestRestoredLog(t *testing.T) {
	d := startDaemon(t)
	pod := d.RunPod(t)
	c := pod.Run(t, harness.Script("i=0; while :; do i=$((i+1)); echo $i; echo e$i >&2; sleep 0.01; done"))
	c.WaitOutput(t, "e3\n")
	old := c.LogPath()
	s := save(t, pod, c)
	pod.Remove(t)
	before := harness.Get(os.ReadFile(old))(t)
	restored, list := restorePod(t, d, s.identity(t))
	list[0].Start(t)
	harness.EventuallyTrue(t, "it writes", func() bool { return len(list[0].Log(t)) > 10 })
	path := list[0].LogPath()
	rotated := path + ".1"
	harness.Must(t, os.Rename(path, rotated))
	harness.Must(t, d.Cri.ReopenContainerLog(t.Context(), list[0].Id))
	harness.EventuallyTrue(t, "the new file is written", func() bool { info, err := os.Stat(path); return err == nil && info.Size() > 0 })
	list[0].Stop(t, 0)
	var first, next int
	for i, line := range append(logs.Read(t, rotated), list[0].Log(t)...) {
		n, stream := 0, "stdout"
		if text, isErr := strings.CutPrefix(line.Text, "e"); isErr {
			stream = "stderr"
			harness.Get(fmt.Sscan(text, &n))(t)
		} else {
			harness.Get(fmt.Sscan(text, &n))(t)
			if i < 2 && first == 0 {
				first, next = n, n
			}
			harness.Equal(t, "number", n, next)
			next++
		}
		harness.Equal(t, "stream of "+line.Text, line.Stream, stream)
	}
	if reached := strings.Count(string(before), " stdout "); first < 3 || first > reached+1 {
		t.Errorf("it continues with %d, it had reached %d", first, reached)
	}
	harness.Equal(t, "the old log", string(harness.Get(os.ReadFile(old))(t)), string(before))
	restored.Remove(t)
}

// Statistics of a restored container and its pod contain its memory, processes, CPU time and files.
func TestRestoredStats(t *testing.T) {
	d := startDaemon(t)
	pod := d.RunPod(t)
	const held = 24 << 20
	// The file has no zeros, because a restore writes them as holes, which use no bytes.
	c := pod.Run(t, harness.Script(fmt.Sprintf("held=$(head -c %d /dev/zero | tr '\\0' x); yes | head -c %d >/file; echo ready; while [ ! -e /rest ]; do :; done; exec sleep 100000", held, 4<<20)))
	c.WaitOutput(t, "ready")
	restored, list := revive(t, pod, c)
	stats := func() *runtimeapi.ContainerStats {
		return harness.Get(d.Cri.ContainerStats(t.Context(), list[0].Id))(t)
	}
	before := stats().GetCpu().GetUsageCoreNanoSeconds().GetValue()
	harness.EventuallyTrue(t, "it uses the CPU", func() bool { return stats().GetCpu().GetUsageCoreNanoSeconds().GetValue() > before+20e6 })
	if used := stats().GetMemory().GetUsageBytes().GetValue(); used < held {
		t.Errorf("memory %d, want at least %d", used, held)
	}
	list[0].Exec(t, "touch", "/rest") // files are counted with the CPU time that others leave
	harness.EventuallyTrue(t, "its files are counted", func() bool { return stats().GetWritableLayer().GetUsedBytes().GetValue() >= 4<<20 })
	ofPod := harness.Get(d.Cri.PodSandboxStats(t.Context(), restored.Id))(t)
	harness.Equal(t, "containers of the pod", len(ofPod.GetLinux().GetContainers()), 1)
	if n := ofPod.GetLinux().GetProcess().GetProcessCount().GetValue(); n < 2 { // with pause
		t.Errorf("processes of the pod: %d", n)
	}
	restored.Remove(t)
}

// The memory limit of the request holds for the restored processes. The kernel's OOM killer decides
// the reason of the exit, for the first process and for another one.
func TestRestoredOOM(t *testing.T) {
	d := startDaemon(t)
	limit := harness.Resources(func(r *runtimeapi.LinuxContainerResources) { r.MemoryLimitInBytes = 32 << 20 })
	for name, script := range map[string]string{"init": "exec tail /dev/zero", "child": "tail /dev/zero; exit 3"} {
		t.Run(name, func(t *testing.T) {
			pod := d.RunPod(t)
			c := pod.Run(t, harness.Script("echo ready; while [ ! -e /grow ]; do sleep 0.02; done; "+script), limit)
			c.WaitOutput(t, "ready")
			restored, list := revive(t, pod, c)
			list[0].Release(t, "/grow")
			status := list[0].WaitExited(t)
			harness.Equal(t, "reason", status.Reason, "OOMKilled")
			if name == "init" {
				harness.Equal(t, "exit code", status.ExitCode, 137)
			}
			restored.Remove(t)
		})
	}
}

// The processes have at least the oom_score_adj of the request. CRIU leaves a value of 0 to that of
// the process that starts it. A process that has raised its own keeps that.
func TestRestoredOOMScore(t *testing.T) {
	d := startDaemon(t)
	pod := d.RunPod(t)
	c := pod.Run(t, harness.Script("(echo 777 >/proc/self/oom_score_adj; exec sleep 1000) & echo $! >/pid; "+counting),
		harness.Resources(func(r *runtimeapi.LinuxContainerResources) { r.OomScoreAdj = 100 }))
	waitCounted(t, c, 1)
	s := save(t, pod, c)
	pod.Remove(t)
	request := s.identity(t)
	request.ContainerConfigs[0].Linux.Resources.OomScoreAdj = 555
	restored, list := restorePod(t, d, request)
	list[0].Start(t)
	waitCounted(t, list[0], 1)
	harness.Equal(t, "of the first process", list[0].Exec(t, "cat", "/proc/1/oom_score_adj"), "555")
	harness.Equal(t, "of the other", list[0].Exec(t, "sh", "-c", "cat /proc/$(cat /pid)/oom_score_adj"), "777")
	restored.Remove(t)
}

// Resources of a restored container can be changed.
func TestRestoredResize(t *testing.T) {
	d := startDaemon(t)
	pod := d.RunPod(t)
	c := pod.Run(t, harness.Script(counting), harness.Resources(func(r *runtimeapi.LinuxContainerResources) { r.MemoryLimitInBytes = 64 << 20 }))
	waitCounted(t, c, 1)
	s := save(t, pod, c)
	pod.Remove(t)
	request := s.identity(t)
	request.ContainerConfigs[0].Linux.Resources.MemoryLimitInBytes = 96 << 20 // resources are those of the request
	restored, list := restorePod(t, d, request)
	list[0].Start(t)
	memory := func() string {
		return strings.TrimSpace(machine.CgroupFile(t, list[0].Pid(t), "memory", "memory.limit_in_bytes", "memory.max"))
	}
	harness.Equal(t, "limit of the request", memory(), fmt.Sprint(96<<20))
	harness.Must(t, d.Cri.UpdateContainerResources(t.Context(), list[0].Id, &runtimeapi.ContainerResources{Linux: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 128 << 20}}))
	harness.Equal(t, "limit", memory(), fmt.Sprint(128<<20))
	waitCounted(t, list[0], 1)
	restored.Remove(t)
}

// A stop sends the image's signal and kills after the grace time.
func TestRestoredStop(t *testing.T) {
	image, _ := harness.Push(t, harness.Registry, "stopsignal:restored", harness.BuildImage(t, v1.Config{StopSignal: "SIGUSR1"}))
	d := startDaemon(t)
	for name, tc := range map[string]struct {
		script string
		grace  int64
		code   int32
		out    string
	}{
		"handled": {"trap 'echo usr1; exit 7' USR1", 60, 7, "usr1\n"},
		"ignored": {"trap 'echo usr1' USR1", 1, 137, "usr1\n"},
		"killed":  {"trap 'echo usr1' USR1", 0, 137, ""},
	} {
		t.Run(name, func(t *testing.T) {
			pod := d.RunPod(t)
			c := pod.Run(t, harness.Image(image), harness.Script(tc.script+"; touch /ready; while :; do sleep 0.02; done"))
			harness.EventuallyTrue(t, "it is ready", func() bool {
				_, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"test", "-e", "/ready"}, 0)
				return err == nil
			})
			restored, list := revive(t, pod, c)
			list[0].Stop(t, tc.grace)
			harness.Equal(t, "exit code", list[0].WaitExited(t).ExitCode, tc.code)
			harness.Equal(t, "output", list[0].Output(t), tc.out)
			restored.Remove(t)
		})
	}
}

// kubelet restarts a container of a restored pod as in any other: it creates the next attempt,
// which starts anew in the same pod.
func TestRestartInRestoredPod(t *testing.T) {
	d := startDaemon(t)
	pod := d.RunPod(t)
	c := pod.Run(t, harness.Script("echo started; echo shared >/dev/shm/file; "+counting), harness.ContainerNamed("app"))
	c.WaitOutput(t, "2\n")
	restored, list := revive(t, pod, c)
	waitCounted(t, list[0], 1)
	list[0].Release(t, "/stop")
	harness.Equal(t, "exit code", list[0].WaitExited(t).ExitCode, 42)
	next := restored.Run(t, harness.Script("echo started; cat /dev/shm/file; ls /stop; sleep 100000"), func(c *runtimeapi.ContainerConfig) {
		c.Metadata = &runtimeapi.ContainerMetadata{Name: "app", Attempt: 1}
		c.LogPath = "app/1.log"
	})
	next.WaitOutput(t, "No such file")
	harness.WantText(t, "output", next.Output(t), "started\nshared\n")
	harness.Equal(t, "attempt", next.Status(t).Metadata.Attempt, 1)
	harness.Equal(t, "network", machine.Namespace(t, next.Pid(t), "net"), machine.Namespace(t, restored.PausePID(t), "net"))
	restored.Remove(t)
}

// A checkpoint can be restored twice at the same time. The copies do not share anything that they
// write.
func TestRestoreTwiceAtOnce(t *testing.T) {
	d := startDaemon(t)
	pod := d.RunPod(t)
	c := pod.Run(t, harness.Script("echo 0 >/file; echo 0 >/dev/shm/file; "+counting))
	waitCounted(t, c, 3)
	s := save(t, pod, c)
	one, first := restorePod(t, d, s.identity(t))
	two, second := restorePod(t, d, s.identity(t))
	for _, c := range []*harness.Container{first[0], second[0]} {
		c.Start(t)
		waitCounted(t, c, 3)
	}
	waitCounted(t, c, 3) // the original goes on, too
	for _, path := range []string{"/file", "/dev/shm/file"} {
		first[0].Exec(t, "sh", "-c", "echo 1 >"+path)
		harness.Equal(t, path+" of the other copy", second[0].Exec(t, "cat", path), "0")
		harness.Equal(t, path+" of the original", c.Exec(t, "cat", path), "0")
	}
	if one.Ip(t) == two.Ip(t) || one.Ip(t) == pod.Ip(t) {
		t.Errorf("addresses %s, %s and %s", pod.Ip(t), one.Ip(t), two.Ip(t))
	}
	first[0].Release(t, "/stop")
	harness.Equal(t, "exit code of one", first[0].WaitExited(t).ExitCode, 42)
	waitCounted(t, second[0], 3)
	for _, p := range []*harness.Pod{one, two, pod} {
		p.Remove(t)
	}
}

// A restored pod can be saved and restored again.
func TestRestoredPodIsSavedAgain(t *testing.T) {
	d := startDaemon(t)
	pod := d.RunPod(t)
	c := pod.Run(t, harness.Script("rm /bin/yes; echo first >/first; "+counting))
	waitCounted(t, c, 3)
	at := 0
	for round := range 3 {
		restored, list := revive(t, pod, c)
		pod, c = restored, list[0]
		first, last := waitCounted(t, c, 3)
		if first <= at {
			t.Errorf("round %d continues with %d after %d", round, first, at)
		}
		at = last
		c.Exec(t, "sh", "-c", fmt.Sprintf("echo %d >>/first", round))
	}
	harness.Equal(t, "file", c.Exec(t, "sh", "-c", "cat /first; ls /bin/yes 2>&1; true"), "first\n0\n1\n2\nls: /bin/yes: No such file or directory")
	pod.Remove(t)
}

// In a shared PID namespace the pause is process 1. Processes keep their numbers, and orphans go to
// the new pause.
func TestRestoreSharedPIDNamespace(t *testing.T) {
	d := startDaemon(t)
	pod := d.RunPod(t, harness.SharedPID)
	a := pod.Run(t, harness.Script("echo pid $$; while :; do echo $(cat /proc/1/comm); sleep 0.02; done"), harness.ContainerNamed("a"))
	b := pod.Run(t, harness.Script("echo pid $$; "+counting), harness.ContainerNamed("b"))
	a.WaitOutput(t, "pause\n")
	waitFor := func(c *harness.Container) string { c.WaitOutput(t, "pid "); return strings.Fields(c.Output(t))[1] }
	pids := waitFor(a) + " " + waitFor(b)
	restored, list := revive(t, pod, a, b)
	list[0].WaitOutput(t, "pause\n")
	inside := func(c *harness.Container) string {
		fields := strings.Fields(machine.StatusField(t, c.Pid(t), "NSpid"))
		return fields[len(fields)-1]
	}
	harness.Equal(t, "process IDs", inside(list[0])+" "+inside(list[1]), pids)
	harness.Equal(t, "PID namespace", machine.Namespace(t, list[0].Pid(t), "pid"), machine.Namespace(t, restored.PausePID(t), "pid"))
	list[1].Release(t, "/stop")
	harness.Equal(t, "exit code", list[1].WaitExited(t).ExitCode, 42)
	list[0].Stop(t, 0)
	harness.Equal(t, "exit code after a kill", list[0].WaitExited(t).ExitCode, 137)
	restored.Remove(t)
}

// A container of a shared PID namespace may start and fork before the next one is restored. It must
// not get process IDs that the other one needs.
func TestRestoreSharedPIDNamespaceInTurn(t *testing.T) {
	d := startDaemon(t)
	pod := d.RunPod(t, harness.SharedPID)
	const children = 150
	script := fmt.Sprintf("while [ ! -e /fork ]; do sleep 0.02; done; n=0; while [ $n -lt %d ]; do n=$((n+1)); sleep 100000 & done; echo forked; wait", children)
	a, b := pod.Run(t, harness.Script(script), harness.ContainerNamed("a")), pod.Run(t, harness.Script(counting), harness.ContainerNamed("b"))
	waitCounted(t, b, 3)
	s := save(t, pod, a, b)
	pod.Remove(t)
	restored, list := restorePod(t, d, s.identity(t))
	list[0].Start(t)
	list[0].Exec(t, "touch", "/fork")
	list[0].WaitOutput(t, "forked")
	list[1].Start(t)
	waitCounted(t, list[1], 3)
	restored.Remove(t)
}

// Volumes are those of the request: writable and read-only ones, single files, volumes with another
// source, and image volumes. Mounts with propagation are refused by name.
func TestRestoredVolumes(t *testing.T) {
	img, err := fixture.ImageOf(v1.Config{}, harness.PackLayer(t, fixture.Tree{fixture.Dir("model", 0o755), fixture.File("model/weights", 0o644, "42\n")}, fixture.Gzip))
	harness.Must(t, err)
	name, id := harness.Push(t, harness.Registry, "volume:restored", img)
	d := startDaemon(t)
	d.Pull(t, name)
	host := machine.HostDir(t, "rw", "ro", "other")
	for file, text := range map[string]string{"rw/file": "rw\n", "ro/file": "ro\n", "other/file": "other\n", "single": "single\n"} {
		harness.Must(t, os.WriteFile(filepath.Join(host, file), []byte(text), 0o644))
	}
	pod := d.RunPod(t)
	c := pod.Run(t, harness.Script(counting),
		harness.Mount(&runtimeapi.Mount{ContainerPath: "/rw", HostPath: host + "/rw"}),
		harness.Mount(&runtimeapi.Mount{ContainerPath: "/rw/below", HostPath: host + "/ro", Readonly: true}),
		harness.Mount(&runtimeapi.Mount{ContainerPath: "/ro", HostPath: host + "/ro", Readonly: true}),
		harness.Mount(&runtimeapi.Mount{ContainerPath: "/single", HostPath: host + "/single"}),
		harness.Mount(&runtimeapi.Mount{ContainerPath: "/v", Readonly: true, Image: &runtimeapi.ImageSpec{Image: id}}))
	waitCounted(t, c, 1)
	s := save(t, pod, c)
	pod.Remove(t)
	const look = "cat /rw/file /rw/below/file /ro/file /single /v/model/weights; echo new >/rw/new; echo more >>/single; " +
		"for f in /ro/new /rw/below/new /v/new; do echo x 2>/dev/null >$f && echo wrote $f; done; true"
	t.Run("same", func(t *testing.T) {
		restored, list := restorePod(t, d, s.identity(t))
		list[0].Start(t)
		waitCounted(t, list[0], 1)
		harness.Equal(t, "content", list[0].Exec(t, "sh", "-c", look), "rw\nro\nro\nsingle\n42")
		harness.Equal(t, "the node's files", string(harness.Get(os.ReadFile(host+"/rw/new"))(t))+string(harness.Get(os.ReadFile(host+"/single"))(t)), "new\nsingle\nmore\n")
		restored.Remove(t)
	})
	t.Run("other source", func(t *testing.T) {
		request := s.identity(t)
		request.ContainerConfigs[0].Mounts[0].HostPath = host + "/other"
		restored, list := restorePod(t, d, request)
		list[0].Start(t)
		waitCounted(t, list[0], 1)
		harness.Equal(t, "content", list[0].Exec(t, "cat", "/rw/file"), "other")
		restored.Remove(t)
	})
	for _, propagation := range []runtimeapi.MountPropagation{runtimeapi.MountPropagation_PROPAGATION_HOST_TO_CONTAINER, runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL} {
		t.Run(propagation.String(), func(t *testing.T) {
			request := s.identity(t)
			request.ContainerConfigs[0].Mounts[0].Propagation = propagation
			restoreRefused(t, d, request, codes.FailedPrecondition, propagation.String()+" of the mount at /rw")
		})
	}
}
