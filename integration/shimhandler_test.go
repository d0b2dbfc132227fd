package integration

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	cri "k8s.io/cri-client/pkg"

	"berth/integration/harness"
	"berth/integration/machine"
)

// shimInit returns the init of a container of runc's shim, which writes it to its bundle.
func shimInit(t *testing.T, d *harness.Daemon, c *harness.Container) int {
	t.Helper()
	text := string(harness.Get(os.ReadFile(filepath.Join(d.State, "c", c.Id, "init.pid")))(t))
	return harness.Get(strconv.Atoi(strings.TrimSpace(text)))(t)
}

// shimPID returns the shim of a pod.
func shimPID(t *testing.T, d *harness.Daemon, pod *harness.Pod) int {
	t.Helper()
	var record struct{ PID int }
	harness.Must(t, json.Unmarshal(harness.Get(os.ReadFile(filepath.Join(d.State, "oci", pod.Id, "shim.json")))(t), &record))
	return record.PID
}

// A pod whose containers containerd's shim runs.
func TestShim(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithRuncShim(t, "shim"))
	announced, problems := handlersOf(t, d)
	if !announced["shim"].GetRecursiveReadOnlyMounts() || problems["shim"] != "" {
		t.Errorf("the handler announces %v, with problem %q", announced["shim"], problems["shim"])
	}
	pod := runPodWith(t, d, "shim")
	t.Run("lifecycle", func(t *testing.T) {
		c := pod.Run(t, harness.Script("trap 'echo bye; exit 7' TERM; echo hello; echo oops >&2; while :; do sleep 0.02; done"))
		c.WaitOutput(t, "hello")
		harness.Equal(t, "exec", c.Exec(t, "sh", "-c", "echo in; exec echo $0", "x"), "in\nx")
		_, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"sh", "-c", "exit 3"}, 0)
		harness.Equal(t, "exit code of an exec", harness.ExitCode(err), 3)
		_, _, err = d.Cri.ExecSync(t.Context(), c.Id, []string{"no-such-command"}, 0)
		harness.WantCode(t, err, codes.InvalidArgument, "no-such-command")
		c.Stop(t, 10)
		harness.Equal(t, "exit code", c.WaitExited(t).ExitCode, 7)
		if out := c.Output(t); !harness.Contains(out, "bye") || !harness.Contains(out, "oops") {
			t.Errorf("the log is %q", out)
		}
	})
	t.Run("short output", func(t *testing.T) { testShortOutput(t, pod) })
	t.Run("long output", func(t *testing.T) { testLongOutput(t, pod) })
	t.Run("kill", func(t *testing.T) { testKill(t, pod) })
	t.Run("bad command", func(t *testing.T) { testBadCommand(t, pod) })
	t.Run("OOM", func(t *testing.T) { testOOMReason(t, pod) })
	t.Run("update", func(t *testing.T) { testUpdateLimits(t, pod) })
	t.Run("statistics", func(t *testing.T) {
		c := pod.Run(t)
		stats := harness.Get(d.Cri.ContainerStats(t.Context(), c.Id))(t)
		if stats.GetMemory().GetWorkingSetBytes().GetValue() == 0 {
			t.Errorf("no memory in %v", stats)
		}
	})
	t.Run("namespaces", func(t *testing.T) {
		c := pod.Run(t)
		harness.Equal(t, "address", c.Exec(t, "hostname", "-i"), pod.Ip(t))
		if out := c.Exec(t, "ps", "-o", "pid,comm"); len(strings.Split(out, "\n")) != 3 {
			t.Errorf("other processes are visible: %s", out)
		}
	})
	t.Run("terminal", func(t *testing.T) {
		c := pod.Run(t, harness.Script("[ -t 0 ] && echo terminal; exec sleep 1000"), func(c *runtimeapi.ContainerConfig) { c.Tty = true })
		c.WaitOutput(t, "terminal\r")
		harness.Equal(t, "exec", c.Exec(t, "echo", "in"), "in")
	})
	t.Run("attach", func(t *testing.T) { testAttach(t, pod) })
	t.Run("target of another container", func(t *testing.T) {
		target := pod.Run(t, harness.Script("exec sleep 4712"))
		c := pod.Run(t, harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.NamespaceOptions.Pid, s.NamespaceOptions.TargetId = runtimeapi.NamespaceMode_TARGET, target.Id
		}))
		if out := c.Exec(t, "ps"); !harness.Contains(out, "4712") {
			t.Errorf("it does not see the target's process: %s", out)
		}
	})
	t.Run("exec is killed", func(t *testing.T) {
		c := pod.Run(t)
		_, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"sh", "-c", "(sleep 4711; true) & exec sleep 4711"}, 2e9)
		if err == nil {
			t.Error("the exec did not time out")
		}
		harness.EventuallyGot(t, "the process has exited", func() (bool, any) {
			out := c.Exec(t, "ps")
			return !harness.Contains(out, "4711"), out
		})
	})
}

// With privileged_without_host_devices, a privileged container has no devices of the node.
func TestShimWithoutHostDevices(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithRuncShim(t, "shim"), harness.WithConfig("privileged_without_host_devices = true"))
	pod := runPodWith(t, d, "shim", harness.HostNetwork, harness.PodSecurity(func(s *runtimeapi.LinuxSandboxSecurityContext) { s.Privileged = true }))
	c := pod.Run(t, harness.Security(harness.Privileged))
	harness.Equal(t, "devices", c.Exec(t, "sh", "-c", "ls -d /dev/kmsg /dev/loop* 2>/dev/null; ls -d /dev/null"), "/dev/null")
}

// A shim's container reads layers that are still incomplete.
func TestShimLazyLayer(t *testing.T) {
	testLazyPull(t, append([]string{`default_handler = "shim"`}, harness.RuncShim(t, "shim")...)...)
}

func TestShimUserNamespace(t *testing.T) {
	testHandlerUserNamespace(t, harness.StartDaemon(t, harness.WithRuncShim(t, "shim")), "shim")
}

// A daemon that was killed loses no line and no exit code of the containers of a shim.
func TestShimSurvivesDaemon(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithRuncShim(t, "shim"))
	pod := runPodWith(t, d, "shim", harness.HostNetwork)
	running := pod.Run(t)
	ends := pod.Run(t, harness.Script("trap 'echo last; exit 11' TERM; echo ready; while :; do sleep 0.02; done"))
	ends.WaitOutput(t, "ready")
	pid := shimInit(t, d, ends)
	d.Kill(t)
	harness.Must(t, syscall.Kill(pid, syscall.SIGTERM))
	d.Start(t)
	harness.Equal(t, "exit code", ends.WaitExited(t).ExitCode, 11)
	harness.Equal(t, "output", ends.Output(t), "ready\nlast\n")
	harness.Equal(t, "pod state", pod.Status(t).State, runtimeapi.PodSandboxState_SANDBOX_READY)
	harness.Equal(t, "exec", running.Exec(t, "echo", "still"), "still")
	pod.Stop(t)
	harness.Equal(t, "exit code", running.WaitExited(t).ExitCode, 137)
	pod.Remove(t)
	for _, dir := range []string{filepath.Join(d.State, "oci"), filepath.Join(d.State, "c"), "/run/berth/s"} {
		if left := harness.Get(os.ReadDir(dir))(t); len(left) > 0 {
			t.Errorf("%s has %v left", dir, left)
		}
	}
}

// A shim that was killed, and one that hangs, do not keep their pod.
func TestShimLost(t *testing.T) {
	loseShim(t, "shim", func(t *testing.T) harness.DaemonOption { return harness.WithRuncShim(t, "shim") })
}

func loseShim(t *testing.T, handler string, option func(*testing.T) harness.DaemonOption) {
	t.Helper()
	for name, signal := range map[string]syscall.Signal{"killed": syscall.SIGKILL, "stopped": syscall.SIGSTOP} {
		t.Run(name, func(t *testing.T) {
			d := harness.StartDaemon(t, option(t))
			pod := runPodWith(t, d, handler, harness.HostNetwork)
			c := pod.Run(t)
			pid := shimInit(t, d, c)
			harness.Must(t, syscall.Kill(shimPID(t, d, pod), signal))
			if signal == syscall.SIGKILL {
				harness.Equal(t, "exit code", c.WaitExited(t).ExitCode, 137)
				harness.Eventually(t, "the pod is not ready", func() error {
					if state := pod.Status(t).State; state != runtimeapi.PodSandboxState_SANDBOX_NOTREADY {
						return fmt.Errorf("its state is %v", state)
					}
					return nil
				})
			}
			stopRepeatedly(t, d, pod)
			harness.Equal(t, "exit code", c.WaitExited(t).ExitCode, 137)
			pod.Remove(t)
			if machine.Alive(pid) {
				t.Errorf("the container's process %d is alive", pid)
			}
		})
	}
}

// stopRepeatedly stops a pod as kubelet does, which repeats the call.
func stopRepeatedly(t *testing.T, d *harness.Daemon, pod *harness.Pod) {
	t.Helper()
	harness.Eventually(t, "the pod stops", func() error { return d.Cri.StopPodSandbox(t.Context(), pod.Id) })
}

// A pod without containers whose shim is lost refuses the next container, and is not ready then.
func TestShimLostBeforeContainers(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithRuncShim(t, "shim"))
	pod := runPodWith(t, d, "shim", harness.HostNetwork)
	harness.Must(t, syscall.Kill(shimPID(t, d, pod), syscall.SIGKILL))
	c := pod.Create(t)
	if err := d.Cri.StartContainer(t.Context(), c.Id); err == nil {
		t.Error("the container started")
	}
	harness.Eventually(t, "the pod is not ready", func() error {
		if state := pod.Status(t).State; state != runtimeapi.PodSandboxState_SANDBOX_NOTREADY {
			return fmt.Errorf("its state is %v", state)
		}
		return nil
	})
}

// runscShim returns the path of gVisor's shim, which is beside runsc, and an option with the path
// of its configuration.
func runscShim(t *testing.T) (path, option string) {
	t.Helper()
	program := runsc(t)
	path = filepath.Join(filepath.Dir(program), "containerd-shim-runsc-v1")
	if _, err := os.Stat(path); err != nil {
		t.Skipf("NOT TESTED: there is no shim beside runsc: %v", err)
	}
	// gVisor keeps a network namespace of all sandboxes mounted in its directory. On a private
	// mount it does not outlive the last shim.
	root := t.TempDir()
	harness.Must(t, syscall.Mount(root, root, "", syscall.MS_BIND, ""))
	t.Cleanup(func() { harness.Must(t, syscall.Unmount(root, syscall.MNT_DETACH)) })
	harness.Must(t, syscall.Mount("", root, "", syscall.MS_PRIVATE, ""))
	config := filepath.Join(t.TempDir(), "runsc.toml")
	harness.Must(t, os.WriteFile(config, fmt.Appendf(nil, "binary_name = %q\nroot = %q\n", program, root), 0o600))
	return permitLowScore(t, path), "ConfigPath=" + config
}

// permitLowScore returns the path of a program that calls gVisor's shim. Without CAP_SYS_RESOURCE
// the kernel refuses the shim's own oom_score_adj, and the shim ignores that only in a user
// namespace. So the process that starts the shim gets the uid_map of one. It does nothing else.
func permitLowScore(t *testing.T, shim string) (path string) {
	t.Helper()
	if machine.CanLowerOOMScore() {
		return shim
	}
	dir := t.TempDir()
	uidMap, path := filepath.Join(dir, "uid_map"), filepath.Join(dir, filepath.Base(shim))
	harness.Must(t, os.WriteFile(uidMap, []byte("0 0 65536\n"), 0o600))
	script := fmt.Sprintf("#!/bin/sh\ncase \" $* \" in *\" start \"*) mount --bind %s /proc/$$/uid_map ;; esac\nexec %s \"$@\"\n", uidMap, shim)
	harness.Must(t, os.WriteFile(path, []byte(script), 0o700))
	return path
}

// withRunscShim configures the handler "gvisor".
func withRunscShim(t *testing.T) harness.DaemonOption {
	t.Helper()
	path, option := runscShim(t)
	return harness.WithConfig("[handlers.gvisor]", `type = "shim"`, fmt.Sprintf("path = %q", path), fmt.Sprintf("options = [%q]", option))
}

// The containers of a pod run in one gVisor sandbox, which gVisor's shim for containerd starts.
func TestShimRunsc(t *testing.T) {
	d := harness.StartDaemon(t, withRunscShim(t), harness.WithNetwork(networkOfGVisor()))
	announced, problems := handlersOf(t, d)
	if announced["gvisor"].GetUserNamespaces() || problems["gvisor"] != "" {
		t.Errorf("the handler announces %v, with problem %q", announced["gvisor"], problems["gvisor"])
	}
	pod := runPodWith(t, d, "gvisor")
	t.Run("lifecycle", func(t *testing.T) {
		c := pod.Run(t, harness.Script("trap 'echo bye; exit 7' TERM; echo hello; dmesg | head -3; while :; do sleep 0.1; done"))
		c.WaitOutput(t, "gVisor")
		harness.Equal(t, "exec", c.Exec(t, "echo", "in"), "in")
		_, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"sh", "-c", "exit 3"}, 0)
		harness.Equal(t, "exit code of an exec", harness.ExitCode(err), 3)
		_, _, err = d.Cri.ExecSync(t.Context(), c.Id, []string{"no-such-command"}, 0)
		harness.WantCode(t, err, codes.InvalidArgument, "no-such-command")
		c.Stop(t, 20)
		harness.Equal(t, "exit code", c.WaitExited(t).ExitCode, 7)
		if out := c.Output(t); !harness.Contains(out, "bye") {
			t.Errorf("the log is %q", out)
		}
	})
	t.Run("short output", func(t *testing.T) { testShortOutput(t, pod) })
	t.Run("long output", func(t *testing.T) { testLongOutput(t, pod) })
	t.Run("kill", func(t *testing.T) { testKill(t, pod) })
	t.Run("network", func(t *testing.T) {
		c := pod.Run(t)
		if out := c.Exec(t, "ip", "addr"); !harness.Contains(out, pod.Ip(t)) {
			t.Errorf("no address %s in the sandbox:\n%s", pod.Ip(t), out)
		}
	})
	t.Run("exec is killed inside", func(t *testing.T) {
		c := pod.Run(t)
		_, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"sleep", "4711"}, 2e9)
		if !errors.Is(err, cri.ErrCommandTimedOut) { // cri-client's form of DeadlineExceeded
			t.Errorf("the error is %v, want DeadlineExceeded", err)
		}
		harness.EventuallyGot(t, "the process in the sandbox has exited", func() (bool, any) {
			out := c.Exec(t, "ps")
			return !harness.Contains(out, "4711"), out
		})
	})
	t.Run("bad command", func(t *testing.T) { testBadCommand(t, pod) })
	t.Run("terminal", func(t *testing.T) {
		c := pod.Run(t, harness.Script("[ -t 0 ] && echo terminal; exec sleep 1000"), func(c *runtimeapi.ContainerConfig) { c.Tty = true })
		c.WaitOutput(t, "terminal\r")
		harness.Equal(t, "exec", c.Exec(t, "echo", "in"), "in")
	})
	t.Run("attach", func(t *testing.T) { testAttach(t, pod) })
	t.Run("statistics", func(t *testing.T) {
		pod.Run(t)
		stats := harness.Get(d.Cri.PodSandboxStats(t.Context(), pod.Id))(t)
		if stats.GetLinux().GetMemory().GetWorkingSetBytes().GetValue() == 0 {
			t.Errorf("no memory in %v", stats)
		}
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

// A lost shim of gVisor takes its sandbox with it.
func TestShimRunscLost(t *testing.T) {
	loseShim(t, "gvisor", withRunscShim)
}

// A shim that does not start, and whose command delete fails, leaves nothing of its pod.
func TestShimDoesNotStart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "containerd-shim-broken-v1")
	harness.Must(t, os.WriteFile(path, []byte("#!/bin/sh\n[ \"$*\" = -v ] && exit\necho broken >&2\nexit 1\n"), 0o700))
	d := harness.StartDaemon(t, harness.WithConfig("[handlers.broken]", `type = "shim"`, fmt.Sprintf("path = %q", path)))
	_, err := d.Cri.RunPodSandbox(t.Context(), d.PodConfig(t, harness.HostNetwork), "broken")
	harness.WantCode(t, err, codes.Internal, "start: broken")
	if harness.Contains(err.Error(), "undo") {
		t.Errorf("the pod was not removed: %v", err)
	}
	for _, dir := range []string{"oci", "c"} {
		if left := harness.Get(os.ReadDir(filepath.Join(d.State, dir)))(t); len(left) > 0 {
			t.Errorf("%s has %v left", dir, left)
		}
	}
}
