package integration

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	cri "k8s.io/cri-client/pkg"

	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/machine"
	"berth/internal/testutil"
)

// runPodWith runs a pod with a runtime handler and expects success.
func runPodWith(t *testing.T, d *harness.Daemon, handler string, opts ...harness.PodOption) *harness.Pod {
	t.Helper()
	config := d.PodConfig(t, opts...)
	id := harness.Get(d.Cri.RunPodSandbox(t.Context(), config, handler))(t)
	d.Objects = append(d.Objects, id)
	return &harness.Pod{D: d, Id: id, Config: config}
}

// runsc returns the path of gVisor's runsc: $BERTH_RUNSC, or the one in PATH.
func runsc(t *testing.T) string {
	t.Helper()
	path := os.Getenv("BERTH_RUNSC")
	if path == "" {
		var err error
		if path, err = exec.LookPath("runsc"); err != nil {
			t.Skip("NOT TESTED: runsc is not installed, and BERTH_RUNSC is not set")
		}
	}
	return path
}

// handlersOf returns the runtime handlers in Status and the problems with handlers in verbose
// Status.
func handlersOf(t *testing.T, d *harness.Daemon) (announced map[string]*runtimeapi.RuntimeHandlerFeatures, problems map[string]string) {
	t.Helper()
	status := harness.Get(d.Cri.Status(t.Context(), true))(t)
	announced, problems = map[string]*runtimeapi.RuntimeHandlerFeatures{}, map[string]string{}
	for _, h := range status.RuntimeHandlers {
		announced[h.Name] = h.Features
	}
	var all []struct{ Name, Problem string }
	harness.Must(t, json.Unmarshal([]byte(status.Info["handlers"]), &all))
	for _, h := range all {
		problems[h.Name] = h.Problem
	}
	return announced, problems
}

// A handler without a program is another name for the built-in one.
func TestHandlerAlias(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithHandler("test-handler", ""))
	announced, _ := handlersOf(t, d)
	harness.Equal(t, "features", announced["test-handler"].String(), announced["berth"].String())
	pod := runPodWith(t, d, "test-handler", harness.HostNetwork)
	harness.Equal(t, "handler", pod.Status(t).RuntimeHandler, "test-handler")
	harness.Equal(t, "exec", pod.Run(t).Exec(t, "echo", "hello"), "hello")
}

// The daemon and pods of other handlers run although a handler's program is missing. Once it is
// installed, the handler works without a restart.
func TestHandlerProgramMissing(t *testing.T) {
	path := harness.Crun(t)
	link := filepath.Join(t.TempDir(), "crun")
	d := harness.StartDaemon(t, harness.WithHandler("later", link), harness.WithHandler("broken", "/bin/false"))
	announced, problems := handlersOf(t, d)
	for _, name := range []string{"later", "broken"} {
		if _, ok := announced[name]; ok || problems[name] == "" {
			t.Errorf("handler %s in Status: %v, with problem %q", name, ok, problems[name])
		}
		_, err := d.Cri.RunPodSandbox(t.Context(), d.PodConfig(t, harness.HostNetwork), name)
		harness.WantCode(t, err, codes.FailedPrecondition, name)
	}
	d.RunPod(t, harness.HostNetwork)
	harness.Must(t, os.Symlink(path, link))
	runPodWith(t, d, "later", harness.HostNetwork)
	if announced, _ := handlersOf(t, d); announced["later"] == nil {
		t.Error("the handler is missing in Status although a pod runs with it")
	}
}

func TestCrun(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithHandler("crun", harness.Crun(t)))
	pod := runPodWith(t, d, "crun")
	harness.Equal(t, "handler", pod.Status(t).RuntimeHandler, "crun")
	t.Run("lifecycle", func(t *testing.T) {
		c := pod.Run(t, harness.Script("trap 'echo bye; exit 7' TERM; echo hello; echo oops >&2; while :; do sleep 0.02; done"))
		c.WaitOutput(t, "hello")
		harness.Equal(t, "exec", c.Exec(t, "sh", "-c", "echo in; exec echo $0", "x"), "in\nx")
		_, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"sh", "-c", "exit 3"}, 0)
		harness.Equal(t, "exit code of an exec", harness.ExitCode(err), 3)
		_, _, err = d.Cri.ExecSync(t.Context(), c.Id, []string{"no-such-command"}, 0)
		harness.WantCode(t, err, codes.InvalidArgument, "no-such-command")
		harness.WantOnce(t, err, c.Id)
		c.Stop(t, 10)
		status := c.WaitExited(t)
		harness.Equal(t, "exit code", status.ExitCode, 7)
		if out := c.Output(t); !harness.Contains(out, "bye") {
			t.Errorf("the log is %q", out)
		}
	})
	t.Run("kill", func(t *testing.T) { testKill(t, pod) })
	t.Run("bad command", func(t *testing.T) { testBadCommand(t, pod) })
	t.Run("OOM", func(t *testing.T) { testOOMReason(t, pod) })
	t.Run("update", func(t *testing.T) { testUpdateLimits(t, pod) })
	t.Run("annotations", func(t *testing.T) {
		c := pod.Run(t, func(c *runtimeapi.ContainerConfig) {
			c.Annotations = map[string]string{"run.oci.keep_original_groups": "1", "io.kubernetes.cri.container-type": "sandbox", "io.kubernetes.cri.sandbox-id": "other"}
		})
		var spec struct{ Annotations map[string]string }
		harness.Must(t, json.Unmarshal(harness.Get(os.ReadFile(filepath.Join(d.State, "c", c.Id, "config.json")))(t), &spec))
		want := map[string]string{"io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.sandbox-id": pod.Id}
		if harness.SystemdDriver() {
			want["run.oci.systemd.subgroup"] = ""
		}
		if !maps.Equal(spec.Annotations, want) {
			t.Errorf("the runtime got %v, want %v", spec.Annotations, want)
		}
	})
	t.Run("recursive read-only mounts", func(t *testing.T) {
		announced, _ := handlersOf(t, d)
		if announced["crun"].GetRecursiveReadOnlyMounts() {
			testRecursiveReadOnly(t, pod)
			return
		}
		_, err := pod.TryCreate(t, harness.Mount(&runtimeapi.Mount{HostPath: t.TempDir(), ContainerPath: "/mnt", Readonly: true, RecursiveReadOnly: true}))
		if err == nil || !harness.Contains(err.Error(), "RROUnsupported") {
			t.Errorf("a recursive read-only mount: %v, want RROUnsupported", err)
		}
	})
}

// --- what containers of every handler do --------------------------------------------

func testKill(t *testing.T, pod *harness.Pod) {
	t.Helper()
	c := pod.Run(t, harness.Script("trap '' TERM; sleep 1000 & sleep 1000"))
	c.Stop(t, 0)
	harness.Equal(t, "exit code", c.WaitExited(t).ExitCode, 137)
}

func testBadCommand(t *testing.T, pod *harness.Pod) {
	t.Helper()
	c := pod.Create(t, harness.Command("/no/such/program"))
	harness.WantCode(t, pod.D.Cri.StartContainer(t.Context(), c.Id), codes.InvalidArgument, "/no/such/program")
	harness.Equal(t, "reason", c.Status(t).Reason, "StartError")
}

func testOOMReason(t *testing.T, pod *harness.Pod) {
	t.Helper()
	_, status := pod.RunToEnd(t, harness.Command("tail", "/dev/zero"), harness.Resources(func(r *runtimeapi.LinuxContainerResources) { r.MemoryLimitInBytes = 16 << 20 }))
	harness.Equal(t, "reason", status.Reason, "OOMKilled")
}

func testUpdateLimits(t *testing.T, pod *harness.Pod) {
	t.Helper()
	c := pod.Run(t, harness.Resources(func(r *runtimeapi.LinuxContainerResources) { r.MemoryLimitInBytes = 64 << 20 }))
	harness.Must(t, pod.D.Cri.UpdateContainerResources(t.Context(), c.Id, &runtimeapi.ContainerResources{Linux: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 128 << 20}}))
	memory, _ := limitsOf(t, c)
	harness.Equal(t, "memory limit", memory, "134217728")
}

func testShortOutput(t *testing.T, pod *harness.Pod) {
	t.Helper()
	for i := range 10 {
		c, status := pod.RunToEnd(t, harness.Script(fmt.Sprintf("echo line %d; exit %d", i, i)))
		harness.Equal(t, "exit code", status.ExitCode, int32(i))
		harness.Equal(t, "output", c.Output(t), fmt.Sprintf("line %d\n", i))
	}
}

func testLongOutput(t *testing.T, pod *harness.Pod) {
	t.Helper()
	c, _ := pod.RunToEnd(t, harness.Script("seq 200000"))
	if lines := strings.Count(c.Output(t), "\n"); lines != 200000 {
		t.Errorf("the log has %d lines, want 200000", lines)
	}
}

// The configuration's defaults for all containers, pauses and a runtime.
func TestNodeDefaults(t *testing.T) {
	dir := t.TempDir()
	profile := filepath.Join(dir, "seccomp.json")
	harness.Must(t, os.WriteFile(profile, []byte(`{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO"}]}`), 0o600))
	d := harness.StartDaemon(t, harness.WithConfig(
		`container.default_env = ["PROXY=http://proxy"]`,
		`container.default_ulimits = ["nofile=100:200", "core=0"]`,
		fmt.Sprintf(`container.seccomp_profile = %q`, profile),
		`container.pause_cpus = "0"`,
	), harness.WithHandler("crun", harness.Crun(t)), harness.WithConfig(
		`pod_annotations = ["run.oci.pod"]`, `container_annotations = ["run.oci.container"]`))
	pod := d.RunPod(t, harness.HostNetwork)
	harness.Equal(t, "CPUs of the pause", machine.StatusField(t, pod.PausePID(t), "Cpus_allowed_list"), "0")
	c := pod.Run(t, harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.Seccomp = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault}
	}))
	harness.Equal(t, "environment and limits", c.Exec(t, "sh", "-c", "echo $PROXY $(ulimit -n) $(ulimit -Hn) $(ulimit -c)"),
		"http://proxy 100 200 0")
	if _, stderr, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"mkdir", "/tmp/x"}, 0); harness.ExitCode(err) != 1 {
		t.Errorf("mkdir under the node's profile: %v %s", err, stderr)
	}
	other := runPodWith(t, d, "crun", harness.HostNetwork, func(c *runtimeapi.PodSandboxConfig) {
		c.Annotations["run.oci.pod"], c.Annotations["run.oci.container"] = "1", "pod"
	})
	in := other.Run(t, func(c *runtimeapi.ContainerConfig) {
		c.Annotations["run.oci.container"], c.Annotations["run.oci.pod"], c.Annotations["a"] = "2", "container", "3"
	})
	var spec struct{ Annotations map[string]string }
	harness.Must(t, json.Unmarshal(harness.Get(os.ReadFile(filepath.Join(d.State, "c", in.Id, "config.json")))(t), &spec))
	if spec.Annotations["run.oci.pod"] != "1" || spec.Annotations["run.oci.container"] != "2" || spec.Annotations["a"] != "" {
		t.Errorf("the runtime got %v", spec.Annotations)
	}
}

// berth makes a pod's user namespace. An OCI runtime that supports user namespaces joins it.
func TestCrunUserNamespace(t *testing.T) {
	testHandlerUserNamespace(t, harness.StartDaemon(t, harness.WithHandler("crun", harness.Crun(t))), "crun")
}

func testHandlerUserNamespace(t *testing.T, d *harness.Daemon, handler string) {
	t.Helper()
	const base = 5 * usernsLength
	if announced, _ := handlersOf(t, d); !announced[handler].GetUserNamespaces() {
		_, err := d.Cri.RunPodSandbox(t.Context(), d.PodConfig(t, userNamespace(base)), handler)
		harness.WantCode(t, err, codes.FailedPrecondition, "user namespaces")
		mapped := &runtimeapi.Mount{HostPath: t.TempDir(), ContainerPath: "/mnt", UidMappings: idMapping(base), GidMappings: idMapping(base)}
		_, err = runPodWith(t, d, handler, harness.HostNetwork).TryCreate(t, harness.Mount(mapped))
		harness.WantCode(t, err, codes.FailedPrecondition, "ID-mapped mounts")
		t.Skip("NOT TESTED except for the refusal: this runtime does not support user namespaces (crun 1.21 does)")
	}
	volume := t.TempDir()
	harness.Must(t, os.WriteFile(filepath.Join(volume, "file"), nil, 0o600))
	harness.Must(t, os.Chown(filepath.Join(volume, "file"), 5, 6))
	pod := runPodWith(t, d, handler, userNamespace(base))
	c := pod.Run(t, inUserNamespace(base), harness.Mount(&runtimeapi.Mount{HostPath: volume, ContainerPath: "/mnt",
		UidMappings: idMapping(base), GidMappings: idMapping(base)}))
	harness.Equal(t, "uid_map", strings.Join(strings.Fields(c.Exec(t, "cat", "/proc/self/uid_map")), " "), fmt.Sprintf("0 %d 65536", base))
	harness.Equal(t, "uid on the host", strings.Fields(machine.StatusField(t, c.Pid(t), "Uid"))[0], strconv.Itoa(base))
	for _, kind := range []string{"user", "net", "ipc", "uts"} {
		harness.Equal(t, kind+" namespace", machine.Namespace(t, c.Pid(t), kind), machine.Namespace(t, pod.PausePID(t), kind))
	}
	harness.Equal(t, "owners", c.Exec(t, "stat", "-c", "%u:%g", "/", "/bin/busybox", "/mnt/file", "/etc/hosts"), "0:0\n0:0\n5:6\n0:0")
	c.Exec(t, "sh", "-c", "touch /mnt/new /new && echo '# mine' >>/etc/hosts && echo x >/dev/shm/f && echo out >/dev/stdout")
	harness.Equal(t, "new file of the volume", owner(t, filepath.Join(volume, "new")), "0:0")
	harness.Equal(t, "new file of the writable layer", owner(t, filepath.Join(upperDir(d, c), "new")), fmt.Sprintf("%d:%d", base, base))
	_, status := pod.RunToEnd(t, inUserNamespace(base), harness.Script("echo to the log >/dev/stdout; exit 4"))
	harness.Equal(t, "exit code", status.ExitCode, 4)
}

// The next daemon finds, stops and removes the containers of an OCI runtime, even if the handler is
// no longer configured.
func TestCrunSurvivesDaemon(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithHandler("crun", harness.Crun(t)))
	pod := runPodWith(t, d, "crun", harness.HostNetwork)
	running := pod.Run(t)
	ends := pod.Run(t, harness.Script("trap 'exit 11' TERM; echo ready; while :; do sleep 0.02; done"))
	ends.WaitOutput(t, "ready")
	pid := ends.Pid(t)
	d.Kill(t)
	harness.Must(t, syscall.Kill(pid, syscall.SIGTERM))
	config := string(harness.Get(os.ReadFile(d.ConfigFile()))(t))
	harness.Must(t, os.WriteFile(d.ConfigFile(), []byte(strings.ReplaceAll(config, "[handlers.crun]", "[handlers.other]")), 0o600))
	d.Start(t)
	harness.Equal(t, "exit code", ends.WaitExited(t).ExitCode, 11)
	harness.Equal(t, "pod state", pod.Status(t).State, runtimeapi.PodSandboxState_SANDBOX_READY)
	harness.Equal(t, "exec", running.Exec(t, "echo", "still"), "still")
	_, err := d.Cri.RunPodSandbox(t.Context(), d.PodConfig(t, harness.HostNetwork), "crun")
	harness.WantCode(t, err, codes.NotFound, "crun")
	pod.Stop(t)
	harness.Equal(t, "exit code", running.WaitExited(t).ExitCode, 137)
	pod.Remove(t)
	for _, dir := range []string{"oci", "c"} {
		if left := harness.Get(os.ReadDir(filepath.Join(d.State, dir)))(t); len(left) > 0 {
			t.Errorf("%s has %v left", dir, left)
		}
	}
}

// networkOfGVisor is a configuration of CNI plugins. gVisor removes the pod's addresses from its
// interface and uses them itself. The bridge plugin then has no source address to masquerade.
func networkOfGVisor() string {
	return strings.Replace(fixture.Conflist("test", "/run/runsc-network", fixture.Range4), `"ipMasq": true`, `"ipMasq": false`, 1)
}

// The containers of a pod run in one gVisor sandbox, with its own kernel.
func TestRunsc(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithHandler("runsc", runsc(t)), harness.WithNetwork(networkOfGVisor()))
	pod := runPodWith(t, d, "runsc")
	t.Run("lifecycle", func(t *testing.T) {
		c := pod.Run(t, harness.Script("trap 'echo bye; exit 7' TERM; echo hello; dmesg | head -3; while :; do sleep 0.1; done"))
		c.WaitOutput(t, "gVisor")
		harness.Equal(t, "exec", c.Exec(t, "echo", "in"), "in")
		_, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"sh", "-c", "exit 3"}, 0)
		harness.Equal(t, "exit code of an exec", harness.ExitCode(err), 3)
		c.Stop(t, 20)
		harness.Equal(t, "exit code", c.WaitExited(t).ExitCode, 7)
		if out := c.Output(t); !harness.Contains(out, "bye") {
			t.Errorf("the log is %q", out)
		}
	})
	t.Run("network", func(t *testing.T) {
		c := pod.Run(t)
		if out := c.Exec(t, "ip", "addr"); !harness.Contains(out, pod.Ip(t)) {
			t.Errorf("no address %s in the sandbox:\n%s", pod.Ip(t), out)
		}
	})
	t.Run("exec is killed inside", func(t *testing.T) {
		c := pod.Run(t)
		_, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"sh", "-c", "sleep 4711 & sleep 4711"}, 2e9)
		if !errors.Is(err, cri.ErrCommandTimedOut) { // cri-client's form of DeadlineExceeded
			t.Errorf("the error is %v, want DeadlineExceeded", err)
		}
		harness.EventuallyGot(t, "the processes in the sandbox have exited", func() (bool, any) {
			out := c.Exec(t, "ps")
			return !harness.Contains(out, "4711"), out
		})
	})
	t.Run("bad command", func(t *testing.T) {
		c := pod.Create(t, harness.Command("/no/such/program"))
		harness.WantCode(t, d.Cri.StartContainer(t.Context(), c.Id), codes.InvalidArgument, "/no/such/program")
	})
	t.Run("terminal", func(t *testing.T) {
		c := pod.Run(t, harness.Script("[ -t 0 ] && echo terminal; exec sleep 1000"), func(c *runtimeapi.ContainerConfig) { c.Tty = true })
		c.WaitOutput(t, "terminal\r")
		harness.Equal(t, "exec", c.Exec(t, "echo", "in"), "in")
	})
	t.Run("recovery", func(t *testing.T) {
		running := pod.Run(t)
		ends := pod.Run(t, harness.Script("while [ ! -e /tmp/stop ]; do sleep 0.1; done; exit 42"))
		d.Kill(t)
		d.Start(t)
		harness.Equal(t, "pod state", pod.Status(t).State, runtimeapi.PodSandboxState_SANDBOX_READY)
		ends.Release(t, "/tmp/stop")
		harness.Equal(t, "exit code", ends.WaitExited(t).ExitCode, 42)
		running.Stop(t, 0)
		harness.Equal(t, "exit code", running.WaitExited(t).ExitCode, 137)
	})
}

// The daemon removes the containers of an OCI runtime if the records of their pod are lost.
func TestCrunWithoutRecords(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithHandler("crun", harness.Crun(t)))
	other := d.RunPod(t, harness.HostNetwork) // berth refuses to start if it knows none of the pods
	pod := runPodWith(t, d, "crun", harness.HostNetwork)
	c := pod.Run(t)
	pid := c.Pid(t)
	d.Kill(t)
	for _, record := range []string{"pods/" + pod.Id, "containers/" + c.Id} {
		harness.Must(t, os.Remove(filepath.Join(d.Root, record+".record")))
	}
	d.Start(t)
	harness.Eventually(t, "the pod's container is removed", func() error {
		for _, dir := range []string{"c", "oci"} {
			left := machine.ReadDir(filepath.Join(d.State, dir))
			if slices.Contains(left, pod.Id) || slices.Contains(left, c.Id) {
				return fmt.Errorf("%s has %v", dir, left)
			}
		}
		if machine.Alive(pid) {
			return errors.New("the container runs")
		}
		return nil
	})
	harness.Equal(t, "state of the other pod", other.Status(t).State, runtimeapi.PodSandboxState_SANDBOX_READY)
}

// If the daemon exits during a start, the container has not failed. The next daemon reports it as
// created and can start it.
func TestStopDuringStart(t *testing.T) {
	testutil.Long(t)
	dir := t.TempDir()
	hold, held := filepath.Join(dir, "hold"), filepath.Join(dir, "held")
	slow := filepath.Join(dir, "slow")
	script := fmt.Sprintf("#!/bin/sh\ncase \" $* \" in *\" create \"*) if [ -e %[1]s ]; then touch %[2]s; sleep 100000; fi ;; esac\nexec %[3]s \"$@\"\n", hold, held, harness.Crun(t))
	harness.Must(t, os.WriteFile(slow, []byte(script), 0o700))
	d := harness.StartDaemon(t, harness.WithHandler("slow", slow))
	pod := runPodWith(t, d, "slow", harness.HostNetwork)
	c := pod.Create(t)
	harness.Must(t, os.WriteFile(hold, nil, 0o600))
	ended := harness.Go(func() error { return d.Cri.StartContainer(t.Context(), c.Id) })
	harness.Eventually(t, "the OCI runtime creates the container", func() error { _, err := os.Stat(held); return err })
	d.Disconnect(t)
	d.Signal(t, syscall.SIGTERM)
	if <-ended == nil {
		t.Error("the start succeeded")
	}
	harness.Must(t, os.Remove(hold))
	d.Start(t)
	harness.Equal(t, "the container's state", c.Status(t).State, runtimeapi.ContainerState_CONTAINER_CREATED)
	c.Start(t)
	pod.Remove(t)
}
