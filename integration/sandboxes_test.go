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

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
)

func TestPodLifecycle(t *testing.T) {
	d := harness.StartDaemon(t)
	before := time.Now().UnixNano()
	pod := d.RunPod(t, harness.PodLabel("app", "web"), func(c *runtimeapi.PodSandboxConfig) {
		c.Annotations["note.example/bytes"] = "ü\n\x01 \"quoted\""
	})
	status := pod.Status(t)
	harness.Equal(t, "state", status.State, runtimeapi.PodSandboxState_SANDBOX_READY)
	harness.Equal(t, "metadata", status.Metadata.String(), pod.Config.Metadata.String())
	if !maps.Equal(status.Labels, pod.Config.Labels) || !maps.Equal(status.Annotations, pod.Config.Annotations) {
		t.Errorf("labels or annotations changed: %v %v", status.Labels, status.Annotations)
	}
	if status.CreatedAt < before || status.CreatedAt > time.Now().UnixNano() {
		t.Errorf("created_at is %d", status.CreatedAt)
	}
	harness.Equal(t, "network namespace mode", status.Linux.Namespaces.Options.Network, runtimeapi.NamespaceMode_POD)

	for range 2 { // stop and remove are idempotent
		harness.Must(t, d.Cri.StopPodSandbox(t.Context(), pod.Id))
		harness.Equal(t, "state after stop", pod.Status(t).State, runtimeapi.PodSandboxState_SANDBOX_NOTREADY)
	}
	for range 2 {
		harness.Must(t, d.Cri.RemovePodSandbox(t.Context(), pod.Id))
	}
	_, err := d.Cri.PodSandboxStatus(t.Context(), pod.Id, false)
	harness.WantCode(t, err, codes.NotFound, pod.Id)
	harness.Must(t, d.Cri.StopPodSandbox(t.Context(), pod.Id))
}

// Removing a pod also removes its running containers.
func TestRemovePodWithRunningContainers(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t)
	running, created := pod.Run(t), pod.Create(t)
	_, exited := pod.RunToEnd(t, harness.Command("true"))
	harness.Equal(t, "exit code", exited.ExitCode, 0)
	harness.Must(t, d.Cri.RemovePodSandbox(t.Context(), pod.Id))
	for _, c := range []*harness.Container{running, created} {
		_, err := d.Cri.ContainerStatus(t.Context(), c.Id, false)
		harness.WantCode(t, err, codes.NotFound)
	}
}

func TestPodNamespaces(t *testing.T) {
	d := harness.StartDaemon(t)
	self := os.Getpid()
	pod := d.RunPod(t)
	pause := pod.PausePID(t)
	a, b := pod.Run(t), pod.Run(t)
	for _, kind := range []string{"net", "ipc", "uts"} {
		if machine.Namespace(t, pause, kind) == machine.Namespace(t, self, kind) {
			t.Errorf("the pod is in the node's %s namespace", kind)
		}
		harness.Equal(t, kind+" namespace of the containers", machine.Namespace(t, a.Pid(t), kind), machine.Namespace(t, b.Pid(t), kind))
		harness.Equal(t, kind+" namespace of container and pod", machine.Namespace(t, a.Pid(t), kind), machine.Namespace(t, pause, kind))
	}
	for _, kind := range []string{"pid", "mnt"} {
		if machine.Namespace(t, a.Pid(t), kind) == machine.Namespace(t, b.Pid(t), kind) {
			t.Errorf("containers share the %s namespace", kind)
		}
	}
	harness.Equal(t, "init's pid in the container", a.Exec(t, "cat", "/proc/1/comm"), "sleep")
}

// With a shared PID namespace pause is process 1 and reaps orphans.
func TestPodSharedPIDNamespace(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.SharedPID)
	a, b := pod.Run(t), pod.Run(t)
	harness.Equal(t, "PID namespace of the containers", machine.Namespace(t, a.Pid(t), "pid"), machine.Namespace(t, b.Pid(t), "pid"))
	harness.Equal(t, "PID namespace of the pod", machine.Namespace(t, pod.PausePID(t), "pid"), machine.Namespace(t, a.Pid(t), "pid"))
	harness.Equal(t, "process 1", a.Exec(t, "cat", "/proc/1/comm"), "pause")
	a.Exec(t, "sh", "-c", "(sleep 0.01 &) ; exit 0")
	harness.Eventually(t, "pause reaps the orphan", func() error {
		// Some of these processes exit meanwhile.
		if out := a.Exec(t, "sh", "-c", "cat /proc/[0-9]*/stat 2>/dev/null; true"); strings.Contains(out, ") Z 1 ") {
			return fmt.Errorf("there are zombies: %s", out)
		}
		return nil
	})
	// The exit of one container does not affect the other.
	a.Stop(t, 0)
	harness.Equal(t, "state of the other container", b.Status(t).State, runtimeapi.ContainerState_CONTAINER_RUNNING)
}

func TestPodHostNamespaces(t *testing.T) {
	d := harness.StartDaemon(t)
	self := os.Getpid()
	pod := d.RunPod(t, harness.HostNetwork, harness.HostPID, harness.HostIPC)
	c := pod.Run(t)
	for _, kind := range []string{"net", "pid", "ipc"} {
		harness.Equal(t, kind+" namespace", machine.Namespace(t, c.Pid(t), kind), machine.Namespace(t, self, kind))
	}
	harness.Equal(t, "pod IP", pod.Ip(t), "")
	options := pod.Status(t).Linux.Namespaces.Options
	harness.Equal(t, "modes", fmt.Sprint(options.Network, options.Pid, options.Ipc), "NODE NODE NODE")
	hostname := harness.Get(os.Hostname())(t)
	harness.Equal(t, "hostname", c.Exec(t, "hostname"), hostname)
	harness.Equal(t, "comm of process 1 in /proc", c.Exec(t, "cat", "/proc/1/comm"), strings.Join(machine.ReadLines("/proc/1/comm"), ""))
}

// A debugging container shares the PID namespace of one other container.
func TestTargetPIDNamespace(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t)
	target := pod.Run(t, harness.Command("sleep", "4242"))
	debug := pod.Run(t, harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.NamespaceOptions.Pid = runtimeapi.NamespaceMode_TARGET
		s.NamespaceOptions.TargetId = target.Id
	}))
	harness.Equal(t, "PID namespace", machine.Namespace(t, debug.Pid(t), "pid"), machine.Namespace(t, target.Pid(t), "pid"))
	harness.WantText(t, "process 1", debug.Exec(t, "cat", "/proc/1/cmdline"), "4242")
	debug.Stop(t, 0)
	harness.Equal(t, "state of the target", target.Status(t).State, runtimeapi.ContainerState_CONTAINER_RUNNING)
}

func TestPodSysctls(t *testing.T) {
	d := harness.StartDaemon(t)
	c := d.RunPod(t, harness.Sysctl("net.ipv4.ip_unprivileged_port_start", "80"), harness.Sysctl("net/ipv4/tcp_keepalive_time", "111"), harness.Sysctl("kernel.shm_rmid_forced", "1")).Run(t)
	harness.Equal(t, "values", c.Exec(t, "cat", "/proc/sys/net/ipv4/ip_unprivileged_port_start", "/proc/sys/net/ipv4/tcp_keepalive_time", "/proc/sys/kernel/shm_rmid_forced"), "80\n111\n1")
	if node := machine.ReadLines("/proc/sys/net/ipv4/tcp_keepalive_time")[0]; node == "111" {
		t.Error("the sysctl was set on the node")
	}
}

// A container that writes to the pod's /etc/hosts without limit fills the pod's tmpfs, and not the
// node's disk.
func TestPodFilesAreBounded(t *testing.T) {
	d := harness.StartDaemon(t)
	const limit = 64 << 20
	for name, options := range map[string][]harness.PodOption{"usual": nil, "node's IPC": {harness.HostIPC}} {
		t.Run(name, func(t *testing.T) {
			pod := d.RunPod(t, options...)
			c := pod.Run(t)
			for _, file := range []string{"/etc/hosts", "/etc/hostname", "/etc/resolv.conf"} {
				c.Exec(t, "sh", "-c", "! dd if=/dev/zero bs=1M count=65 2>/dev/null >>"+file)
				size := harness.Get(strconv.ParseInt(c.Exec(t, "stat", "-c", "%s", file), 10, 64))(t)
				if size > limit {
					t.Errorf("%s has %d bytes", file, size)
				}
				c.Exec(t, "sh", "-c", ": >"+file)
			}
			harness.Equal(t, "files after a restart of the daemon", func() string {
				c.Exec(t, "sh", "-c", "printf mine >/etc/hosts")
				d.Restart(t)
				return pod.Sh(t, "cat /etc/hosts")
			}(), "mine")
		})
	}
}

func TestPodSharedMemory(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t)
	a, b := pod.Run(t), pod.Run(t)
	a.Exec(t, "sh", "-c", "echo shared >/dev/shm/file")
	harness.Equal(t, "content in the other container", b.Exec(t, "cat", "/dev/shm/file"), "shared")
	harness.Equal(t, "type and size", a.Exec(t, "sh", "-c", `awk '$2 == "/dev/shm" {print $3}' /proc/mounts; df -k /dev/shm | awk 'END {print $2}'`), "tmpfs\n65536")
	other := d.RunPod(t).Run(t)
	harness.Equal(t, "files in another pod", other.Exec(t, "ls", "/dev/shm"), "")
	if _, err := os.Stat("/dev/shm/file"); err == nil {
		t.Error("the pod's /dev/shm is the node's")
	}
}

func TestPodHostIPCSharedMemory(t *testing.T) {
	d := harness.StartDaemon(t)
	path := filepath.Join("/dev/shm", harness.Machine)
	harness.Must(t, os.WriteFile(path, []byte("host"), 0o600))
	t.Cleanup(func() { harness.Must(t, os.Remove(path)) })
	harness.Equal(t, "content", d.RunPod(t, harness.HostIPC).Run(t).Exec(t, "cat", path), "host")
}

// kubelet decides the hostname. kubelet's /etc/hosts, which it mounts over berth's, has the same
// names.
func TestPodHostnameAndHosts(t *testing.T) {
	d := harness.StartDaemon(t)
	longest := strings.Repeat("n", 54) + ".t.ns.svc."
	for what, test := range map[string]struct{ hostname, names string }{
		"pod name":                           {"web-0", "web-0"},
		"fully qualified":                    {"web-0.shop.default.svc.cluster.local", "web-0.shop.default.svc.cluster.local\tweb-0"},
		"fully qualified, no cluster domain": {"web-0.shop.default.svc.", "web-0.shop.default.svc.\tweb-0"},
		"64 bytes":                           {longest, longest + "\t" + strings.Repeat("n", 54)},
	} {
		t.Run(what, func(t *testing.T) {
			c := d.RunPod(t, func(c *runtimeapi.PodSandboxConfig) { c.Hostname = test.hostname }).Run(t)
			harness.Equal(t, "hostname", c.Exec(t, "hostname"), test.hostname)
			harness.Equal(t, "/etc/hostname", c.Exec(t, "cat", "/etc/hostname"), test.hostname)
			harness.Equal(t, "HOSTNAME", c.Exec(t, "sh", "-c", "echo $HOSTNAME"), test.hostname)
			address := strings.Fields(c.Exec(t, "sh", "-c", "ip -4 -o address show dev eth0"))[3]
			address, _, _ = strings.Cut(address, "/")
			harness.WantText(t, "/etc/hosts", c.Exec(t, "cat", "/etc/hosts")+"\n", address+"\t"+test.names+"\n")
		})
	}
}

func TestPodResolvConf(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, func(c *runtimeapi.PodSandboxConfig) {
		c.DnsConfig = &runtimeapi.DNSConfig{Servers: []string{"10.0.0.10", "fd00::a"}, Searches: []string{"default.svc.cluster.local", "cluster.local"}, Options: []string{"ndots:5"}}
	})
	harness.Equal(t, "resolv.conf", pod.Run(t).Exec(t, "cat", "/etc/resolv.conf"),
		"search default.svc.cluster.local cluster.local\nnameserver 10.0.0.10\nnameserver fd00::a\noptions ndots:5")

	bad := d.RunPod(t, func(c *runtimeapi.PodSandboxConfig) {
		c.DnsConfig = &runtimeapi.DNSConfig{Servers: []string{"10.0.0.2;", "10.0.0.3:53", "10.1", "dns.example"}, Searches: []string{"x.example", "a b"}}
	})
	harness.Equal(t, "resolv.conf of bad words", bad.Run(t).Exec(t, "cat", "/etc/resolv.conf"), "search x.example\nnameserver 10.0.0.2")
	log := string(harness.Get(os.ReadFile(d.LogFile()))(t))
	harness.WantText(t, "log", log, "they are left out", "podName="+bad.Config.Metadata.Name, "10.0.0.3:53", "dns.example", "a b")

	node := harness.Get(os.ReadFile("/etc/resolv.conf"))(t)
	harness.Equal(t, "resolv.conf without DNS config", d.RunPod(t).Run(t).Exec(t, "cat", "/etc/resolv.conf"), strings.TrimSuffix(string(node), "\n"))
}

// The choice between the stub of systemd-resolved and its upstream servers follows the files, also
// of a daemon that started before systemd-resolved.
func TestPodResolvConfFollowsResolved(t *testing.T) {
	d := harness.StartDaemon(t)
	etc := filepath.Join(t.TempDir(), "resolv.conf")
	write := func(path, content string) {
		t.Helper()
		harness.Must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		harness.Must(t, os.WriteFile(path, []byte(content), 0o644))
	}
	write(etc, "nameserver 192.0.2.1\n")
	harness.Must(t, unix.Mount(etc, "/etc/resolv.conf", "", unix.MS_BIND, ""))
	t.Cleanup(func() { harness.Must(t, unix.Unmount("/etc/resolv.conf", unix.MNT_DETACH)) })
	of := func() string { return d.RunPod(t).Run(t).Exec(t, "cat", "/etc/resolv.conf") }
	harness.Equal(t, "without systemd-resolved", of(), "nameserver 192.0.2.1")
	const upstream = "/run/systemd/resolve/resolv.conf"
	t.Cleanup(func() { harness.Must(t, os.RemoveAll("/run/systemd/resolve")) })
	write(upstream, "nameserver 192.0.2.2\n")
	write(etc, "nameserver 127.0.0.53\n")
	harness.Equal(t, "with systemd-resolved", of(), "nameserver 192.0.2.2")
	write(etc, "nameserver 192.0.2.3\n")
	harness.Equal(t, "with another resolver", of(), "nameserver 192.0.2.3")
}

// The cgroups of pause and containers are children of the pod's cgroup.
func TestPodCgroupParent(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t)
	c := pod.Run(t)
	parent := pod.Config.Linux.CgroupParent
	for _, pid := range []int{pod.PausePID(t), c.Pid(t)} {
		for _, controller := range []string{"memory", "pids", "cpu"} {
			if dir := filepath.Dir(machine.CgroupDir(t, pid, controller)); !strings.HasSuffix(dir, parent) {
				t.Errorf("process %d is in a cgroup of %s, want of %s", pid, dir, parent)
			}
		}
	}
}

// berth protects pause from the OOM killer as far as the kernel allows.
func TestPodOOMScore(t *testing.T) {
	d := harness.StartDaemon(t)
	pause := d.RunPod(t).PausePID(t)
	content := harness.Get(os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", pause)))(t)
	score := harness.Get(strconv.Atoi(strings.TrimSpace(string(content))))(t)
	self := harness.Get(os.ReadFile("/proc/self/oom_score_adj"))(t)
	own := harness.Get(strconv.Atoi(strings.TrimSpace(string(self))))(t)
	want := -998
	if !machine.CanLowerOOMScore() {
		want = own // the kernel refused; berth continues and logs this
		harness.WantText(t, "log", d.Tail(), "oom_score_adj")
	}
	harness.Equal(t, "oom_score_adj of pause", score, want)
}

func TestPodSandboxSecurityContext(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.PodSecurity(func(s *runtimeapi.LinuxSandboxSecurityContext) {
		s.RunAsUser = &runtimeapi.Int64Value{Value: 65535}
		s.RunAsGroup = &runtimeapi.Int64Value{Value: 65534}
		s.SupplementalGroups = []int64{1234}
		s.ReadonlyRootfs = true
		s.Seccomp = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault}
	}))
	pause := pod.PausePID(t)
	harness.Equal(t, "uid of pause", strings.Fields(machine.StatusField(t, pause, "Uid"))[0], "65535")
	harness.Equal(t, "gid of pause", strings.Fields(machine.StatusField(t, pause, "Gid"))[0], "65534")
	sameSet(t, "groups of pause and its gid", append(strings.Fields(machine.StatusField(t, pause, "Groups")), "65534"), []string{"1234", "65534"})
	harness.Equal(t, "seccomp mode of pause", machine.StatusField(t, pause, "Seccomp"), "2")
	if caps := machine.StatusField(t, pause, "CapInh"); strings.Trim(caps, "0") != "" {
		t.Errorf("pause has inheritable capabilities: %s", caps)
	}
}

// No signal kills a frozen pause, so berth kills it with its cgroup, in time.
func TestStopPodSandboxWithFrozenPause(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	dir := machine.CgroupDir(t, pod.PausePID(t), "freezer")
	file, frozen := "freezer.state", "FROZEN"
	if machine.Cgroup2() {
		file, frozen = "cgroup.freeze", "1"
	}
	harness.Must(t, os.WriteFile(filepath.Join(dir, file), []byte(frozen), 0))
	pod.Stop(t)
	harness.Equal(t, "state", pod.Status(t).State, runtimeapi.PodSandboxState_SANDBOX_NOTREADY)
}

func TestPauseImage(t *testing.T) {
	img := pauseImage(t)
	d := harness.StartDaemon(t, harness.WithConfig(fmt.Sprintf("image.pause = %q", img)))
	pod := d.RunPod(t)
	harness.Equal(t, "command of pause", strings.Join(machine.ReadLines(fmt.Sprintf("/proc/%d/cmdline", pod.PausePID(t))), ""), "sleep\x0099999\x00")
	if status := d.ImageStatus(t, img); status == nil || !status.Pinned {
		t.Errorf("the pause image is missing or not pinned: %v", status)
	}
	harness.Equal(t, "output", pod.Sh(t, "echo works"), "works\n")
}

func TestListPodSandboxFilters(t *testing.T) {
	d := harness.StartDaemon(t)
	a := d.RunPod(t, harness.HostNetwork, harness.PodLabel("app", "a"), harness.PodLabel("tier", "x"))
	b := d.RunPod(t, harness.HostNetwork, harness.PodLabel("app", "b"), harness.PodLabel("tier", "x"))
	b.Stop(t)
	ready, notReady := runtimeapi.PodSandboxState_SANDBOX_READY, runtimeapi.PodSandboxState_SANDBOX_NOTREADY
	state := func(s runtimeapi.PodSandboxState) *runtimeapi.PodSandboxStateValue {
		return &runtimeapi.PodSandboxStateValue{State: s}
	}
	for _, c := range []struct {
		name   string
		filter *runtimeapi.PodSandboxFilter
		want   []*harness.Pod
	}{
		{"none", nil, []*harness.Pod{a, b}},
		{"id", &runtimeapi.PodSandboxFilter{Id: a.Id}, []*harness.Pod{a}},
		{"id prefix", &runtimeapi.PodSandboxFilter{Id: a.Id[:13]}, []*harness.Pod{a}},
		{"unknown id", &runtimeapi.PodSandboxFilter{Id: "ffffffff"}, nil},
		{"ready", &runtimeapi.PodSandboxFilter{State: state(ready)}, []*harness.Pod{a}},
		{"not ready", &runtimeapi.PodSandboxFilter{State: state(notReady)}, []*harness.Pod{b}},
		{"label", &runtimeapi.PodSandboxFilter{LabelSelector: map[string]string{"tier": "x"}}, []*harness.Pod{a, b}},
		{"two labels", &runtimeapi.PodSandboxFilter{LabelSelector: map[string]string{"tier": "x", "app": "b"}}, []*harness.Pod{b}},
		{"no such label", &runtimeapi.PodSandboxFilter{LabelSelector: map[string]string{"app": "c"}}, nil},
		{"id and other state", &runtimeapi.PodSandboxFilter{Id: a.Id, State: state(notReady)}, nil},
	} {
		got := map[string]bool{}
		for _, item := range harness.Get(d.Cri.ListPodSandbox(t.Context(), c.filter))(t) {
			got[item.Id] = true
		}
		want := map[string]bool{}
		for _, p := range c.want {
			want[p.Id] = true
		}
		if !maps.Equal(got, want) {
			t.Errorf("filter %s: got %v, want %v", c.name, got, want)
		}
	}
}

// A pod whose pause dies is not ready.
func TestPodNotReadyWhenPauseDies(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t)
	process := harness.Get(os.FindProcess(pod.PausePID(t)))(t)
	harness.Must(t, process.Kill())
	harness.EventuallyGot(t, "the pod is not ready", func() (bool, any) {
		state := pod.Status(t).State
		return state == runtimeapi.PodSandboxState_SANDBOX_NOTREADY, state
	})
	_, err := pod.TryCreate(t)
	harness.WantCode(t, err, codes.FailedPrecondition, pod.Id)
}

// interfaceSysctls sets sysctls of a pod's interface, in both notations.
func interfaceSysctls(c *runtimeapi.PodSandboxConfig) {
	harness.Sysctl("net.ipv4.conf.eth0.arp_ignore", "1")(c)
	harness.Sysctl("net/ipv4/conf/eth0/arp_announce", "2")(c)
	harness.Sysctl("kernel.shm_rmid_forced", "1")(c)
}

// wantInterfaceSysctls checks these sysctls in a container of the pod.
func wantInterfaceSysctls(t *testing.T, pod *harness.Pod) {
	t.Helper()
	c := pod.Run(t)
	harness.Equal(t, "values", c.Exec(t, "cat", "/proc/sys/net/ipv4/conf/eth0/arp_ignore", "/proc/sys/net/ipv4/conf/eth0/arp_announce",
		"/proc/sys/kernel/shm_rmid_forced"), "1\n2\n1")
}

// Sysctls of a pod's interface are set when the interface exists, even if the plugin is slow. They
// override values that the plugin sets.
func TestInterfaceSysctlsWithSlowPlugin(t *testing.T) {
	plugin := newFakePlugin(t, "slow", `sleep 1
nsenter --net="$CNI_NETNS" ip link add eth0 type bridge >&2 || exit 1
nsenter --net="$CNI_NETNS" ip link add eth0.1 type bridge >&2 || exit 1
nsenter --net="$CNI_NETNS" sh -c "echo 8 >/proc/sys/net/ipv4/conf/eth0/arp_ignore" || exit 1
`+fakeResult)
	dotted := func(c *runtimeapi.PodSandboxConfig) { // both notations of a name with a dot
		harness.Sysctl("net/ipv4/conf/eth0.1/arp_ignore", "1\n")(c)
		harness.Sysctl("net.ipv4.conf.eth0/1.arp_announce", "2")(c)
		harness.Sysctl("net.ipv4.ip_local_reserved_ports", "")(c)
	}
	d := harness.StartDaemon(t, withBinDir(plugin.dir), harness.WithHandler("crun", harness.Crun(t)),
		harness.WithNetwork(`{"cniVersion": "1.0.0", "name": "slow", "plugins": [{"type": "slow"}]}`))
	tests := []struct {
		name, handler string
		options       []harness.PodOption
	}{
		{"pause's own program", "", nil},
		{"user namespace", "", []harness.PodOption{userNamespace(13 * usernsLength)}},
		{"another runtime", "crun", nil},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			pod := runPodWith(t, d, test.handler, append(test.options, interfaceSysctls)...)
			wantInterfaceSysctls(t, pod)
			pod.Remove(t)
			pod = runPodWith(t, d, test.handler, append(test.options, dotted)...)
			harness.Equal(t, "values of eth0.1", pod.Run(t).Exec(t, "cat", "/proc/sys/net/ipv4/conf/eth0.1/arp_ignore",
				"/proc/sys/net/ipv4/conf/eth0.1/arp_announce"), "1\n2")
			pod.Remove(t)
		})
	}
}

// The built-in network takes about as long as the start of pause.
func TestInterfaceSysctlsWithBuiltInNetwork(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithBuiltInNetwork())
	for i := range 10 {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			pod := d.RunPod(t, interfaceSysctls)
			wantInterfaceSysctls(t, pod)
			pod.Remove(t)
		})
	}
}

// A sysctl of a missing interface is an error with the interface's name, and nothing of the pod is
// left.
func TestSysctlOfAnotherInterface(t *testing.T) {
	d := harness.StartDaemon(t)
	_, err := d.Cri.RunPodSandbox(t.Context(), d.PodConfig(t, harness.Sysctl("net.ipv4.conf.eth7.arp_ignore", "1")), "")
	if err == nil || !strings.Contains(err.Error(), "eth7") {
		t.Errorf("error %v", err)
	}
	harness.Equal(t, "number of pods", len(harness.Get(d.Cri.ListPodSandbox(t.Context(), nil))(t)), 0)
}
