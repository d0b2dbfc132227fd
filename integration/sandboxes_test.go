package integration

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestPodLifecycle(t *testing.T) {
	d := startDaemon(t)
	before := time.Now().UnixNano()
	pod := d.runPod(t, podLabel("app", "web"), func(c *runtimeapi.PodSandboxConfig) {
		c.Annotations["note.example/bytes"] = "ü\n\x01 \"quoted\""
	})
	status := pod.status(t)
	equal(t, "state", status.State, runtimeapi.PodSandboxState_SANDBOX_READY)
	equal(t, "metadata", status.Metadata.String(), pod.config.Metadata.String())
	if !maps.Equal(status.Labels, pod.config.Labels) || !maps.Equal(status.Annotations, pod.config.Annotations) {
		t.Errorf("labels or annotations changed: %v %v", status.Labels, status.Annotations)
	}
	if status.CreatedAt < before || status.CreatedAt > time.Now().UnixNano() {
		t.Errorf("created_at is %d", status.CreatedAt)
	}
	equal(t, "network namespace mode", status.Linux.Namespaces.Options.Network, runtimeapi.NamespaceMode_POD)

	for range 2 { // stop and remove are idempotent
		must(t, d.cri.StopPodSandbox(t.Context(), pod.id))
		equal(t, "state after stop", pod.status(t).State, runtimeapi.PodSandboxState_SANDBOX_NOTREADY)
	}
	for range 2 {
		must(t, d.cri.RemovePodSandbox(t.Context(), pod.id))
	}
	_, err := d.cri.PodSandboxStatus(t.Context(), pod.id, false)
	wantCode(t, err, codes.NotFound, pod.id)
	must(t, d.cri.StopPodSandbox(t.Context(), pod.id))
}

// Removing a pod removes its running containers too.
func TestRemovePodWithRunningContainers(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t)
	running, created := pod.run(t), pod.create(t)
	_, exited := pod.runToEnd(t, command("true"))
	equal(t, "exit code", exited.ExitCode, 0)
	must(t, d.cri.RemovePodSandbox(t.Context(), pod.id))
	for _, c := range []*container{running, created} {
		_, err := d.cri.ContainerStatus(t.Context(), c.id, false)
		wantCode(t, err, codes.NotFound)
	}
}

func TestPodNamespaces(t *testing.T) {
	d := startDaemon(t)
	self := os.Getpid()
	pod := d.runPod(t)
	pause := pod.pausePID(t)
	a, b := pod.run(t), pod.run(t)
	for _, kind := range []string{"net", "ipc", "uts"} {
		if namespace(t, pause, kind) == namespace(t, self, kind) {
			t.Errorf("the pod is in the node's %s namespace", kind)
		}
		equal(t, kind+" namespace of the containers", namespace(t, a.pid(t), kind), namespace(t, b.pid(t), kind))
		equal(t, kind+" namespace of container and pod", namespace(t, a.pid(t), kind), namespace(t, pause, kind))
	}
	for _, kind := range []string{"pid", "mnt"} {
		if namespace(t, a.pid(t), kind) == namespace(t, b.pid(t), kind) {
			t.Errorf("containers share the %s namespace", kind)
		}
	}
	equal(t, "init's pid in the container", a.exec(t, "cat", "/proc/1/comm"), "sleep")
}

// With a shared PID namespace pause is process 1 and reaps orphans.
func TestPodSharedPIDNamespace(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, sharedPID)
	a, b := pod.run(t), pod.run(t)
	equal(t, "PID namespace of the containers", namespace(t, a.pid(t), "pid"), namespace(t, b.pid(t), "pid"))
	equal(t, "PID namespace of the pod", namespace(t, pod.pausePID(t), "pid"), namespace(t, a.pid(t), "pid"))
	equal(t, "process 1", a.exec(t, "cat", "/proc/1/comm"), "pause")
	a.exec(t, "sh", "-c", "(sleep 0.01 &) ; exit 0")
	eventually(t, "pause reaps the orphan", func() error {
		if out := a.exec(t, "sh", "-c", "cat /proc/[0-9]*/stat"); strings.Contains(out, ") Z 1 ") {
			return fmt.Errorf("there are zombies: %s", out)
		}
		return nil
	})
	// The end of one container does not touch the other.
	a.stop(t, 0)
	equal(t, "state of the other container", b.status(t).State, runtimeapi.ContainerState_CONTAINER_RUNNING)
}

func TestPodHostNamespaces(t *testing.T) {
	d := startDaemon(t)
	self := os.Getpid()
	pod := d.runPod(t, hostNetwork, hostPID, hostIPC)
	c := pod.run(t)
	for _, kind := range []string{"net", "pid", "ipc"} {
		equal(t, kind+" namespace", namespace(t, c.pid(t), kind), namespace(t, self, kind))
	}
	equal(t, "pod IP", pod.ip(t), "")
	options := pod.status(t).Linux.Namespaces.Options
	equal(t, "modes", fmt.Sprint(options.Network, options.Pid, options.Ipc), "NODE NODE NODE")
	hostname, err := os.Hostname()
	must(t, err)
	equal(t, "hostname", c.exec(t, "hostname"), hostname)
	equal(t, "comm of process 1 in /proc", c.exec(t, "cat", "/proc/1/comm"), strings.Join(readLines("/proc/1/comm"), ""))
}

// A debugging container shares the PID namespace of one other container.
func TestTargetPIDNamespace(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t)
	target := pod.run(t, command("sleep", "4242"))
	debug := pod.run(t, security(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.NamespaceOptions.Pid = runtimeapi.NamespaceMode_TARGET
		s.NamespaceOptions.TargetId = target.id
	}))
	equal(t, "PID namespace", namespace(t, debug.pid(t), "pid"), namespace(t, target.pid(t), "pid"))
	if out := debug.exec(t, "cat", "/proc/1/cmdline"); !strings.Contains(out, "4242") {
		t.Errorf("process 1 is %q, want the target", out)
	}
	debug.stop(t, 0)
	equal(t, "state of the target", target.status(t).State, runtimeapi.ContainerState_CONTAINER_RUNNING)
}

func TestPodSysctls(t *testing.T) {
	d := startDaemon(t)
	c := d.runPod(t, sysctl("net.ipv4.ip_unprivileged_port_start", "80"), sysctl("net/ipv4/tcp_keepalive_time", "111"), sysctl("kernel.shm_rmid_forced", "1")).run(t)
	equal(t, "values", c.exec(t, "cat", "/proc/sys/net/ipv4/ip_unprivileged_port_start", "/proc/sys/net/ipv4/tcp_keepalive_time", "/proc/sys/kernel/shm_rmid_forced"), "80\n111\n1")
	if node := readLines("/proc/sys/net/ipv4/tcp_keepalive_time")[0]; node == "111" {
		t.Error("the sysctl was set on the node")
	}
}

func TestPodSharedMemory(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t)
	a, b := pod.run(t), pod.run(t)
	a.exec(t, "sh", "-c", "echo shared >/dev/shm/file")
	equal(t, "content in the other container", b.exec(t, "cat", "/dev/shm/file"), "shared")
	equal(t, "type and size", a.exec(t, "sh", "-c", `awk '$2 == "/dev/shm" {print $3}' /proc/mounts; df -k /dev/shm | awk 'END {print $2}'`), "tmpfs\n65536")
	other := d.runPod(t).run(t)
	equal(t, "files in another pod", other.exec(t, "ls", "/dev/shm"), "")
	if _, err := os.Stat("/dev/shm/file"); err == nil {
		t.Error("the pod's /dev/shm is the node's")
	}
}

func TestPodHostIPCSharedMemory(t *testing.T) {
	d := startDaemon(t)
	path := filepath.Join("/dev/shm", machine)
	must(t, os.WriteFile(path, []byte("host"), 0o600))
	t.Cleanup(func() { must(t, os.Remove(path)) })
	equal(t, "content", d.runPod(t, hostIPC).run(t).exec(t, "cat", path), "host")
}

func TestPodHostnameAndHosts(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, func(c *runtimeapi.PodSandboxConfig) { c.Hostname = "web-0" })
	c := pod.run(t)
	equal(t, "hostname", c.exec(t, "hostname"), "web-0")
	equal(t, "/etc/hostname", c.exec(t, "cat", "/etc/hostname"), "web-0")
	equal(t, "HOSTNAME", c.exec(t, "sh", "-c", "echo $HOSTNAME"), "web-0")
}

func TestPodResolvConf(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, func(c *runtimeapi.PodSandboxConfig) {
		c.DnsConfig = &runtimeapi.DNSConfig{Servers: []string{"10.0.0.10", "fd00::a"}, Searches: []string{"default.svc.cluster.local", "cluster.local"}, Options: []string{"ndots:5"}}
	})
	equal(t, "resolv.conf", pod.run(t).exec(t, "cat", "/etc/resolv.conf"),
		"search default.svc.cluster.local cluster.local\nnameserver 10.0.0.10\nnameserver fd00::a\noptions ndots:5")

	node, err := os.ReadFile("/etc/resolv.conf")
	must(t, err)
	equal(t, "resolv.conf without DNS config", d.runPod(t).run(t).exec(t, "cat", "/etc/resolv.conf"), strings.TrimSuffix(string(node), "\n"))
}

// Cgroups of pause and containers are children of the pod's.
func TestPodCgroupParent(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t)
	c := pod.run(t)
	parent := pod.config.Linux.CgroupParent
	for _, pid := range []int{pod.pausePID(t), c.pid(t)} {
		for _, controller := range []string{"memory", "pids", "cpu"} {
			if dir := filepath.Dir(cgroupDir(t, pid, controller)); !strings.HasSuffix(dir, parent) {
				t.Errorf("process %d is in a cgroup of %s, want of %s", pid, dir, parent)
			}
		}
	}
}

// pause is protected from the OOM killer as far as the kernel lets us.
func TestPodOOMScore(t *testing.T) {
	d := startDaemon(t)
	pause := d.runPod(t).pausePID(t)
	content, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", pause))
	must(t, err)
	score, err := strconv.Atoi(strings.TrimSpace(string(content)))
	must(t, err)
	self, err := os.ReadFile("/proc/self/oom_score_adj")
	must(t, err)
	own, err := strconv.Atoi(strings.TrimSpace(string(self)))
	must(t, err)
	want := -998
	if !canLowerOOMScore() {
		want = own // the kernel refused; berth goes on and says so
		if !strings.Contains(d.tail(), "oom_score_adj") {
			t.Error("the log does not say that oom_score_adj could not be lowered")
		}
	}
	equal(t, "oom_score_adj of pause", score, want)
}

func TestPodSandboxSecurityContext(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, podSecurity(func(s *runtimeapi.LinuxSandboxSecurityContext) {
		s.RunAsUser = &runtimeapi.Int64Value{Value: 65535}
		s.RunAsGroup = &runtimeapi.Int64Value{Value: 65534}
		s.SupplementalGroups = []int64{1234}
		s.ReadonlyRootfs = true
		s.Seccomp = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault}
	}))
	pause := pod.pausePID(t)
	equal(t, "uid of pause", strings.Fields(statusField(t, pause, "Uid"))[0], "65535")
	equal(t, "gid of pause", strings.Fields(statusField(t, pause, "Gid"))[0], "65534")
	sameSet(t, "groups of pause and its gid", append(strings.Fields(statusField(t, pause, "Groups")), "65534"), []string{"1234", "65534"})
	equal(t, "seccomp mode of pause", statusField(t, pause, "Seccomp"), "2")
	if caps := statusField(t, pause, "CapInh"); strings.Trim(caps, "0") != "" {
		t.Errorf("pause has inheritable capabilities: %s", caps)
	}
}

func TestPauseImage(t *testing.T) {
	img := pauseImage(t)
	d := startDaemon(t, withConfig(fmt.Sprintf("pause_image = %q", img)))
	pod := d.runPod(t)
	equal(t, "command of pause", strings.Join(readLines(fmt.Sprintf("/proc/%d/cmdline", pod.pausePID(t))), ""), "sleep\x0099999\x00")
	if status := d.imageStatus(t, img); status == nil || !status.Pinned {
		t.Errorf("the pause image is not there or not pinned: %v", status)
	}
	equal(t, "output", pod.sh(t, "echo works"), "works\n")
}

func TestListPodSandboxFilters(t *testing.T) {
	d := startDaemon(t)
	a := d.runPod(t, hostNetwork, podLabel("app", "a"), podLabel("tier", "x"))
	b := d.runPod(t, hostNetwork, podLabel("app", "b"), podLabel("tier", "x"))
	b.stop(t)
	ready, notReady := runtimeapi.PodSandboxState_SANDBOX_READY, runtimeapi.PodSandboxState_SANDBOX_NOTREADY
	state := func(s runtimeapi.PodSandboxState) *runtimeapi.PodSandboxStateValue {
		return &runtimeapi.PodSandboxStateValue{State: s}
	}
	for _, c := range []struct {
		name   string
		filter *runtimeapi.PodSandboxFilter
		want   []*pod
	}{
		{"none", nil, []*pod{a, b}},
		{"id", &runtimeapi.PodSandboxFilter{Id: a.id}, []*pod{a}},
		{"id prefix", &runtimeapi.PodSandboxFilter{Id: a.id[:13]}, []*pod{a}},
		{"unknown id", &runtimeapi.PodSandboxFilter{Id: "ffffffff"}, nil},
		{"ready", &runtimeapi.PodSandboxFilter{State: state(ready)}, []*pod{a}},
		{"not ready", &runtimeapi.PodSandboxFilter{State: state(notReady)}, []*pod{b}},
		{"label", &runtimeapi.PodSandboxFilter{LabelSelector: map[string]string{"tier": "x"}}, []*pod{a, b}},
		{"two labels", &runtimeapi.PodSandboxFilter{LabelSelector: map[string]string{"tier": "x", "app": "b"}}, []*pod{b}},
		{"no such label", &runtimeapi.PodSandboxFilter{LabelSelector: map[string]string{"app": "c"}}, nil},
		{"id and other state", &runtimeapi.PodSandboxFilter{Id: a.id, State: state(notReady)}, nil},
	} {
		got := map[string]bool{}
		for _, item := range get(d.cri.ListPodSandbox(t.Context(), c.filter))(t) {
			got[item.Id] = true
		}
		want := map[string]bool{}
		for _, p := range c.want {
			want[p.id] = true
		}
		if !maps.Equal(got, want) {
			t.Errorf("filter %s: got %v, want %v", c.name, got, want)
		}
	}
}

// A pod whose pause dies is not ready any more.
func TestPodNotReadyWhenPauseDies(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t)
	process, err := os.FindProcess(pod.pausePID(t))
	must(t, err)
	must(t, process.Kill())
	eventually(t, "the pod is not ready", func() error {
		if state := pod.status(t).State; state != runtimeapi.PodSandboxState_SANDBOX_NOTREADY {
			return unexpected("the state", state, runtimeapi.PodSandboxState_SANDBOX_NOTREADY)
		}
		return nil
	})
	_, err = pod.tryCreate(t)
	wantCode(t, err, codes.FailedPrecondition, pod.id)
}
