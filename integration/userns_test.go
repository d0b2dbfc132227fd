package integration

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"google.golang.org/grpc/codes"
	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/fixture"
)

// usernsLength is how many IDs kubelet gives a pod.
const usernsLength = 65536

// userNamespace gives the pod one, as kubelet does for hostUsers: false.
func userNamespace(hostID uint32) podOption {
	return func(c *runtimeapi.PodSandboxConfig) {
		c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = usernsOptions(hostID)
	}
}

func usernsOptions(hostID uint32) *runtimeapi.UserNamespace {
	return &runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_POD, Uids: idMapping(hostID), Gids: idMapping(hostID)}
}

func idMapping(hostID uint32) []*runtimeapi.IDMapping {
	return []*runtimeapi.IDMapping{{HostId: hostID, ContainerId: 0, Length: usernsLength}}
}

// inUserNamespace is what kubelet sends with each container of such a pod.
func inUserNamespace(hostID uint32) containerOption {
	return security(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.NamespaceOptions.UsernsOptions = usernsOptions(hostID)
	})
}

// owner returns the IDs that a file has on the host.
func owner(t *testing.T, path string) string {
	t.Helper()
	info, err := os.Lstat(path)
	must(t, err)
	st := info.Sys().(*syscall.Stat_t)
	return fmt.Sprintf("%d:%d", st.Uid, st.Gid)
}

func (d *daemon) upper(c *container) string { return filepath.Join(d.root, "rootfs", c.id, "upper") }

func TestUserNamespaceIsOffered(t *testing.T) {
	d := startDaemon(t)
	status, err := d.cri.Status(t.Context(), false)
	must(t, err)
	for _, h := range status.RuntimeHandlers {
		if !h.Features.UserNamespaces {
			t.Errorf("handler %q: %v", h.Name, h.Features)
		}
	}
	equal(t, "host network", status.Features.UserNamespacesHostNetwork, true)
}

func TestUserNamespace(t *testing.T) {
	const base = 3 * usernsLength
	name, _ := push(t, registry, "userns:latest", buildImage(t, v1.Config{}, fixture.Tree{
		fixture.Dir("owned", 0o750).Owned(1000, 2000), fixture.File("owned/file", 0o640, "x").Owned(1000, 2000),
	}))
	d := startDaemon(t)
	pod := d.runPod(t, userNamespace(base))
	c := pod.run(t, image(name), inUserNamespace(base))

	equal(t, "uid_map", strings.Join(strings.Fields(c.exec(t, "cat", "/proc/self/uid_map")), " "), "0 196608 65536")
	equal(t, "gid_map", strings.Join(strings.Fields(c.exec(t, "cat", "/proc/self/gid_map")), " "), "0 196608 65536")
	equal(t, "uid in the container", c.exec(t, "id", "-u"), "0")
	equal(t, "uid on the host", strings.Fields(statusField(t, c.pid(t), "Uid"))[0], strconv.Itoa(base))
	equal(t, "gid on the host", strings.Fields(statusField(t, c.pid(t), "Gid"))[0], strconv.Itoa(base))
	for _, kind := range []string{"user", "net", "ipc", "uts"} {
		equal(t, kind+" namespace", namespace(t, c.pid(t), kind), namespace(t, pod.pausePID(t), kind))
		if namespace(t, c.pid(t), kind) == namespace(t, os.Getpid(), kind) {
			t.Errorf("the container is in the host's %s namespace", kind)
		}
	}
	equal(t, "CapEff", statusField(t, c.pid(t), "CapEff"), statusField(t, pod.run(t).pid(t), "CapEff"))

	t.Run("files of the image", func(t *testing.T) {
		equal(t, "owners", c.exec(t, "stat", "-c", "%u:%g", "/", "/owned", "/owned/file", "/bin/busybox"), "0:0\n1000:2000\n1000:2000\n0:0")
	})
	t.Run("writable layer", func(t *testing.T) {
		c.exec(t, "sh", "-c", "echo new >/root-file && touch /user-file && chown 7:8 /user-file && echo y >>/owned/file")
		equal(t, "root's file", owner(t, d.upper(c)+"/root-file"), fmt.Sprintf("%d:%d", base, base))
		equal(t, "user's file", owner(t, d.upper(c)+"/user-file"), fmt.Sprintf("%d:%d", base+7, base+8))
		equal(t, "file copied up", owner(t, d.upper(c)+"/owned/file"), fmt.Sprintf("%d:%d", base+1000, base+2000))
		equal(t, "file copied up, in the container", c.exec(t, "stat", "-c", "%u:%g", "/owned/file"), "1000:2000")
	})
	t.Run("files of the pod", func(t *testing.T) {
		c.exec(t, "sh", "-c", "echo '# mine' >>/etc/hosts && test -O /etc/hosts && test -O /etc/resolv.conf && test -O /etc/hostname && test -O /dev/shm")
		equal(t, "hostname", c.exec(t, "hostname"), pod.config.Hostname)
		c.exec(t, "sh", "-c", "printf shared >/dev/shm/f")
		equal(t, "shm of another container", pod.sh(t, "cat /dev/shm/f"), "shared")
	})
	t.Run("filesystems of the kernel", func(t *testing.T) {
		mounts := c.exec(t, "cat", "/proc/mounts")
		for _, want := range []string{"proc /proc proc ", "sysfs /sys sysfs ro", "mqueue /dev/mqueue mqueue ", "devpts /dev/pts devpts "} {
			if !contains(mounts, want) {
				t.Errorf("no %q in\n%s", want, mounts)
			}
		}
		c.exec(t, "sh", "-c", "echo x >/dev/null && head -c 1 /dev/zero && test -e /sys/class/net/eth0 && test -e /sys/fs/cgroup")
	})
	t.Run("network", func(t *testing.T) {
		equal(t, "port range", c.exec(t, "cat", "/proc/sys/net/ipv4/ip_unprivileged_port_start"), "0")
		equal(t, "ping groups", c.exec(t, "cat", "/proc/sys/net/ipv4/ping_group_range"), "0\t65535")
		pod.sh(t, "ping -c 1 -W 5 127.0.0.1")
		serveHTTP(t, pod, "page")
		equal(t, "page", httpGet(t, "http://"+pod.ip(t)+"/"), "page\n")
	})
	t.Run("capability over the pod's network", func(t *testing.T) {
		admin := security(func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.Capabilities = &runtimeapi.Capability{AddCapabilities: []string{"NET_ADMIN"}}
		})
		pod.sh(t, "ip link set lo mtu 1400 && ip addr add 192.0.2.77/32 dev lo", admin)
	})
	t.Run("another user", func(t *testing.T) {
		other := pod.run(t, runAs(1234))
		equal(t, "uid on the host", strings.Fields(statusField(t, other.pid(t), "Uid"))[0], strconv.Itoa(base+1234))
		equal(t, "uid of an exec", other.exec(t, "id", "-u"), "1234")
		equal(t, "output by path", pod.sh(t, "echo by path >/dev/stdout", runAs(1234)), "by path\n")
		equal(t, "status", other.status(t).User.Linux.Uid, 1234)
	})
	t.Run("terminal", func(t *testing.T) {
		_, status := pod.runToEnd(t, runAs(1234), script("test -t 0 && test -t 1 && echo x >/dev/tty && test -O $(tty)"),
			func(c *runtimeapi.ContainerConfig) { c.Tty = true })
		equal(t, "exit code", status.ExitCode, 0)
	})
	t.Run("ephemeral container", func(t *testing.T) {
		debug := pod.run(t, inUserNamespace(base), security(func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.NamespaceOptions.Pid, s.NamespaceOptions.TargetId = runtimeapi.NamespaceMode_TARGET, c.id
		}))
		equal(t, "PID namespace", namespace(t, debug.pid(t), "pid"), namespace(t, c.pid(t), "pid"))
		debug.exec(t, "sh", "-c", "ls /proc/1/root/ >/dev/null && kill -0 1")
	})
	t.Run("read-only root", func(t *testing.T) {
		ro := security(func(s *runtimeapi.LinuxContainerSecurityContext) { s.ReadonlyRootfs = true })
		pod.sh(t, "! touch /x 2>/dev/null && touch /dev/shm/y && ! touch /etc/hosts 2>/dev/null", ro)
	})
	t.Run("seccomp", func(t *testing.T) {
		confined := pod.run(t, security(func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.Seccomp = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault}
			s.NoNewPrivs = true
		}))
		equal(t, "mode", statusField(t, confined.pid(t), "Seccomp"), "2")
		equal(t, "NoNewPrivs", statusField(t, confined.pid(t), "NoNewPrivs"), "1")
	})
	t.Run("device", func(t *testing.T) {
		pod.sh(t, "head -c 1 /dev/elsewhere >/dev/null && head -c 1 /dev/urandom >/dev/null", func(c *runtimeapi.ContainerConfig) {
			c.Devices = []*runtimeapi.Device{{HostPath: "/dev/zero", ContainerPath: "/dev/elsewhere", Permissions: "rw"}}
		})
	})
}

// containerd started containers in user namespaces outside the pod's cgroup: no limit held.
func TestCVE_2025_47291_UserNamespaceOutsideItsCgroup(t *testing.T) {
	const base = 13 * usernsLength
	d := startDaemon(t)
	pod := d.runPod(t, userNamespace(base))
	limit := resources(func(r *runtimeapi.LinuxContainerResources) { r.MemoryLimitInBytes = 16 << 20 })
	c := pod.run(t, inUserNamespace(base), limit)
	for _, controller := range []string{"memory", "cpu", "pids"} {
		parent := pod.config.Linux.CgroupParent + "/"
		for what, pid := range map[string]int{"the container": c.pid(t), "pause": pod.pausePID(t)} {
			if dir := cgroupDir(t, pid, controller); !contains(dir+"/", parent) {
				t.Errorf("%s is in %s, and not below %s", what, dir, parent)
			}
		}
	}
	_, status := pod.runToEnd(t, inUserNamespace(base), limit, command("tail", "/dev/zero"))
	equal(t, "reason", status.Reason, "OOMKilled")
}

// Containers of one image, whose layers are on disk once, run with different mappings.
func TestUserNamespacesOfOneImage(t *testing.T) {
	d := startDaemon(t)
	plain := d.runPod(t).run(t)
	one := d.runPod(t, userNamespace(2*usernsLength)).run(t)
	two := d.runPod(t, userNamespace(5*usernsLength)).run(t)
	for c, base := range map[*container]int{plain: 0, one: 2 * usernsLength, two: 5 * usernsLength} {
		equal(t, "owner of the image's files", c.exec(t, "stat", "-c", "%u:%g", "/bin/busybox"), "0:0")
		c.exec(t, "touch", "/bin/busybox", "/new")
		equal(t, "owner of a file copied up", owner(t, d.upper(c)+"/bin/busybox"), fmt.Sprintf("%d:%d", base, base))
		equal(t, "owner of a new file", owner(t, d.upper(c)+"/new"), fmt.Sprintf("%d:%d", base, base))
	}
	if namespace(t, one.pid(t), "user") == namespace(t, two.pid(t), "user") {
		t.Error("two pods share a user namespace")
	}
}

// A volume with mappings holds the IDs that the container sees; one without, those of the host.
func TestVolumesInUserNamespace(t *testing.T) {
	const base = 4 * usernsLength
	d := startDaemon(t)
	mapped, plain := filepath.Join(d.dir, "mapped"), filepath.Join(d.dir, "plain")
	for _, dir := range []string{mapped, plain} {
		must(t, os.Mkdir(dir, 0o777))
		must(t, os.Chmod(dir, 0o777))
		must(t, os.WriteFile(dir+"/roots", []byte("secret"), 0o600))
		must(t, os.WriteFile(dir+"/users", nil, 0o600))
		must(t, os.Chown(dir+"/users", 7, 8))
	}
	pod := d.runPod(t, userNamespace(base))
	c := pod.run(t, inUserNamespace(base),
		mount(&runtimeapi.Mount{HostPath: mapped, ContainerPath: "/mapped", UidMappings: idMapping(base), GidMappings: idMapping(base)}),
		mount(&runtimeapi.Mount{HostPath: plain, ContainerPath: "/plain"}),
		mount(&runtimeapi.Mount{HostPath: mapped, ContainerPath: "/other", Readonly: true, UidMappings: idMapping(base + 100), GidMappings: idMapping(base + 200)}),
		mount(&runtimeapi.Mount{HostPath: mapped, ContainerPath: "/rro", Readonly: true, RecursiveReadOnly: true, UidMappings: idMapping(base), GidMappings: idMapping(base)}),
		mount(&runtimeapi.Mount{HostPath: mapped + "/roots", ContainerPath: "/file", UidMappings: idMapping(base), GidMappings: idMapping(base)}))

	equal(t, "owners with mappings", c.exec(t, "stat", "-c", "%u:%g", "/mapped/roots", "/mapped/users"), "0:0\n7:8")
	equal(t, "content", c.exec(t, "cat", "/mapped/roots"), "secret")
	c.exec(t, "sh", "-c", "touch /mapped/new && chown 9:9 /mapped/new")
	equal(t, "owner of a new file with mappings", owner(t, mapped+"/new"), "9:9")

	equal(t, "owners without", c.exec(t, "stat", "-c", "%u:%g", "/plain/roots", "/plain/users"), "65534:65534\n65534:65534")
	if _, _, err := d.cri.ExecSync(t.Context(), c.id, []string{"cat", "/plain/roots"}, 0); err == nil {
		t.Error("the container reads a file of the host's root")
	}
	equal(t, "a mapped file", c.exec(t, "cat", "/file", "/rro/roots"), "secretsecret")
	c.exec(t, "sh", "-c", "! touch /rro/new 2>/dev/null && ! touch /other/new 2>/dev/null")
	c.exec(t, "touch", "/plain/new")
	equal(t, "owner of a new file without", owner(t, plain+"/new"), fmt.Sprintf("%d:%d", base, base))

	equal(t, "owners with mappings of its own", c.exec(t, "stat", "-c", "%u:%g", "/other/roots", "/other/users"), "100:200\n107:208")

	t.Run("an image", func(t *testing.T) {
		name, id := push(t, registry, "uservolume:latest", buildImage(t, v1.Config{}, fixture.Tree{
			fixture.Dir("dir", 0o700), fixture.File("dir/file", 0o600, "in the image"), fixture.File("users", 0o600, "").Owned(7, 8),
		}))
		d.ensureImage(t, name)
		out := pod.sh(t, "cat /whole/dir/file && stat -c ' %u:%g' /whole/users && cat /part/file",
			mount(&runtimeapi.Mount{ContainerPath: "/whole", Readonly: true, Image: &runtimeapi.ImageSpec{Image: id}}),
			mount(&runtimeapi.Mount{ContainerPath: "/part", Readonly: true, Image: &runtimeapi.ImageSpec{Image: id}, ImageSubPath: "dir"}))
		equal(t, "content", out, "in the image 7:8\nin the image")
	})
	t.Run("a filesystem without mappings", func(t *testing.T) {
		_, err := pod.tryCreate(t, inUserNamespace(base),
			mount(&runtimeapi.Mount{HostPath: "/proc/sys/kernel", ContainerPath: "/k", UidMappings: idMapping(base), GidMappings: idMapping(base)}))
		wantCode(t, err, codes.FailedPrecondition, "/k", "ID-mapped")
	})
	t.Run("without a user namespace", func(t *testing.T) {
		out := d.runPod(t).sh(t, "stat -c %u:%g /mapped/users",
			mount(&runtimeapi.Mount{HostPath: mapped, ContainerPath: "/mapped", UidMappings: idMapping(base), GidMappings: idMapping(base)}))
		equal(t, "owners", out, fmt.Sprintf("%d:%d\n", base+7, base+8))
	})
}

// Nobody makes device nodes in a user namespace: they are bound, from where the vendor says that they are.
func TestCDIInUserNamespace(t *testing.T) {
	const base = 5 * usernsLength
	dir, option := cdiDir(t)
	devices := hostDevices(t)
	writeCDI(t, filepath.Join(dir, "vendor.json"), map[string]any{
		"elsewhere": map[string]any{"deviceNodes": []any{map[string]any{"path": "/dev/vendor0", "hostPath": devices + "/null"}}},
		// The host has another device at that path.
		"taken": map[string]any{"deviceNodes": []any{map[string]any{"path": "/dev/fuse", "hostPath": devices + "/null"}}},
		"none":  map[string]any{"deviceNodes": []any{map[string]any{"path": "/dev/vendor1", "type": "b", "major": 4000, "minor": 1}}},
	})
	d := startDaemon(t, option)
	pod := d.runPod(t, userNamespace(base))
	c := pod.run(t, inUserNamespace(base), cdi("elsewhere", "taken"))
	equal(t, "nodes", c.exec(t, "stat", "-c", "%n %t:%T", "/dev/vendor0", "/dev/fuse"), "/dev/vendor0 1:3\n/dev/fuse 1:3")
	_, err := pod.tryCreate(t, inUserNamespace(base), cdi("none"))
	wantCode(t, err, codes.FailedPrecondition, "/dev/vendor1", "user namespace")
}

// Pipes and terminals are made outside of the namespace, and a user in it who is not root opens them by path.
func TestSessionsInUserNamespace(t *testing.T) {
	const base = 14 * usernsLength
	d := startDaemon(t)
	pod := d.runPod(t, userNamespace(base))
	c := pod.run(t, inUserNamespace(base), runAs(1234), script(echoScript), withStdin(false))
	t.Run("exec", func(t *testing.T) {
		var out screen
		o := remotecommand.StreamOptions{Stdin: strings.NewReader("hello"), Stdout: &out}
		code, err := spdy.stream(t.Context(), plain(), c.execURL(t, o, "sh", "-c", "id -u && cat >/dev/stdout && exit 3"), o)
		must(t, err)
		equal(t, "exit code", code, 3)
		equal(t, "output", out.String(), "1234\nhello")
	})
	t.Run("exec with a terminal", func(t *testing.T) {
		var out screen
		o := remotecommand.StreamOptions{Stdin: strings.NewReader(""), Stdout: &out, Tty: true}
		code, err := spdy.stream(t.Context(), plain(), c.execURL(t, o, "sh", "-c", "test -O $(tty) && echo mine >/dev/tty"), o)
		must(t, err)
		equal(t, "exit code", code, 0)
		equal(t, "output", out.String(), "mine\r\n")
	})
	t.Run("attach", func(t *testing.T) {
		a := c.attach(t, spdy)
		a.send(t, "bye\n")
		must(t, <-a.ended)
		equal(t, "output", a.stdout.String(), "you said bye\n")
		equal(t, "exit code", c.waitExited(t).ExitCode, 8)
	})
}

// The sysctls of a pod's namespaces belong to it, and so can be set in its user namespace.
func TestSysctlsInUserNamespace(t *testing.T) {
	d := startDaemon(t)
	c := d.runPod(t, userNamespace(11*usernsLength), sharedPID, sysctl("net.ipv4.ip_local_port_range", "2000\t3000"),
		sysctl("net.core.somaxconn", "77"), sysctl("kernel.shm_rmid_forced", "1"), sysctl("fs.mqueue.msg_max", "20")).run(t)
	equal(t, "values", c.exec(t, "cat", "/proc/sys/net/ipv4/ip_local_port_range", "/proc/sys/net/core/somaxconn",
		"/proc/sys/kernel/shm_rmid_forced", "/proc/sys/fs/mqueue/msg_max"), "2000\t3000\n77\n1\n20")
	equal(t, "process 1 of the shared PID namespace", c.exec(t, "cat", "/proc/1/comm"), "pause")
}

// An image instead of the embedded pause has a writable layer of its own.
func TestPauseImageInUserNamespace(t *testing.T) {
	d := startDaemon(t, withConfig(fmt.Sprintf("pause_image = %q", pauseImage(t))))
	pod := d.runPod(t, userNamespace(12*usernsLength))
	equal(t, "uid of pause on the host", strings.Fields(statusField(t, pod.pausePID(t), "Uid"))[0], strconv.Itoa(12*usernsLength))
	equal(t, "output", pod.sh(t, "echo works"), "works\n")
}

// KEP-5607.
func TestUserNamespaceOnHostNetwork(t *testing.T) {
	const base = 6 * usernsLength
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork, userNamespace(base))
	c := pod.run(t, inUserNamespace(base))
	equal(t, "network namespace", namespace(t, c.pid(t), "net"), namespace(t, os.Getpid(), "net"))
	equal(t, "UTS namespace", namespace(t, c.pid(t), "uts"), namespace(t, os.Getpid(), "uts"))
	equal(t, "uid on the host", strings.Fields(statusField(t, c.pid(t), "Uid"))[0], strconv.Itoa(base))
	c.exec(t, "test", "-e", "/sys/class/net/lo")
	for _, denied := range []string{"echo x >/sys/kernel/mm/transparent_hugepage/enabled", "hostname evil", "ip link set lo mtu 1400"} {
		if _, _, err := d.cri.ExecSync(t.Context(), c.id, []string{"sh", "-c", denied}, 0); err == nil {
			t.Errorf("allowed: %s", denied)
		}
	}
}

func TestPrivilegedInUserNamespace(t *testing.T) {
	const base = 7 * usernsLength
	d := startDaemon(t)
	pod := d.runPod(t, userNamespace(base), podSecurity(func(s *runtimeapi.LinuxSandboxSecurityContext) { s.Privileged = true }))
	c := pod.run(t, inUserNamespace(base), security(privileged))
	equal(t, "CapEff", c.caps(t, "CapEff"), fmt.Sprintf("%016x", hostCaps(t)))
	c.exec(t, "sh", "-c", "mkdir -p /tmp/m && mount -t tmpfs tmpfs /tmp/m && hostname renamed")
	for _, denied := range []string{"mknod /tmp/sda b 8 0", "echo 1 >/proc/sys/vm/drop_caches"} {
		if _, _, err := d.cri.ExecSync(t.Context(), c.id, []string{"sh", "-c", denied}, 0); err == nil {
			t.Errorf("allowed: %s", denied)
		}
	}
}

// A pod with its user namespace outlives the daemon, and its end leaves nothing.
func TestUserNamespaceSurvivesKill(t *testing.T) {
	const base = 8 * usernsLength
	d := startDaemon(t)
	pod := d.runPod(t, userNamespace(base))
	c, created := pod.run(t, inUserNamespace(base)), pod.create(t, inUserNamespace(base))
	ns := namespace(t, c.pid(t), "user")
	d.kill(t)
	d.start(t)
	equal(t, "exec", c.exec(t, "id", "-u"), "0")
	created.start(t)
	later := pod.run(t, inUserNamespace(base))
	for _, c := range []*container{c, created, later} {
		equal(t, "user namespace", namespace(t, c.pid(t), "user"), ns)
	}
	pod.remove(t)
	for _, pid := range processes() {
		if link, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/user", pid)); err == nil && link == ns {
			t.Errorf("process %d is in the pod's user namespace: %s", pid, commandLine(pid))
		}
	}
	if pins := namespacePins("user:"); len(pins) > 0 {
		t.Errorf("user namespaces are pinned at %v", pins)
	}
}

// The daemon is killed while it makes a pod: the next one undoes it.
func TestHalfMadeUserNamespaceIsUndone(t *testing.T) {
	plugin := newFakePlugin(t, "slow", `while [ ! -e "`+"$(dirname \"$0\")"+`/go" ]; do sleep 0.02; done; `+fakeResult)
	d := startDaemon(t, withBinDir(plugin.dir), withNetwork(`{"cniVersion": "1.0.0", "name": "slow", "plugins": [{"type": "slow"}]}`))
	config := d.podConfig(t, userNamespace(10*usernsLength))
	first := make(chan error, 1)
	go func() {
		_, err := d.cri.RunPodSandbox(t.Context(), config, "")
		first <- err
	}()
	eventually(t, "the plugin is called", func() error {
		if len(plugin.calls("ADD")) == 0 {
			return errors.New("not yet")
		}
		return nil
	})
	if len(namespacePins("user:")) != 1 {
		t.Error("no user namespace is pinned")
	}
	d.kill(t)
	if err := <-first; err == nil {
		t.Error("the pod was run by a dead daemon")
	}
	plugin.release(t)
	d.start(t)
	eventually(t, "the user namespace is gone", func() error {
		if pins := namespacePins("user:"); len(pins) > 0 {
			return fmt.Errorf("pinned at %v", pins)
		}
		return nil
	})
	pod := d.runPodConfig(t, config)
	equal(t, "state", pod.status(t).State, runtimeapi.PodSandboxState_SANDBOX_READY)
}

func TestUserNamespaceRefusals(t *testing.T) {
	const base = 9 * usernsLength
	d := startDaemon(t)
	asks := func(change func(*runtimeapi.UserNamespace)) podOption {
		return func(c *runtimeapi.PodSandboxConfig) {
			options := usernsOptions(base)
			change(options)
			c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = options
		}
	}
	for name, opts := range map[string][]podOption{
		"mode TARGET":       {asks(func(u *runtimeapi.UserNamespace) { u.Mode = runtimeapi.NamespaceMode_TARGET })},
		"mode CONTAINER":    {asks(func(u *runtimeapi.UserNamespace) { u.Mode = runtimeapi.NamespaceMode_CONTAINER })},
		"NODE and mappings": {asks(func(u *runtimeapi.UserNamespace) { u.Mode = runtimeapi.NamespaceMode_NODE })},
		"no mapping":        {asks(func(u *runtimeapi.UserNamespace) { u.Gids = nil })},
		"host PID":          {userNamespace(base), hostPID},
		"host IPC":          {userNamespace(base), hostIPC},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := d.cri.RunPodSandbox(t.Context(), d.podConfig(t, opts...), "")
			wantCode(t, err, codes.InvalidArgument)
		})
	}
	pod := d.runPod(t, userNamespace(base))
	for name, opt := range map[string]containerOption{
		"another namespace": inUserNamespace(base + usernsLength),
		"the node's": security(func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.NamespaceOptions.UsernsOptions = &runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_NODE}
		}),
		"a user without mapping": runAs(usernsLength),
	} {
		t.Run(name, func(t *testing.T) {
			_, err := pod.tryCreate(t, opt)
			wantCode(t, err, codes.InvalidArgument)
		})
	}
	t.Run("one in a pod without", func(t *testing.T) {
		_, err := d.runPod(t).tryCreate(t, inUserNamespace(base))
		wantCode(t, err, codes.InvalidArgument, "userns_options")
	})
}

// namespacePins returns where namespaces of a kind ("user:") are kept by bind mounts.
func namespacePins(kind string) []string {
	var pins []string
	for _, line := range readLines("/proc/self/mountinfo") {
		if fields := strings.Fields(line); strings.HasPrefix(fields[3], kind) {
			pins = append(pins, fields[4])
		}
	}
	return pins
}
