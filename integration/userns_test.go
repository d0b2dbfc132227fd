package integration

import (
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
	"berth/integration/harness"
	"berth/integration/machine"
	"berth/integration/sessions"
	"berth/internal/host"
)

// usernsLength is the number of IDs that kubelet gives a pod.
const usernsLength = 65536

// userNamespace gives the pod a user namespace, as kubelet does for hostUsers: false.
func userNamespace(hostID uint32) harness.PodOption {
	return func(c *runtimeapi.PodSandboxConfig) {
		c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = usernsOptions(hostID)
	}
}

// runMapped runs a pod with a user namespace. Before Linux 6.3 it tests the refusal instead, and
// skips the rest of the test.
func runMapped(t *testing.T, d *harness.Daemon, hostID uint32) *harness.Pod {
	t.Helper()
	facts := harness.Get(host.Detect("/"))(t)
	if facts.KernelMajor > 6 || facts.KernelMajor == 6 && facts.KernelMinor >= 3 {
		return d.RunPod(t, userNamespace(hostID))
	}
	_, err := d.Cri.RunPodSandbox(t.Context(), d.PodConfig(t, userNamespace(hostID)), "")
	harness.WantCode(t, err, codes.FailedPrecondition, "user namespaces", "tmpfs")
	t.Skip("NOT TESTED except for the refusal: user namespaces need Linux 6.3")
	return nil
}

func usernsOptions(hostID uint32) *runtimeapi.UserNamespace {
	return &runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_POD, Uids: idMapping(hostID), Gids: idMapping(hostID)}
}

func idMapping(hostID uint32) []*runtimeapi.IDMapping {
	return []*runtimeapi.IDMapping{{HostId: hostID, ContainerId: 0, Length: usernsLength}}
}

// inUserNamespace sets the fields that kubelet sends with each container of such a pod.
func inUserNamespace(hostID uint32) harness.ContainerOption {
	return harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.NamespaceOptions.UsernsOptions = usernsOptions(hostID)
	})
}

// owner returns the IDs of a file's owner on the host.
func owner(t *testing.T, path string) string {
	t.Helper()
	info := harness.Get(os.Lstat(path))(t)
	st := info.Sys().(*syscall.Stat_t)
	return fmt.Sprintf("%d:%d", st.Uid, st.Gid)
}

func upperDir(d *harness.Daemon, c *harness.Container) string {
	return filepath.Join(d.Root, "rootfs", c.Id, "upper")
}

func TestUserNamespaceIsOffered(t *testing.T) {
	d := harness.StartDaemon(t)
	status := harness.Get(d.Cri.Status(t.Context(), false))(t)
	for _, h := range status.RuntimeHandlers {
		if !h.Features.UserNamespaces {
			t.Errorf("handler %q: %v", h.Name, h.Features)
		}
	}
	harness.Equal(t, "host network", status.Features.UserNamespacesHostNetwork, true)
}

func TestUserNamespace(t *testing.T) {
	const base = 3 * usernsLength
	name, _ := harness.Push(t, harness.Registry, "userns:latest", harness.BuildImage(t, v1.Config{}, fixture.Tree{
		fixture.Dir("owned", 0o750).Owned(1000, 2000), fixture.File("owned/file", 0o640, "x").Owned(1000, 2000),
	}))
	d := harness.StartDaemon(t)
	pod := runMapped(t, d, base)
	c := pod.Run(t, harness.Image(name), inUserNamespace(base))

	harness.Equal(t, "uid_map", strings.Join(strings.Fields(c.Exec(t, "cat", "/proc/self/uid_map")), " "), "0 196608 65536")
	harness.Equal(t, "gid_map", strings.Join(strings.Fields(c.Exec(t, "cat", "/proc/self/gid_map")), " "), "0 196608 65536")
	harness.Equal(t, "uid in the container", c.Exec(t, "id", "-u"), "0")
	harness.Equal(t, "uid on the host", strings.Fields(machine.StatusField(t, c.Pid(t), "Uid"))[0], strconv.Itoa(base))
	harness.Equal(t, "gid on the host", strings.Fields(machine.StatusField(t, c.Pid(t), "Gid"))[0], strconv.Itoa(base))
	for _, kind := range []string{"user", "net", "ipc", "uts"} {
		harness.Equal(t, kind+" namespace", machine.Namespace(t, c.Pid(t), kind), machine.Namespace(t, pod.PausePID(t), kind))
		if machine.Namespace(t, c.Pid(t), kind) == machine.Namespace(t, os.Getpid(), kind) {
			t.Errorf("the container is in the host's %s namespace", kind)
		}
	}
	harness.Equal(t, "CapEff", machine.StatusField(t, c.Pid(t), "CapEff"), machine.StatusField(t, pod.Run(t).Pid(t), "CapEff"))

	testUserNamespaceFiles(t, d, pod, c, base)
	testUserNamespacePod(t, pod, c, base)
}

// testUserNamespaceFiles checks the owners and the content of files in a container whose IDs begin
// at base on the host.
func testUserNamespaceFiles(t *testing.T, d *harness.Daemon, pod *harness.Pod, c *harness.Container, base int) {
	t.Run("files of the image", func(t *testing.T) {
		harness.Equal(t, "owners", c.Exec(t, "stat", "-c", "%u:%g", "/", "/owned", "/owned/file", "/bin/busybox"), "0:0\n1000:2000\n1000:2000\n0:0")
	})
	t.Run("writable layer", func(t *testing.T) {
		c.Exec(t, "sh", "-c", "echo new >/root-file && touch /user-file && chown 7:8 /user-file && echo y >>/owned/file")
		harness.Equal(t, "root's file", owner(t, upperDir(d, c)+"/root-file"), fmt.Sprintf("%d:%d", base, base))
		harness.Equal(t, "user's file", owner(t, upperDir(d, c)+"/user-file"), fmt.Sprintf("%d:%d", base+7, base+8))
		harness.Equal(t, "file copied up", owner(t, upperDir(d, c)+"/owned/file"), fmt.Sprintf("%d:%d", base+1000, base+2000))
		harness.Equal(t, "file copied up, in the container", c.Exec(t, "stat", "-c", "%u:%g", "/owned/file"), "1000:2000")
	})
	t.Run("files of the pod", func(t *testing.T) {
		c.Exec(t, "sh", "-c", "echo '# mine' >>/etc/hosts && test -O /etc/hosts && test -O /etc/resolv.conf && test -O /etc/hostname && test -O /dev/shm")
		harness.Equal(t, "hostname", c.Exec(t, "hostname"), pod.Config.Hostname)
		c.Exec(t, "sh", "-c", "printf shared >/dev/shm/f")
		harness.Equal(t, "shm of another container", pod.Sh(t, "cat /dev/shm/f"), "shared")
	})
	t.Run("filesystems of the kernel", func(t *testing.T) {
		mounts := c.Exec(t, "cat", "/proc/mounts")
		for _, want := range []string{"proc /proc proc ", "sysfs /sys sysfs ro", "mqueue /dev/mqueue mqueue ", "devpts /dev/pts devpts "} {
			if !harness.Contains(mounts, want) {
				t.Errorf("no %q in\n%s", want, mounts)
			}
		}
		c.Exec(t, "sh", "-c", "echo x >/dev/null && head -c 1 /dev/zero && test -e /sys/class/net/eth0 && test -e /sys/fs/cgroup")
	})
}

// testUserNamespacePod checks the pod's network and further containers of the pod.
func testUserNamespacePod(t *testing.T, pod *harness.Pod, c *harness.Container, base int) {
	t.Run("network", func(t *testing.T) {
		harness.Equal(t, "port range", c.Exec(t, "cat", "/proc/sys/net/ipv4/ip_unprivileged_port_start"), "0")
		harness.Equal(t, "ping groups", c.Exec(t, "cat", "/proc/sys/net/ipv4/ping_group_range"), "0\t65535")
		pod.Sh(t, "ping -c 1 -W 5 127.0.0.1")
		serveHTTP(t, pod, "page")
		harness.Equal(t, "page", httpGet(t, "http://"+pod.Ip(t)+"/"), "page\n")
	})
	t.Run("capability over the pod's network", func(t *testing.T) {
		admin := harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.Capabilities = &runtimeapi.Capability{AddCapabilities: []string{"NET_ADMIN"}}
		})
		pod.Sh(t, "ip link set lo mtu 1400 && ip addr add 192.0.2.77/32 dev lo", admin)
	})
	t.Run("another user", func(t *testing.T) {
		other := pod.Run(t, harness.RunAs(1234))
		harness.Equal(t, "uid on the host", strings.Fields(machine.StatusField(t, other.Pid(t), "Uid"))[0], strconv.Itoa(base+1234))
		harness.Equal(t, "uid of an exec", other.Exec(t, "id", "-u"), "1234")
		harness.Equal(t, "output by path", pod.Sh(t, "echo by path >/dev/stdout", harness.RunAs(1234)), "by path\n")
		harness.Equal(t, "status", other.Status(t).User.Linux.Uid, 1234)
	})
	t.Run("terminal", func(t *testing.T) {
		_, status := pod.RunToEnd(t, harness.RunAs(1234), harness.Script("test -t 0 && test -t 1 && echo x >/dev/tty && test -O $(tty)"),
			func(c *runtimeapi.ContainerConfig) { c.Tty = true })
		harness.Equal(t, "exit code", status.ExitCode, 0)
	})
	t.Run("ephemeral container", func(t *testing.T) {
		debug := pod.Run(t, inUserNamespace(uint32(base)), harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.NamespaceOptions.Pid, s.NamespaceOptions.TargetId = runtimeapi.NamespaceMode_TARGET, c.Id
		}))
		harness.Equal(t, "PID namespace", machine.Namespace(t, debug.Pid(t), "pid"), machine.Namespace(t, c.Pid(t), "pid"))
		debug.Exec(t, "sh", "-c", "ls /proc/1/root/ >/dev/null && kill -0 1")
	})
	t.Run("read-only root", func(t *testing.T) {
		ro := harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) { s.ReadonlyRootfs = true })
		pod.Sh(t, "! touch /x 2>/dev/null && touch /dev/shm/y && ! touch /etc/hosts 2>/dev/null", ro)
	})
	t.Run("seccomp", func(t *testing.T) {
		confined := pod.Run(t, harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.Seccomp = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault}
			s.NoNewPrivs = true
		}))
		harness.Equal(t, "mode", machine.StatusField(t, confined.Pid(t), "Seccomp"), "2")
		harness.Equal(t, "NoNewPrivs", machine.StatusField(t, confined.Pid(t), "NoNewPrivs"), "1")
	})
	t.Run("device", func(t *testing.T) {
		pod.Sh(t, "head -c 1 /dev/elsewhere >/dev/null && head -c 1 /dev/urandom >/dev/null", func(c *runtimeapi.ContainerConfig) {
			c.Devices = []*runtimeapi.Device{{HostPath: "/dev/zero", ContainerPath: "/dev/elsewhere", Permissions: "rw"}}
		})
	})
}

// containerd started containers in user namespaces outside the pod's cgroup, so no limit applied.
func TestCVE_2025_47291_UserNamespaceOutsideItsCgroup(t *testing.T) {
	const base = 13 * usernsLength
	d := harness.StartDaemon(t)
	pod := runMapped(t, d, base)
	limit := harness.Resources(func(r *runtimeapi.LinuxContainerResources) { r.MemoryLimitInBytes = 16 << 20 })
	c := pod.Run(t, inUserNamespace(base), limit)
	for _, controller := range []string{"memory", "cpu", "pids"} {
		parent := pod.Config.Linux.CgroupParent + "/"
		for what, pid := range map[string]int{"the container": c.Pid(t), "pause": pod.PausePID(t)} {
			if dir := machine.CgroupDir(t, pid, controller); !harness.Contains(dir+"/", parent) {
				t.Errorf("%s is in %s, and not below %s", what, dir, parent)
			}
		}
	}
	_, status := pod.RunToEnd(t, inUserNamespace(base), limit, harness.Command("tail", "/dev/zero"))
	harness.Equal(t, "reason", status.Reason, "OOMKilled")
}

// Containers of one image share its layers, with different mappings.
func TestUserNamespacesShareImage(t *testing.T) {
	d := harness.StartDaemon(t)
	plain := d.RunPod(t).Run(t)
	one := d.RunPod(t, userNamespace(2*usernsLength)).Run(t)
	two := d.RunPod(t, userNamespace(5*usernsLength)).Run(t)
	for c, base := range map[*harness.Container]int{plain: 0, one: 2 * usernsLength, two: 5 * usernsLength} {
		harness.Equal(t, "owner of the image's files", c.Exec(t, "stat", "-c", "%u:%g", "/bin/busybox"), "0:0")
		c.Exec(t, "touch", "/bin/busybox", "/new")
		harness.Equal(t, "owner of a file copied up", owner(t, upperDir(d, c)+"/bin/busybox"), fmt.Sprintf("%d:%d", base, base))
		harness.Equal(t, "owner of a new file", owner(t, upperDir(d, c)+"/new"), fmt.Sprintf("%d:%d", base, base))
	}
	if machine.Namespace(t, one.Pid(t), "user") == machine.Namespace(t, two.Pid(t), "user") {
		t.Error("two pods share a user namespace")
	}
}

// A volume with mappings has the container's IDs, a volume without mappings has the host's.
func TestVolumesInUserNamespace(t *testing.T) {
	const base = 4 * usernsLength
	d := harness.StartDaemon(t)
	mapped, plain := filepath.Join(d.Dir, "mapped"), filepath.Join(d.Dir, "plain")
	for _, dir := range []string{mapped, plain} {
		harness.Must(t, os.Mkdir(dir, 0o777))
		harness.Must(t, os.Chmod(dir, 0o777))
		harness.Must(t, os.WriteFile(dir+"/roots", []byte("secret"), 0o600))
		harness.Must(t, os.WriteFile(dir+"/users", nil, 0o600))
		harness.Must(t, os.Chown(dir+"/users", 7, 8))
	}
	pod := runMapped(t, d, base)
	c := pod.Run(t, inUserNamespace(base),
		harness.Mount(&runtimeapi.Mount{HostPath: mapped, ContainerPath: "/mapped", SelinuxRelabel: true, UidMappings: idMapping(base), GidMappings: idMapping(base)}),
		harness.Mount(&runtimeapi.Mount{HostPath: plain, ContainerPath: "/plain", SelinuxRelabel: true}),
		harness.Mount(&runtimeapi.Mount{HostPath: mapped, ContainerPath: "/other", Readonly: true, UidMappings: idMapping(base + 100), GidMappings: idMapping(base + 200)}),
		harness.Mount(&runtimeapi.Mount{HostPath: mapped, ContainerPath: "/rro", Readonly: true, RecursiveReadOnly: true, UidMappings: idMapping(base), GidMappings: idMapping(base)}),
		harness.Mount(&runtimeapi.Mount{HostPath: mapped + "/roots", ContainerPath: "/file", UidMappings: idMapping(base), GidMappings: idMapping(base)}))

	harness.Equal(t, "owners with mappings", c.Exec(t, "stat", "-c", "%u:%g", "/mapped/roots", "/mapped/users"), "0:0\n7:8")
	harness.Equal(t, "content", c.Exec(t, "cat", "/mapped/roots"), "secret")
	c.Exec(t, "sh", "-c", "touch /mapped/new && chown 9:9 /mapped/new")
	harness.Equal(t, "owner of a new file with mappings", owner(t, mapped+"/new"), "9:9")

	harness.Equal(t, "owners without mappings", c.Exec(t, "stat", "-c", "%u:%g", "/plain/roots", "/plain/users"), "65534:65534\n65534:65534")
	if _, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"cat", "/plain/roots"}, 0); err == nil {
		t.Error("the container reads a file of the host's root")
	}
	harness.Equal(t, "a mapped file", c.Exec(t, "cat", "/file", "/rro/roots"), "secretsecret")
	c.Exec(t, "sh", "-c", "! touch /rro/new 2>/dev/null && ! touch /other/new 2>/dev/null")
	c.Exec(t, "touch", "/plain/new")
	harness.Equal(t, "owner of a new file without mappings", owner(t, plain+"/new"), fmt.Sprintf("%d:%d", base, base))

	harness.Equal(t, "owners with other mappings", c.Exec(t, "stat", "-c", "%u:%g", "/other/roots", "/other/users"), "100:200\n107:208")

	t.Run("an image", func(t *testing.T) {
		name, id := harness.Push(t, harness.Registry, "uservolume:latest", harness.BuildImage(t, v1.Config{}, fixture.Tree{
			fixture.Dir("dir", 0o700), fixture.File("dir/file", 0o600, "in the image"), fixture.File("users", 0o600, "").Owned(7, 8),
		}))
		d.EnsureImage(t, name)
		out := pod.Sh(t, "cat /whole/dir/file && stat -c ' %u:%g' /whole/users && cat /part/file",
			harness.Mount(&runtimeapi.Mount{ContainerPath: "/whole", Readonly: true, Image: &runtimeapi.ImageSpec{Image: id}}),
			harness.Mount(&runtimeapi.Mount{ContainerPath: "/part", Readonly: true, Image: &runtimeapi.ImageSpec{Image: id}, ImageSubPath: "dir"}))
		harness.Equal(t, "content", out, "in the image 7:8\nin the image")
	})
	t.Run("a filesystem without mappings", func(t *testing.T) {
		_, err := pod.TryCreate(t, inUserNamespace(base),
			harness.Mount(&runtimeapi.Mount{HostPath: "/proc/sys/kernel", ContainerPath: "/k", UidMappings: idMapping(base), GidMappings: idMapping(base)}))
		harness.WantCode(t, err, codes.FailedPrecondition, "/k", "ID-mapped")
	})
	t.Run("without a user namespace", func(t *testing.T) {
		out := d.RunPod(t).Sh(t, "stat -c %u:%g /mapped/users",
			harness.Mount(&runtimeapi.Mount{HostPath: mapped, ContainerPath: "/mapped", SelinuxRelabel: true, UidMappings: idMapping(base), GidMappings: idMapping(base)}))
		harness.Equal(t, "owners", out, fmt.Sprintf("%d:%d\n", base+7, base+8))
	})
}

// Device nodes cannot be created in a user namespace. berth bind-mounts them from the host path in
// the vendor's CDI specification.
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
	d := harness.StartDaemon(t, option)
	pod := runMapped(t, d, base)
	c := pod.Run(t, inUserNamespace(base), harness.Cdi("elsewhere", "taken"))
	harness.Equal(t, "nodes", c.Exec(t, "stat", "-c", "%n %t:%T", "/dev/vendor0", "/dev/fuse"), "/dev/vendor0 1:3\n/dev/fuse 1:3")
	_, err := pod.TryCreate(t, inUserNamespace(base), harness.Cdi("none"))
	harness.WantCode(t, err, codes.FailedPrecondition, "/dev/vendor1", "user namespace")
}

// berth creates pipes and terminals outside the user namespace. A user other than root opens them
// by path.
func TestSessionsInUserNamespace(t *testing.T) {
	const base = 14 * usernsLength
	d := harness.StartDaemon(t)
	pod := runMapped(t, d, base)
	c := pod.Run(t, inUserNamespace(base), harness.RunAs(1234), harness.Script(echoScript), harness.WithStdin(false))
	t.Run("exec", func(t *testing.T) {
		var out sessions.Screen
		o := remotecommand.StreamOptions{Stdin: strings.NewReader("hello"), Stdout: &out}
		code := harness.Get(sessions.Spdy.Stream(t.Context(), sessions.Plain(), c.ExecURL(t, o, "sh", "-c", "id -u && cat >/dev/stdout && exit 3"), o))(t)
		harness.Equal(t, "exit code", code, 3)
		harness.Equal(t, "output", out.String(), "1234\nhello")
	})
	t.Run("exec with a terminal", func(t *testing.T) {
		var out sessions.Screen
		o := remotecommand.StreamOptions{Stdin: strings.NewReader(""), Stdout: &out, Tty: true}
		code := harness.Get(sessions.Spdy.Stream(t.Context(), sessions.Plain(), c.ExecURL(t, o, "sh", "-c", "test -O $(tty) && echo mine >/dev/tty"), o))(t)
		harness.Equal(t, "exit code", code, 0)
		harness.Equal(t, "output", out.String(), "mine\r\n")
	})
	t.Run("attach", func(t *testing.T) {
		a := sessions.Attach(t, c, sessions.Spdy)
		a.Send(t, "bye\n")
		harness.Must(t, <-a.Ended)
		harness.Equal(t, "output", a.Stdout.String(), "you said bye\n")
		harness.Equal(t, "exit code", c.WaitExited(t).ExitCode, 8)
	})
}

// The sysctls of a pod's namespaces belong to its user namespace, so they can be set there.
func TestSysctlsInUserNamespace(t *testing.T) {
	d := harness.StartDaemon(t)
	c := d.RunPod(t, userNamespace(11*usernsLength), harness.SharedPID, harness.Sysctl("net.ipv4.ip_local_port_range", "2000\t3000"),
		harness.Sysctl("net.core.somaxconn", "77"), harness.Sysctl("kernel.shm_rmid_forced", "1"), harness.Sysctl("fs.mqueue.msg_max", "20")).Run(t)
	harness.Equal(t, "values", c.Exec(t, "cat", "/proc/sys/net/ipv4/ip_local_port_range", "/proc/sys/net/core/somaxconn",
		"/proc/sys/kernel/shm_rmid_forced", "/proc/sys/fs/mqueue/msg_max"), "2000\t3000\n77\n1\n20")
	harness.Equal(t, "process 1 of the shared PID namespace", c.Exec(t, "cat", "/proc/1/comm"), "pause")
}

// An image that replaces the embedded pause has its own writable layer.
func TestPauseImageInUserNamespace(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithConfig(fmt.Sprintf("image.pause = %q", pauseImage(t))))
	pod := d.RunPod(t, userNamespace(12*usernsLength))
	harness.Equal(t, "uid of pause on the host", strings.Fields(machine.StatusField(t, pod.PausePID(t), "Uid"))[0], strconv.Itoa(12*usernsLength))
	harness.Equal(t, "output", pod.Sh(t, "echo works"), "works\n")
}

// The test covers KEP-5607.
func TestUserNamespaceOnHostNetwork(t *testing.T) {
	const base = 6 * usernsLength
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork, userNamespace(base))
	c := pod.Run(t, inUserNamespace(base))
	harness.Equal(t, "network namespace", machine.Namespace(t, c.Pid(t), "net"), machine.Namespace(t, os.Getpid(), "net"))
	harness.Equal(t, "UTS namespace", machine.Namespace(t, c.Pid(t), "uts"), machine.Namespace(t, os.Getpid(), "uts"))
	harness.Equal(t, "uid on the host", strings.Fields(machine.StatusField(t, c.Pid(t), "Uid"))[0], strconv.Itoa(base))
	c.Exec(t, "test", "-e", "/sys/class/net/lo")
	for _, denied := range []string{"echo x >/sys/kernel/mm/transparent_hugepage/enabled", "hostname evil", "ip link set lo mtu 1400"} {
		if _, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"sh", "-c", denied}, 0); err == nil {
			t.Errorf("allowed: %s", denied)
		}
	}
}

// The node's mounts below /sys are read-only in such a container, for all modes of their files.
func TestUserNamespaceOnHostNetworkCannotWriteBelowSys(t *testing.T) {
	const base = 6 * usernsLength
	const below, later = "/sys/kernel/mm", "/sys/dev/char" // exists in each kernel
	machine.MountTmpfs(t, below, syscall.MS_SHARED)
	harness.Must(t, os.Chmod(below, 0o777))
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork, userNamespace(base))
	c := pod.Run(t, inUserNamespace(base))
	harness.Equal(t, "the container sees the mount", sees(t, c, below), true)
	_, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"sh", "-c", "echo x >" + below + "/file"}, 0)
	harness.Equal(t, "a file can be created", err == nil, false)
	machine.MountTmpfs(t, later, syscall.MS_SHARED)
	harness.Equal(t, "the container sees a later mount", sees(t, c, later), false)
}

func TestPrivilegedInUserNamespace(t *testing.T) {
	const base = 7 * usernsLength
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, userNamespace(base), harness.PodSecurity(func(s *runtimeapi.LinuxSandboxSecurityContext) { s.Privileged = true }))
	c := pod.Run(t, inUserNamespace(base), harness.Security(harness.Privileged))
	harness.Equal(t, "CapEff", capsOf(t, c, "CapEff"), fmt.Sprintf("%016x", hostCaps(t)))
	c.Exec(t, "sh", "-c", "mkdir -p /tmp/m && mount -t tmpfs tmpfs /tmp/m && hostname renamed")
	for _, denied := range []string{"mknod /tmp/sda b 8 0", "echo 1 >/proc/sys/vm/drop_caches"} {
		if _, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"sh", "-c", denied}, 0); err == nil {
			t.Errorf("allowed: %s", denied)
		}
	}
}

// A pod with its user namespace survives a kill of the daemon. After its removal nothing is left.
func TestUserNamespaceSurvivesKill(t *testing.T) {
	const base = 8 * usernsLength
	d := harness.StartDaemon(t)
	pod := runMapped(t, d, base)
	c, created := pod.Run(t, inUserNamespace(base)), pod.Create(t, inUserNamespace(base))
	ns := machine.Namespace(t, c.Pid(t), "user")
	d.Kill(t)
	d.Start(t)
	harness.Equal(t, "exec", c.Exec(t, "id", "-u"), "0")
	created.Start(t)
	later := pod.Run(t, inUserNamespace(base))
	for _, c := range []*harness.Container{c, created, later} {
		harness.Equal(t, "user namespace", machine.Namespace(t, c.Pid(t), "user"), ns)
	}
	pod.Remove(t)
	for _, pid := range machine.Processes() {
		if link, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/user", pid)); err == nil && link == ns && machine.Alive(pid) { // zombies do not count
			t.Errorf("process %d is in the pod's user namespace: %s", pid, machine.CommandLine(pid))
		}
	}
	if pins := machine.NamespacePins("user:"); len(pins) > 0 {
		t.Errorf("user namespaces are pinned at %v", pins)
	}
}

// If the daemon is killed during the start of a pod, the next daemon undoes the start.
func TestIncompleteUserNamespaceIsRemoved(t *testing.T) {
	plugin := newFakePlugin(t, "slow", `while [ ! -e "`+"$(dirname \"$0\")"+`/go" ]; do sleep 0.02; done; `+fakeResult)
	d := harness.StartDaemon(t, withBinDir(plugin.dir), harness.WithNetwork(`{"cniVersion": "1.0.0", "name": "slow", "plugins": [{"type": "slow"}]}`))
	config := d.PodConfig(t, userNamespace(10*usernsLength))
	first := harness.Go(func() error { _, err := d.Cri.RunPodSandbox(t.Context(), config, ""); return err })
	harness.EventuallyTrue(t, "the plugin is called", func() bool { return len(plugin.calls("ADD")) > 0 })
	if len(machine.NamespacePins("user:")) != 1 {
		t.Error("no user namespace is pinned")
	}
	d.Kill(t)
	if err := <-first; err == nil {
		t.Error("RunPodSandbox succeeded although the daemon was killed")
	}
	plugin.release(t)
	d.Start(t)
	harness.EventuallyGot(t, "the user namespace is removed", func() (bool, any) {
		pins := machine.NamespacePins("user:")
		return len(pins) == 0, pins
	})
	pod := d.RunPodConfig(t, config)
	harness.Equal(t, "state", pod.Status(t).State, runtimeapi.PodSandboxState_SANDBOX_READY)
}

func TestUserNamespaceRefusals(t *testing.T) {
	const base = 9 * usernsLength
	d := harness.StartDaemon(t)
	asks := func(change func(*runtimeapi.UserNamespace)) harness.PodOption {
		return func(c *runtimeapi.PodSandboxConfig) {
			options := usernsOptions(base)
			change(options)
			c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = options
		}
	}
	for name, opts := range map[string][]harness.PodOption{
		"mode TARGET":       {asks(func(u *runtimeapi.UserNamespace) { u.Mode = runtimeapi.NamespaceMode_TARGET })},
		"mode CONTAINER":    {asks(func(u *runtimeapi.UserNamespace) { u.Mode = runtimeapi.NamespaceMode_CONTAINER })},
		"NODE and mappings": {asks(func(u *runtimeapi.UserNamespace) { u.Mode = runtimeapi.NamespaceMode_NODE })},
		"no mapping":        {asks(func(u *runtimeapi.UserNamespace) { u.Gids = nil })},
		"host PID":          {userNamespace(base), harness.HostPID},
		"host IPC":          {userNamespace(base), harness.HostIPC},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := d.Cri.RunPodSandbox(t.Context(), d.PodConfig(t, opts...), "")
			harness.WantCode(t, err, codes.InvalidArgument)
		})
	}
	pod := runMapped(t, d, base)
	for name, opt := range map[string]harness.ContainerOption{
		"another namespace": inUserNamespace(base + usernsLength),
		"the node's": harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.NamespaceOptions.UsernsOptions = &runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_NODE}
		}),
		"a user without mapping": harness.RunAs(usernsLength),
	} {
		t.Run(name, func(t *testing.T) {
			_, err := pod.TryCreate(t, opt)
			harness.WantCode(t, err, codes.InvalidArgument)
		})
	}
	t.Run("container with a user namespace in a pod without", func(t *testing.T) {
		_, err := d.RunPod(t).TryCreate(t, inUserNamespace(base))
		harness.WantCode(t, err, codes.InvalidArgument, "userns_options")
	})
}
