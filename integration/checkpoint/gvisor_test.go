package checkpoint

import (
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/fixture"
	"berth/integration/harness"
)

// gvisor is the name of the handler that runs gVisor.
const gvisor = "runsc"

// startGVisor starts a daemon with gVisor's runsc (BERTH_RUNSC), or skips the test.
func startGVisor(t *testing.T, options ...harness.DaemonOption) *harness.Daemon {
	t.Helper()
	program := os.Getenv("BERTH_RUNSC")
	if program == "" {
		t.Skip("NOT TESTED: no runsc (BERTH_RUNSC)")
	}
	// gVisor removes the pod's addresses from its interface and uses them itself. The bridge plugin
	// then has no source address to masquerade.
	network := strings.Replace(fixture.Conflist("test", "/run/runsc-network", fixture.Range4), `"ipMasq": true`, `"ipMasq": false`, 1)
	return harness.StartDaemon(t, append(options, harness.WithHandler(gvisor, program), harness.WithNetwork(network))...)
}

// runGVisor runs a pod in a sandbox.
func runGVisor(t *testing.T, d *harness.Daemon, options ...harness.PodOption) *harness.Pod {
	t.Helper()
	config := d.PodConfig(t, options...)
	id := harness.Get(d.Cri.RunPodSandbox(t.Context(), config, gvisor))(t)
	d.Objects = append(d.Objects, id)
	return &harness.Pod{D: d, Id: id, Config: config}
}

// saveGVisor makes a checkpoint of a pod with one container in a sandbox.
func saveGVisor(t *testing.T, pod *harness.Pod, c *harness.Container) *saved {
	t.Helper()
	s := save(t, pod, c)
	s.request.RuntimeHandler = gvisor
	return s
}

// A restored sandbox continues, in a new log, and is like any other: exec, statistics, exit codes,
// another checkpoint and a restart work. Nothing runs before StartContainer.
func TestGVisorContinues(t *testing.T) {
	const change = `echo new >/new; rm /bin/yes; echo changed >/etc/passwd; mkdir /dir; `
	const show = `cat /new /etc/passwd; ls -d /bin/yes /dir 2>&1; true`
	d := startGVisor(t)
	pod := runGVisor(t, d)
	c := pod.Run(t, harness.Script(change+counting), harness.Env("A", "1"))
	waitCounted(t, c, 3)
	want := c.Exec(t, "sh", "-c", show)
	s := saveGVisor(t, pod, c)
	_, reached := waitCounted(t, c, 3)
	goesOn(t, c)
	pod.Remove(t)
	for round := range 2 {
		restored, containers := restorePod(t, d, s.identity(t))
		copied := containers[0]
		harness.Equal(t, "log of a created container", written(t, copied), "")
		copied.Start(t)
		if first, _ := waitCounted(t, copied, 3); first < 3 || first > reached+1 {
			t.Errorf("round %d: it continues with %d, it had reached %d", round, first, reached)
		}
		harness.Equal(t, "environment of an exec", copied.Exec(t, "sh", "-c", "echo $A; hostname"), "1\n"+restored.Config.Hostname)
		harness.Equal(t, "files", copied.Exec(t, "sh", "-c", show), want)
		if out := copied.Exec(t, "ip", "addr"); !strings.Contains(out, restored.Ip(t)) {
			t.Errorf("no address %s in the sandbox:\n%s", restored.Ip(t), out)
		}
		again := saveGVisor(t, restored, copied)
		goesOn(t, copied)
		copied.Release(t, "/stop")
		harness.Equal(t, "exit code", copied.WaitExited(t).ExitCode, 42)
		next := restored.Run(t, harness.Script("echo next; exit 3"))
		harness.Equal(t, "exit code of the next container", next.WaitExited(t).ExitCode, 3)
		restored.Remove(t)
		twice, containers := restorePod(t, d, again.identity(t))
		containers[0].Start(t)
		waitCounted(t, containers[0], 3)
		containers[0].Stop(t, 0)
		harness.Equal(t, "exit code after a kill", containers[0].WaitExited(t).ExitCode, 137)
		twice.Remove(t)
	}
}

// While a restored container has not started, its sandbox starts no other.
func TestGVisorRestoredContainerIsFirst(t *testing.T) {
	d := startGVisor(t)
	pod := runGVisor(t, d)
	c := pod.Run(t, harness.Script(counting))
	waitCounted(t, c, 3)
	s := saveGVisor(t, pod, c)
	pod.Remove(t)
	restored, containers := restorePod(t, d, s.identity(t))
	other := restored.Create(t, harness.Script("echo other"))
	harness.WantCode(t, d.Cri.StartContainer(t.Context(), other.Id), codes.FailedPrecondition, "must start first")
	d.Kill(t)
	harness.Must(t, os.RemoveAll(s.request.CheckpointPath))
	harness.Must(t, os.Mkdir(s.request.CheckpointPath, 0o700))
	d.Start(t)
	harness.Equal(t, "state", containers[0].Status(t).State, runtimeapi.ContainerState_CONTAINER_CREATED)
	containers[0].Start(t)
	waitCounted(t, containers[0], 3)
	next := restored.Run(t, harness.Script("echo next; exit 3"))
	harness.Equal(t, "exit code of another container", next.WaitExited(t).ExitCode, 3)
	restored.Remove(t)
}

// The archive of a container is that of its sandbox, if the sandbox has no other.
func TestGVisorContainerArchive(t *testing.T) {
	d := startGVisor(t)
	pod := runGVisor(t, d)
	c := pod.Run(t, harness.Script(counting))
	waitCounted(t, c, 3)
	place := filepath.Join(outputDir(t, d), "archive.tar")
	_, err := harness.RawRuntime(t, d).CheckpointContainer(t.Context(),
		&runtimeapi.CheckpointContainerRequest{ContainerId: c.Id, Location: place, Timeout: 60})
	harness.Must(t, err)
	harness.Equal(t, "mode", harness.Get(os.Lstat(place))(t).Mode(), 0o600)
	goesOn(t, c)
	pod.Remove(t)
	s := &saved{d, &runtimeapi.RestorePodRequest{CheckpointPath: place, Config: pod.Config, RuntimeHandler: gvisor,
		ContainerConfigs: []*runtimeapi.ContainerConfig{c.Config}}}
	restored, containers := restorePod(t, d, s.identity(t))
	containers[0].Start(t)
	if first, _ := waitCounted(t, containers[0], 3); first < 3 {
		t.Errorf("it continues with %d", first)
	}
	restored.Remove(t)
}

// The commands save and restore checkpoints of sandboxes. The handler is that of the
// checkpoint.
func TestGVisorCommands(t *testing.T) {
	d := startGVisor(t)
	pod := runGVisor(t, d)
	c := pod.Run(t, harness.Script(counting))
	waitCounted(t, c, 3)
	berth := func(args ...string) string {
		t.Helper()
		cmd := d.Command(args...)
		cmd.Env = append(cmd.Env, "BERTH_SOCKET=unix://"+d.Socket)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("berth %q: %v\n%s", args, err, out)
		}
		return string(out)
	}
	file := filepath.Join(outputDir(t, d), "pod.tar")
	berth("checkpoint", pod.Id, "-o", file)
	harness.WantText(t, "dry run", berth("restore", "--dry-run", file), "saved by this node", "container")
	pod.Remove(t)
	runDir := filepath.Join(d.Dir, "run")
	berth("restore", file, "--allow-node-access", "--name", "copy", "--run-dir", runDir, "--cgroup-parent", d.CgroupParent("copy"))
	list := harness.Get(d.Cri.ListPodSandbox(t.Context(), nil))(t)
	harness.Equal(t, "number of pods", len(list), 1)
	d.Objects = append(d.Objects, list[0].Id)
	harness.Equal(t, "handler of the restored pod", list[0].RuntimeHandler, gvisor)
	berth("rm", "--force", "--run-dir", runDir, "copy")
	harness.Must(t, os.RemoveAll(runDir))
}

// Threads, timers, deleted open files, socket pairs and a listening socket continue.
func TestGVisorKeepsOpenFiles(t *testing.T) {
	d := startGVisor(t)
	pod := runGVisor(t, d)
	c := pod.Run(t, buildWorkload(t))
	harness.EventuallyTrue(t, "it works", func() bool { return len(workloadLines(t, c)) > 3 })
	s := saveGVisor(t, pod, c)
	before := workloadLines(t, c)
	pod.Remove(t)
	restored, containers := restorePod(t, d, s.identity(t))
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
	if out := containers[0].Exec(t, "nc", "127.0.0.1", "7000"); harness.Get(strconv.Atoi(out))(t) < lines[0].tick {
		t.Errorf("the socket answers %q", out)
	}
	restored.Remove(t)
}

// A process goes on with an open file in a volume, whose content is that of the volume.
func TestGVisorVolume(t *testing.T) {
	d := startGVisor(t)
	volume := filepath.Join(d.Dir, "volume")
	harness.Must(t, os.Mkdir(volume, 0o755))
	pod := runGVisor(t, d)
	c := pod.Run(t, harness.Script("exec 7>>/volume/open; echo begin; while sleep 0.05; do echo tick; echo line >&7; done"),
		harness.Mount(&runtimeapi.Mount{HostPath: volume, ContainerPath: "/volume"}))
	c.WaitOutput(t, "tick")
	s := saveGVisor(t, pod, c)
	pod.Remove(t)
	harness.Must(t, os.Truncate(filepath.Join(volume, "open"), 0))
	restored, containers := restorePod(t, d, s.identity(t))
	containers[0].Start(t)
	containers[0].WaitOutput(t, "tick")
	if out := containers[0].Output(t); strings.Contains(out, "begin") {
		t.Errorf("it started anew: %q", out)
	}
	harness.EventuallyTrue(t, "it writes to its volume", func() bool {
		content, err := os.ReadFile(filepath.Join(volume, "open"))
		return err == nil && strings.Contains(string(content), "line\n")
	})
	harness.Equal(t, "exec", containers[0].Exec(t, "echo", "in"), "in")
	restored.Remove(t)
}

// A listening socket and a read-only root filesystem continue. Established connections stay with
// the original and are closed in the copy.
func TestGVisorNetwork(t *testing.T) {
	d := startGVisor(t)
	pod := runGVisor(t, d)
	c := pod.Run(t, harness.Script("exec nc -ll -p 7000 -e cat"), func(c *runtimeapi.ContainerConfig) {
		c.Linux.SecurityContext.ReadonlyRootfs = true
	})
	before := echoes(t, pod)
	s := saveGVisor(t, pod, c)
	before("after the save")
	pod.Remove(t)
	restored, containers := restorePod(t, d, s.identity(t))
	containers[0].Start(t)
	echoes(t, restored)
	harness.EventuallyGot(t, "the copy of the connection is closed", func() (bool, any) {
		processes := containers[0].Exec(t, "ps")
		return strings.Count(processes, "     cat") == 1, processes // that of the new connection
	})
	restored.Remove(t)
}

// echoes connects to a pod's server on port 7000. The returned function checks the connection
// again.
func echoes(t *testing.T, pod *harness.Pod) (again func(text string)) {
	t.Helper()
	var conn net.Conn
	harness.Eventually(t, "the server answers", func() (err error) {
		conn, err = net.Dial("tcp", net.JoinHostPort(pod.Ip(t), "7000"))
		return err
	})
	t.Cleanup(func() { _ = conn.Close() }) // the other end may be gone
	again = func(text string) {
		t.Helper()
		harness.Must(t, conn.SetDeadline(time.Now().Add(harness.Patience)))
		harness.Get(conn.Write([]byte(text)))(t)
		answer := make([]byte, len(text))
		harness.Get(io.ReadFull(conn, answer))(t)
		harness.Equal(t, "echo", string(answer), text)
	}
	again("hello")
	return again
}

// Processes that an exec has left do not prevent a checkpoint. gVisor ends them in the restored
// pod.
func TestGVisorEndsExecs(t *testing.T) {
	d := startGVisor(t)
	pod := runGVisor(t, d)
	c := pod.Run(t, harness.Script(counting))
	waitCounted(t, c, 3)
	c.Exec(t, "sh", "-c", "sleep 4711 </dev/null >/dev/null 2>&1 &")
	s := saveGVisor(t, pod, c)
	harness.Equal(t, "processes of the original", strings.Count(c.Exec(t, "ps"), "sleep 4711"), 1)
	pod.Remove(t)
	restored, containers := restorePod(t, d, s.identity(t))
	containers[0].Start(t)
	waitCounted(t, containers[0], 3)
	harness.EventuallyTrue(t, "the process has ended", func() bool { return !strings.Contains(containers[0].Exec(t, "ps"), "sleep 4711") })
	restored.Remove(t)
}

// What a sandbox cannot save is refused with the cause. The container goes on, and no file is left.
func TestGVisorRefusals(t *testing.T) {
	program := os.Getenv("BERTH_RUNSC")
	d := startGVisor(t, harness.WithHandler("none", program, "--overlay2=none"))
	none := func(*testing.T, *harness.Pod) {}
	name := declaring(t, "gvisor")
	imageWithVolumes := func(c *runtimeapi.ContainerConfig) { harness.Image(name)(c); harness.Script("exec sleep 100000")(c) }
	for _, test := range []struct {
		name, handler, want string
		option              harness.ContainerOption
		prepare             func(*testing.T, *harness.Pod)
	}{
		{"terminal", gvisor, "has a terminal", harness.WithTerminal, none},
		{"shared memory", gvisor, "has files in /dev/shm", harness.Script("echo x >/dev/shm/x; exec sleep 100000"), none},
		{"volumes of the image", gvisor, "volumes of its image", imageWithVolumes, none},
		{"overlay", "none", "overlay2", harness.Script("exec sleep 100000"), none},
		{"second container", gvisor, "", harness.Script("exec sleep 100000"), func(t *testing.T, pod *harness.Pod) { pod.Run(t) }},
	} {
		t.Run(test.name, func(t *testing.T) {
			config := d.PodConfig(t)
			id := harness.Get(d.Cri.RunPodSandbox(t.Context(), config, test.handler))(t)
			d.Objects = append(d.Objects, id)
			pod := &harness.Pod{D: d, Id: id, Config: config}
			c := pod.Run(t, test.option)
			if test.want == "has files in /dev/shm" {
				harness.EventuallyTrue(t, "the file exists", func() bool { return strings.Contains(c.Exec(t, "ls", "/dev/shm"), "x") })
			}
			test.prepare(t, pod)
			if test.want != "" {
				refusedWith(t, test.want, pod, c)
				return
			}
			dir := outputDir(t, d)
			list := []*harness.Container{c}
			for _, other := range harness.Get(d.Cri.ListContainers(t.Context(), &runtimeapi.ContainerFilter{PodSandboxId: pod.Id}))(t) {
				if other.Id != c.Id {
					list = append(list, &harness.Container{Pod: pod, Id: other.Id})
				}
			}
			harness.WantCode(t, checkpointPod(t, pod, dir, list...), codes.FailedPrecondition, "pods with one container")
			isEmpty(t, dir)
			_, err := harness.RawRuntime(t, d).CheckpointContainer(t.Context(), &runtimeapi.CheckpointContainerRequest{
				ContainerId: c.Id, Location: filepath.Join(dir, "archive.tar"), Timeout: 60})
			harness.WantCode(t, err, codes.FailedPrecondition, "pods with one container")
			isEmpty(t, dir)
		})
	}
}

// RestorePod refuses other containers, other runtimes and other versions than those of the
// checkpoint, and checkpoints that this node has not signed.
func TestGVisorRestoreRefuses(t *testing.T) {
	program := os.Getenv("BERTH_RUNSC")
	newer := filepath.Join(t.TempDir(), "newer")
	script := "#!/bin/sh\ncase \"$*\" in --version) echo runsc version 2;; *) exec " + program + " \"$@\";; esac\n"
	harness.Must(t, os.WriteFile(newer, []byte(script), 0o700))
	d := startGVisor(t, harness.WithHandler("newer", newer),
		harness.WithHandler("crun", harness.Crun(t)))
	pod := runGVisor(t, d)
	c := pod.Run(t, harness.Script(counting), harness.Env("A", "1"))
	waitCounted(t, c, 1)
	s := saveGVisor(t, pod, c)
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
		{"user", func(_ *runtimeapi.RestorePodRequest, c *runtimeapi.ContainerConfig) {
			c.Linux.SecurityContext.RunAsUser = &runtimeapi.Int64Value{Value: 7}
		}, codes.FailedPrecondition, "user"},
		{"terminal", func(_ *runtimeapi.RestorePodRequest, c *runtimeapi.ContainerConfig) { c.Tty = true }, codes.FailedPrecondition, "terminal"},
		{"privileges", func(_ *runtimeapi.RestorePodRequest, c *runtimeapi.ContainerConfig) {
			c.Linux.SecurityContext.NoNewPrivs = true
		}, codes.FailedPrecondition, "no_new_privs"},
		{"capabilities", func(_ *runtimeapi.RestorePodRequest, c *runtimeapi.ContainerConfig) {
			c.Linux.SecurityContext.Capabilities = &runtimeapi.Capability{DropCapabilities: []string{"NET_RAW"}}
		}, codes.FailedPrecondition, "capabilities"},
		{"seccomp", func(_ *runtimeapi.RestorePodRequest, c *runtimeapi.ContainerConfig) {
			c.Linux.SecurityContext.Seccomp = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault}
		}, codes.FailedPrecondition, "seccomp profile"},
		{"mount", func(_ *runtimeapi.RestorePodRequest, c *runtimeapi.ContainerConfig) {
			c.Mounts = []*runtimeapi.Mount{{HostPath: t.TempDir(), ContainerPath: "/more"}}
		}, codes.FailedPrecondition, "mount at /more: the checkpoint has none"},
		{"name", func(_ *runtimeapi.RestorePodRequest, c *runtimeapi.ContainerConfig) { c.Metadata.Name = "other" },
			codes.InvalidArgument, "container_configs"},
		{"built-in handler", func(r *runtimeapi.RestorePodRequest, _ *runtimeapi.ContainerConfig) { r.RuntimeHandler = "" },
			codes.FailedPrecondition, `cannot restore a checkpoint of "runsc version`},
		{"crun", func(r *runtimeapi.RestorePodRequest, _ *runtimeapi.ContainerConfig) { r.RuntimeHandler = "crun" },
			codes.FailedPrecondition, `cannot restore a checkpoint of "runsc version`},
		{"other version", func(r *runtimeapi.RestorePodRequest, _ *runtimeapi.ContainerConfig) { r.RuntimeHandler = "newer" },
			codes.FailedPrecondition, `runtime handler "newer" has "runsc version 2"`},
	} {
		t.Run(test.name, func(t *testing.T) {
			request := s.identity(t)
			test.change(request, request.ContainerConfigs[0])
			restoreRefused(t, d, request, test.code, test.text)
		})
	}
	t.Run("changed image", func(t *testing.T) {
		image := filepath.Join(s.request.CheckpointPath, c.Config.Metadata.Name, "checkpoint/pages.img")
		was := harness.Get(os.ReadFile(image))(t)
		changed := append([]byte{was[0] + 1}, was[1:]...)
		harness.Must(t, os.WriteFile(image, changed, 0o600))
		restoreRefused(t, d, s.identity(t), codes.InvalidArgument, "pages.img")
		harness.Must(t, os.WriteFile(image, was, 0o600))
	})
	t.Run("foreign", func(t *testing.T) {
		d.Kill(t)
		harness.Must(t, os.Remove(filepath.Join(d.Root, "checkpoint.key")))
		d.Start(t)
		restoreRefused(t, d, s.identity(t), codes.FailedPrecondition, "cannot compare the content of checkpoints of")
	})
}

// gVisor refuses settings that differ from those of the checkpoint. Nothing has run then, and the
// pod can only be removed.
func TestGVisorRefusesSettings(t *testing.T) {
	d := startGVisor(t)
	pod := runGVisor(t, d)
	c := pod.Run(t, harness.Script(counting))
	waitCounted(t, c, 1)
	s := saveGVisor(t, pod, c)
	pod.Remove(t)
	request := s.identity(t)
	request.ContainerConfigs[0].Devices = []*runtimeapi.Device{{HostPath: "/dev/null", ContainerPath: "/dev/more", Permissions: "r"}}
	restored, containers := restorePod(t, d, request)
	harness.WantCode(t, d.Cri.StartContainer(t.Context(), containers[0].Id), codes.FailedPrecondition, "Devices")
	harness.Equal(t, "reason", containers[0].Status(t).Reason, "StartError")
	harness.Equal(t, "output", written(t, containers[0]), "")
	other := restored.Create(t, harness.Script("echo other"))
	harness.WantCode(t, d.Cri.StartContainer(t.Context(), other.Id), codes.FailedPrecondition)
	restored.Remove(t)
}
