package integration

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/kata"
)

// Of the process that serves as hypervisor: its directory, and runc.
const (
	kataGuestEnv = "BERTH_KATA_GUEST"
	kataRuncEnv  = "BERTH_KATA_RUNC"
)

// kataConfig is a configuration of Kata with the hypervisor at a socket.
const kataConfig = `[hypervisor.remote]
remote_hypervisor_socket = %q
remote_hypervisor_timeout = 60
disable_guest_selinux = true
[agent.kata]
dial_timeout = 10
[runtime]
internetworking_model = "none"
disable_guest_seccomp = true
disable_new_netns = true
sandbox_cgroup_only = true
static_sandbox_resource_mgmt = true
create_container_timeout = 60
`

// hypervisor is a process that serves as Kata's hypervisor.
type hypervisor struct {
	*exec.Cmd
	dir string
}

// stop ends the hypervisor, and the virtual machines that nobody has stopped.
func (h *hypervisor) stop(t *testing.T) {
	t.Helper()
	if h.ProcessState == nil {
		harness.Must(t, h.Process.Signal(syscall.SIGTERM))
		harness.Must(t, h.Wait())
	}
}

// startKata starts Kata's hypervisor. It returns the daemon's handler "kata", too.
func startKata(t *testing.T) (*hypervisor, harness.DaemonOption) {
	t.Helper()
	shim := os.Getenv("BERTH_KATA_SHIM")
	if shim == "" {
		t.Skip("NOT TESTED: BERTH_KATA_SHIM is not the path of Kata's containerd-shim-kata-v2")
	}
	runc := filepath.Join(harness.Containerd(t), "runc")
	dir := harness.Get(os.MkdirTemp("/run", "kata"))(t)
	config := filepath.Join(dir, "kata.toml")
	harness.Must(t, os.WriteFile(config, fmt.Appendf(nil, kataConfig, filepath.Join(dir, kata.HypervisorSocket)), 0o600))
	cmd := &hypervisor{exec.Command("/proc/self/exe"), dir}
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), kataGuestEnv + "=" + dir, kataRuncEnv + "=" + runc, "BERTH_KATA_DEBUG=" + os.Getenv("BERTH_KATA_DEBUG")}
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	harness.Must(t, cmd.Start())
	t.Cleanup(func() {
		cmd.stop(t)
		harness.Must(t, os.RemoveAll(dir))
	})
	harness.Eventually(t, "the hypervisor serves", func() error {
		_, err := os.Stat(filepath.Join(dir, kata.HypervisorSocket))
		return err
	})
	return cmd, harness.WithConfig("[handlers.kata]", `type = "shim"`, fmt.Sprintf("path = %q", shim),
		fmt.Sprintf("options = [%q]", "ConfigPath="+config))
}

// A pod of Kata's shim, with an agent that runs containers on the node.
func TestShimKata(t *testing.T) {
	h, handler := startKata(t)
	d := harness.StartDaemon(t, handler)
	_, problems := handlersOf(t, d)
	harness.Equal(t, "problem", problems["kata"], "")
	const mib = 1 << 20
	pod := runPodWith(t, d, "kata", func(c *runtimeapi.PodSandboxConfig) {
		c.Linux.Resources = &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 100 * mib}
	})
	memory := string(harness.Get(os.ReadFile(filepath.Join(h.dir, kata.MemoryFile)))(t))
	harness.Equal(t, "MiB of the virtual machine", memory, "100")
	t.Run("lifecycle", func(t *testing.T) {
		c := pod.Run(t, harness.Script("trap 'echo bye; exit 7' TERM; echo hello; echo oops >&2; while :; do sleep 0.02; done"))
		c.WaitOutput(t, "hello")
		harness.Equal(t, "exec", c.Exec(t, "sh", "-c", "echo in; exec echo $0", "x"), "in\nx")
		_, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"sh", "-c", "exit 3"}, 0)
		harness.Equal(t, "exit code of an exec", harness.ExitCode(err), 3)
		c.Stop(t, 10)
		harness.Equal(t, "exit code", c.WaitExited(t).ExitCode, 7)
		if out := c.Output(t); !harness.Contains(out, "bye") || !harness.Contains(out, "oops") {
			t.Errorf("the log is %q", out)
		}
	})
	t.Run("bad command", func(t *testing.T) {
		c := pod.Create(t, harness.Command("/no/such/program"))
		harness.WantCode(t, d.Cri.StartContainer(t.Context(), c.Id), codes.InvalidArgument, "/no/such/program")
	})
	t.Run("OOM", func(t *testing.T) { testOOMReason(t, pod) })
	t.Run("long output", func(t *testing.T) { testLongOutput(t, pod) })
	t.Run("kill", func(t *testing.T) { testKill(t, pod) })
	t.Run("update", func(t *testing.T) {
		c := pod.Run(t, harness.Resources(func(r *runtimeapi.LinuxContainerResources) { r.MemoryLimitInBytes = 64 << 20 }))
		harness.Equal(t, "memory limit", kataMemoryLimit(t, c), "67108864")
		harness.Must(t, d.Cri.UpdateContainerResources(t.Context(), c.Id, &runtimeapi.ContainerResources{Linux: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 128 << 20}}))
		harness.Equal(t, "memory limit", kataMemoryLimit(t, c), "134217728")
	})
	t.Run("statistics", func(t *testing.T) {
		c := pod.Run(t, harness.Script("i=0; while :; do i=$((i+1)); done"))
		stats := harness.Get(d.Cri.PodSandboxStats(t.Context(), pod.Id))(t)
		if stats.GetLinux().GetMemory().GetWorkingSetBytes().GetValue() == 0 {
			t.Errorf("no memory in %v", stats)
		}
		harness.EventuallyGot(t, "the container has usage", func() (bool, any) {
			stats := harness.Get(d.Cri.ContainerStats(t.Context(), c.Id))(t)
			return stats.GetMemory().GetWorkingSetBytes().GetValue() > 0 && stats.GetCpu().GetUsageCoreNanoSeconds().GetValue() > 0, stats
		})
		c.Stop(t, 0)
	})
	t.Run("network", func(t *testing.T) {
		harness.Equal(t, "address", pod.Run(t).Exec(t, "hostname", "-i"), pod.Ip(t))
	})
	t.Run("terminal", func(t *testing.T) {
		c := pod.Run(t, harness.Script("[ -t 0 ] && echo terminal; exec sleep 1000"), func(c *runtimeapi.ContainerConfig) { c.Tty = true })
		c.WaitOutput(t, "terminal\r")
		harness.Equal(t, "exec", c.Exec(t, "echo", "in"), "in")
	})
}

// kataCgroup returns a file in the guest's cgroup of a container.
func kataCgroup(t *testing.T, c *harness.Container, v1, v2 string) string {
	t.Helper()
	for _, file := range []string{"/sys/fs/cgroup/memory/kata-guest/" + c.Id + "/" + v1, "/sys/fs/cgroup/kata-guest/" + c.Id + "/" + v2} {
		if content, err := os.ReadFile(file); err == nil {
			return strings.TrimSpace(string(content))
		}
	}
	t.Fatal("the guest has no cgroup of the container")
	return ""
}

func kataMemoryLimit(t *testing.T, c *harness.Container) string {
	t.Helper()
	return kataCgroup(t, c, "memory.limit_in_bytes", "memory.max")
}

// A daemon that was killed loses no line and no exit code, and a stopped pod leaves nothing of
// Kata.
func TestShimKataSurvivesDaemon(t *testing.T) {
	_, handler := startKata(t)
	d := harness.StartDaemon(t, handler)
	pod := runPodWith(t, d, "kata", harness.HostNetwork)
	running := pod.Run(t)
	ends := pod.Run(t, harness.Script("trap 'echo last; exit 11' TERM; echo ready; while :; do sleep 0.02; done"))
	ends.WaitOutput(t, "ready")
	d.Kill(t)
	init, _, _ := strings.Cut(kataCgroup(t, ends, "cgroup.procs", "cgroup.procs"), "\n")
	harness.Must(t, syscall.Kill(harness.Get(strconv.Atoi(init))(t), syscall.SIGTERM))
	d.Start(t)
	harness.Equal(t, "exit code", ends.WaitExited(t).ExitCode, 11)
	harness.Equal(t, "output", ends.Output(t), "ready\nlast\n")
	harness.Equal(t, "pod state", pod.Status(t).State, runtimeapi.PodSandboxState_SANDBOX_READY)
	harness.Equal(t, "exec", running.Exec(t, "echo", "still"), "still")
	for _, dir := range kataDirs { // the removal of the other container has kept them
		if there, err := os.ReadDir(dir); err != nil || len(there) != 1 {
			t.Errorf("%s has %v, %v", dir, there, err)
		}
	}
	stopRepeatedly(t, d, pod)
	harness.Equal(t, "exit code", running.WaitExited(t).ExitCode, 137)
	removeKata(t, pod, kataDirs)
}

// A pod whose agent or shim hangs is stopped and removed.
func TestShimKataHangs(t *testing.T) {
	for name, hang := range map[string]func(t *testing.T, h *hypervisor, shim int){
		"agent": func(t *testing.T, h *hypervisor, _ int) { harness.Must(t, h.Process.Signal(kata.HangSignal)) },
		"shim":  func(t *testing.T, _ *hypervisor, shim int) { harness.Must(t, syscall.Kill(shim, syscall.SIGSTOP)) },
	} {
		t.Run(name, func(t *testing.T) {
			h, handler := startKata(t)
			d := harness.StartDaemon(t, handler)
			pod := runPodWith(t, d, "kata", harness.HostNetwork)
			c := pod.Run(t)
			hang(t, h, shimPID(t, d, pod))
			stopRepeatedly(t, d, pod)
			harness.Equal(t, "exit code", c.WaitExited(t).ExitCode, 137)
			removeKata(t, pod, kataDirs[:2]) // a killed shim leaves an empty directory in the third
			harness.Must(t, os.RemoveAll(kataDirs[2]))
			h.stop(t) // nobody could ask it to stop the virtual machine
		})
	}
}

// kataDirs are where Kata's shim has its socket, its record of a pod, and what it shares with the
// virtual machine.
var kataDirs = []string{"/run/containerd/s", "/run/vc/sbs", "/run/kata-containers/shared/sandboxes"}

// removeKata removes a pod and checks that nothing of its shim is left in dirs.
func removeKata(t *testing.T, pod *harness.Pod, dirs []string) {
	t.Helper()
	pod.Remove(t)
	for _, dir := range dirs {
		if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
			t.Errorf("%s has %v left, %v", dir, left, err)
		}
	}
}
