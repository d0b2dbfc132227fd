package integration

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/machine"
)

func TestContainerLifecycle(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t)
	c := pod.Create(t, harness.ContainerNamed("main"), func(c *runtimeapi.ContainerConfig) {
		c.Labels["role"] = "main"
		c.Annotations["note.example/bytes"] = "\x01ü\n"
	})
	status := c.Status(t)
	harness.Equal(t, "state", status.State, runtimeapi.ContainerState_CONTAINER_CREATED)
	if status.CreatedAt == 0 || status.StartedAt != 0 || status.FinishedAt != 0 {
		t.Errorf("times of a created container: %d %d %d", status.CreatedAt, status.StartedAt, status.FinishedAt)
	}
	if !maps.Equal(status.Labels, c.Config.Labels) || !maps.Equal(status.Annotations, c.Config.Annotations) {
		t.Errorf("labels or annotations changed: %v %v", status.Labels, status.Annotations)
	}
	harness.Equal(t, "metadata", status.Metadata.String(), c.Config.Metadata.String())
	harness.Equal(t, "image", status.Image.Image, harness.BaseImage)
	harness.Equal(t, "log path", status.LogPath, c.LogPath())

	c.Start(t)
	status = c.Status(t)
	harness.Equal(t, "state after start", status.State, runtimeapi.ContainerState_CONTAINER_RUNNING)
	if status.StartedAt < status.CreatedAt {
		t.Errorf("started_at %d is before created_at %d", status.StartedAt, status.CreatedAt)
	}
	c.Stop(t, 0)
	c.Stop(t, 0) // idempotent
	status = c.Status(t)
	harness.Equal(t, "state after stop", status.State, runtimeapi.ContainerState_CONTAINER_EXITED)
	harness.Equal(t, "exit code", status.ExitCode, 137)
	if status.FinishedAt < status.StartedAt {
		t.Errorf("finished_at %d is before started_at %d", status.FinishedAt, status.StartedAt)
	}
	harness.WantCode(t, d.Cri.StartContainer(t.Context(), c.Id), codes.FailedPrecondition, c.Id)
	for range 2 {
		harness.Must(t, d.Cri.RemoveContainer(t.Context(), c.Id))
	}
	_, err := d.Cri.ContainerStatus(t.Context(), c.Id, false)
	harness.WantCode(t, err, codes.NotFound, c.Id)
}

func TestContainerExit(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	for _, c := range []struct {
		script string
		code   int32
		reason string
	}{
		{"exit 0", 0, "Completed"},
		{"exit 7", 7, "Error"},
		{"kill -SEGV $$", 139, "Error"},
		{"kill -KILL $$", 137, "Error"},
	} {
		t.Run(c.script, func(t *testing.T) {
			// The namespace's init cannot be killed by its own children, so a child shell kills
			// itself.
			_, status := pod.RunToEnd(t, harness.Script("sh -c '"+c.script+"'; exit $?"))
			harness.Equal(t, "exit code", status.ExitCode, c.code)
			harness.Equal(t, "reason", status.Reason, c.reason)
		})
	}
	t.Run("killed from outside", func(t *testing.T) {
		c := pod.Run(t)
		harness.Must(t, syscall.Kill(c.Pid(t), syscall.SIGKILL))
		status := c.WaitExited(t)
		harness.Equal(t, "exit code", status.ExitCode, 137)
		harness.Equal(t, "reason", status.Reason, "Error")
	})
}

func TestContainerOOMKilled(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	limit := harness.Resources(func(r *runtimeapi.LinuxContainerResources) { r.MemoryLimitInBytes = 16 << 20 })
	const hog = "tail /dev/zero"
	t.Run("init", func(t *testing.T) {
		_, status := pod.RunToEnd(t, limit, harness.Command("tail", "/dev/zero"))
		harness.Equal(t, "exit code", status.ExitCode, 137)
		harness.Equal(t, "reason", status.Reason, "OOMKilled")
	})
	t.Run("child", func(t *testing.T) {
		_, status := pod.RunToEnd(t, limit, harness.Script(hog+"; exit 3"))
		harness.Equal(t, "reason", status.Reason, "OOMKilled")
	})
}

// Command, arguments, environment and directory of the config override the image's.
func TestContainerProcessMergedWithImage(t *testing.T) {
	name, _ := harness.Push(t, harness.Registry, "process:latest", harness.BuildImage(t, v1.Config{
		Entrypoint: []string{"sh", "-c", `echo "$0 $@ A=$A B=$B $(pwd)"`, "zero"}, Cmd: []string{"image-arg"},
		Env: []string{"PATH=/bin", "A=image", "B=image"}, WorkingDir: "/www",
	}))
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	for _, c := range []struct {
		name string
		opt  harness.ContainerOption
		want string
	}{
		{"image", harness.ImageDefaults, "zero image-arg A=image B=image /www\n"},
		{"args", func(c *runtimeapi.ContainerConfig) { c.Command, c.Args = nil, []string{"x", "y"} }, "zero x y A=image B=image /www\n"},
		{"command", harness.Command("echo", "own"), "own\n"},
		{"command and args", func(c *runtimeapi.ContainerConfig) { c.Command, c.Args = []string{"echo"}, []string{"both"} }, "both\n"},
		{"env", func(c *runtimeapi.ContainerConfig) { harness.ImageDefaults(c); harness.Env("B", "config")(c) }, "zero image-arg A=image B=config /www\n"},
		{"directory", func(c *runtimeapi.ContainerConfig) { harness.ImageDefaults(c); c.WorkingDir = "/tmp/new/dir" }, "zero image-arg A=image B=image /tmp/new/dir\n"},
		{"values", func(c *runtimeapi.ContainerConfig) {
			harness.Script(`printf %s "$A"`)(c)
			harness.Env("A", "a\nb  c=d'\"")(c)
		}, "a\nb  c=d'\"\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			container, _ := pod.RunToEnd(t, harness.Image(name), c.opt)
			harness.Equal(t, "output", strings.TrimSuffix(container.Output(t), "\n")+"\n", c.want)
		})
	}
}

func TestContainerUsers(t *testing.T) {
	byName, _ := harness.Push(t, harness.Registry, "user:name", harness.BuildImage(t, v1.Config{User: "web"}))
	byID, _ := harness.Push(t, harness.Registry, "user:ids", harness.BuildImage(t, v1.Config{User: "1001:2001"}))
	unlisted, _ := harness.Push(t, harness.Registry, "user:unlisted", harness.BuildImage(t, v1.Config{User: "4321"}))
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	type context = runtimeapi.LinuxContainerSecurityContext
	for _, c := range []struct {
		name, image string
		change      func(*context)
		want        string // uid gid groups
	}{
		{"root", harness.BaseImage, func(*context) {}, "0 0 0 2002"},
		{"image's name", byName, func(*context) {}, "1001 1001 1001 2001 2002"},
		{"image's numbers", byID, func(*context) {}, "1001 2001 2001 2002"},
		{"image's unlisted number", unlisted, func(*context) {}, "4321 0 0"},
		{"user", harness.BaseImage, func(s *context) { s.RunAsUser = &runtimeapi.Int64Value{Value: 1001} }, "1001 1001 1001 2001 2002"},
		{"user and group", harness.BaseImage, func(s *context) {
			s.RunAsUser, s.RunAsGroup = &runtimeapi.Int64Value{Value: 1001}, &runtimeapi.Int64Value{Value: 7}
		}, "1001 7 7 2001 2002"},
		{"username", harness.BaseImage, func(s *context) { s.RunAsUsername = "web" }, "1001 1001 1001 2001 2002"},
		{"supplemental groups", harness.BaseImage, func(s *context) {
			s.RunAsUser, s.SupplementalGroups = &runtimeapi.Int64Value{Value: 1001}, []int64{5000}
		}, "1001 1001 1001 2001 2002 5000"},
		{"strict groups", harness.BaseImage, func(s *context) {
			s.RunAsUser, s.SupplementalGroups = &runtimeapi.Int64Value{Value: 1001}, []int64{5000}
			s.SupplementalGroupsPolicy = runtimeapi.SupplementalGroupsPolicy_Strict
		}, "1001 1001 1001 5000"},
	} {
		t.Run(c.name, func(t *testing.T) {
			running := pod.Run(t, harness.Image(c.image), harness.Security(c.change))
			pid := running.Pid(t)
			ids := map[int64]bool{}
			status := running.Status(t).User.GetLinux()
			for _, g := range append(status.GetSupplementalGroups(), status.GetGid()) {
				ids[g] = true
			}
			want := strings.Fields(c.want)
			harness.Equal(t, "uid", strings.Fields(machine.StatusField(t, pid, "Uid"))[0], want[0])
			harness.Equal(t, "gid", strings.Fields(machine.StatusField(t, pid, "Gid"))[0], want[1])
			sameSet(t, "groups of the process and its gid", append(strings.Fields(machine.StatusField(t, pid, "Groups")), want[1]), want[1:])
			harness.Equal(t, "reported uid and gid", fmt.Sprint(status.GetUid(), status.GetGid()), want[0]+" "+want[1])
			var reported []string
			for g := range ids {
				reported = append(reported, fmt.Sprint(g))
			}
			sameSet(t, "reported groups and gid", reported, want[1:])
			running.Stop(t, 0)
		})
	}
}

func sameSet(t *testing.T, what string, got, want []string) {
	t.Helper()
	set := func(list []string) map[string]bool {
		m := map[string]bool{}
		for _, s := range list {
			m[s] = true
		}
		return m
	}
	if !maps.Equal(set(got), set(want)) {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}

func TestContainerMounts(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	host := t.TempDir()
	harness.Must(t, os.WriteFile(filepath.Join(host, "file"), []byte("from the host\n"), 0o644))
	harness.Must(t, os.Mkdir(filepath.Join(host, "sub"), 0o755))
	writable := &runtimeapi.Mount{ContainerPath: "/data/deep", HostPath: host}
	readonly := &runtimeapi.Mount{ContainerPath: "/readonly", HostPath: host, Readonly: true}
	file := &runtimeapi.Mount{ContainerPath: "/etc/one-file", HostPath: filepath.Join(host, "file")}
	nested := &runtimeapi.Mount{ContainerPath: "/data/deep/sub/nested", HostPath: host}
	c := pod.Run(t, harness.Mount(nested), harness.Mount(writable), harness.Mount(readonly), harness.Mount(file)) // the nested mount comes first
	c.Exec(t, "sh", "-c", "echo written >/data/deep/new")
	harness.Equal(t, "content on the host", strings.Join(machine.ReadLines(filepath.Join(host, "new")), ""), "written")
	harness.Equal(t, "content of the file", c.Exec(t, "cat", "/etc/one-file"), "from the host")
	harness.Equal(t, "content through the nested mount", c.Exec(t, "cat", "/data/deep/sub/nested/file"), "from the host")
	_, stderr, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"touch", "/readonly/x"}, 0)
	if harness.ExitCode(err) != 1 || !strings.Contains(string(stderr), "Read-only") {
		t.Errorf("write to a read-only mount: %v, %s", err, stderr)
	}
	mounts := c.Status(t).Mounts
	harness.Equal(t, "number of reported mounts", len(mounts), 4)
	for _, m := range mounts {
		if m.ContainerPath == "/readonly" && (!m.Readonly || m.HostPath != host) {
			t.Errorf("the read-only mount is reported as %v", m)
		}
	}
}

func TestContainerDevices(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	// Containers have no /dev/kmsg by default.
	device := filepath.Join(t.TempDir(), "kmsg")
	harness.Must(t, syscall.Mknod(device, syscall.S_IFCHR|0o666, 1<<8|11))
	mayReadIt := harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) { s.Capabilities.AddCapabilities = []string{"SYSLOG"} })
	c := pod.Run(t, mayReadIt, func(c *runtimeapi.ContainerConfig) {
		c.Devices = []*runtimeapi.Device{{HostPath: device, ContainerPath: "/dev/my-kmsg", Permissions: "r"}}
	})
	c.Exec(t, "sh", "-c", ": </dev/my-kmsg")
	if _, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"sh", "-c", ": >/dev/my-kmsg"}, 0); harness.ExitCode(err) == 0 || err == nil {
		t.Errorf("open for writing of a device with permission r: %v", err)
	}
	other := pod.Run(t, mayReadIt)
	if _, _, err := d.Cri.ExecSync(t.Context(), other.Id, []string{"sh", "-c", "mknod /k c 1 11; : </k"}, 0); err == nil {
		t.Error("a container without the device can open it")
	}
	for _, device := range []string{"null", "zero", "full", "random", "urandom", "tty"} {
		c.Exec(t, "test", "-c", "/dev/"+device)
	}
}

func TestContainerReadonlyRootfs(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	readonly := pod.Run(t, harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) { s.ReadonlyRootfs = true }))
	_, stderr, err := d.Cri.ExecSync(t.Context(), readonly.Id, []string{"touch", "/file"}, 0)
	if harness.ExitCode(err) != 1 || !strings.Contains(string(stderr), "Read-only") {
		t.Errorf("write to a read-only root: %v, %s", err, stderr)
	}
	readonly.Exec(t, "touch", "/dev/shm/file")
	// Two containers of an image do not see each other's changes.
	a, b := pod.Run(t), pod.Run(t)
	a.Exec(t, "sh", "-c", "echo mine >/www/index.html; rm /etc/group")
	harness.Equal(t, "file in the other container", b.Exec(t, "cat", "/www/index.html"), "hello from a pod")
	b.Exec(t, "test", "-f", "/etc/group")
}

// capsOf returns a capability set of the container's init.
func capsOf(t *testing.T, c *harness.Container, set string) string {
	t.Helper()
	return machine.StatusField(t, c.Pid(t), set)
}

func TestContainerCapabilities(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.PodSecurity(func(s *runtimeapi.LinuxSandboxSecurityContext) { s.Privileged = true }))
	const (
		chown   = 1 << 0
		netRaw  = 1 << 13
		sysTime = 1 << 25
	)
	caps := func(c *harness.Container, set string) (bits uint64) {
		_, err := fmt.Sscanf(capsOf(t, c, set), "%x", &bits)
		harness.Must(t, err)
		return bits
	}
	with := func(change func(*runtimeapi.Capability)) *harness.Container {
		return pod.Run(t, harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) { change(s.Capabilities) }))
	}
	plain := caps(with(func(*runtimeapi.Capability) {}), "CapEff")
	if plain&chown == 0 || plain&sysTime != 0 {
		t.Errorf("default capabilities: got %x", plain)
	}
	added := caps(with(func(c *runtimeapi.Capability) { c.AddCapabilities = []string{"SYS_TIME"} }), "CapEff")
	harness.Equal(t, "added", added, plain|sysTime)
	dropped := with(func(c *runtimeapi.Capability) { c.DropCapabilities = []string{"CHOWN", "NET_RAW"} })
	harness.Equal(t, "dropped", caps(dropped, "CapEff"), plain&^(chown|netRaw))
	harness.Equal(t, "bounding set", caps(dropped, "CapBnd"), plain&^(chown|netRaw))
	harness.Equal(t, "none", caps(with(func(c *runtimeapi.Capability) { c.DropCapabilities = []string{"ALL"} }), "CapEff"), uint64(0))
	ambient := with(func(c *runtimeapi.Capability) { c.AddAmbientCapabilities = []string{"SYS_TIME"} })
	harness.Equal(t, "ambient", caps(ambient, "CapAmb"), uint64(sysTime))
	harness.Equal(t, "inheritable without ambient", caps(dropped, "CapInh"), uint64(0))
	full := pod.Run(t, harness.Security(harness.Privileged))
	harness.Equal(t, "privileged", caps(full, "CapEff"), hostCaps(t))
	if user := pod.Run(t, harness.RunAs(1001)); caps(user, "CapEff") != 0 {
		t.Errorf("a user other than root has the capabilities %s", capsOf(t, user, "CapEff"))
	}
}

func hostCaps(t *testing.T) (bits uint64) {
	t.Helper()
	_, err := fmt.Sscanf(machine.StatusField(t, os.Getpid(), "CapBnd"), "%x", &bits)
	harness.Must(t, err)
	return bits
}

// kubelet adds a privileged ephemeral container to a pod that was created without one. The pod's
// config in the request is privileged then.
func TestPrivilegedContainerIsAddedLater(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	cgroups := func() string {
		notCgroup := func(mount string) bool { return !strings.Contains(mount, "cgroup") }
		return strings.Join(slices.DeleteFunc(machine.ReadLines("/proc/self/mounts"), notCgroup), "\n")
	}
	before := cgroups()
	pod.Config.Linux.SecurityContext.Privileged = true
	c := pod.Run(t, harness.Security(harness.Privileged))
	c.Exec(t, "sh", "-c", "mkdir /m && mount -t tmpfs tmpfs /m")
	harness.Equal(t, "mounts of the node's cgroups", cgroups(), before)
	c.Stop(t, 0)
	d.Restart(t)
	harness.Equal(t, "capabilities after a restart", pod.Sh(t, "grep CapEff /proc/self/status", harness.Security(harness.Privileged)),
		pod.Sh(t, "grep CapBnd /proc/self/status | sed s/Bnd/Eff/", harness.Security(harness.Privileged)))
}

func TestContainerPrivileged(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork, harness.PodSecurity(func(s *runtimeapi.LinuxSandboxSecurityContext) { s.Privileged = true }))
	c := pod.Run(t, harness.Security(harness.Privileged))
	harness.Equal(t, "seccomp", machine.StatusField(t, c.Pid(t), "Seccomp"), "0")
	c.Exec(t, "sh", "-c", "mkdir /m && mount -t tmpfs none /m")
	c.Exec(t, "sh", "-c", "test -e /dev/kmsg || test -e /dev/loop-control || test -e /dev/mem")
	c.Exec(t, "sh", "-c", "hostname >/proc/sys/kernel/hostname")
	harness.Equal(t, "options of /sys", c.Exec(t, "sh", "-c", `awk '$2 == "/sys" {print substr($4, 1, 2)}' /proc/mounts`), "rw")
}

// CRI v0.38: cgroupns_options decides whether a container sees the cgroups of the node.
func TestContainerCgroupNamespace(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork, harness.PodSecurity(func(s *runtimeapi.LinuxSandboxSecurityContext) { s.Privileged = true }))
	for _, privileged := range []bool{false, true} {
		for mode, own := range map[runtimeapi.NamespaceMode]bool{runtimeapi.NamespaceMode_CONTAINER: true, runtimeapi.NamespaceMode_NODE: false} {
			c := pod.Run(t, harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
				s.Privileged = privileged
				s.NamespaceOptions = &runtimeapi.NamespaceOption{Network: runtimeapi.NamespaceMode_NODE,
					Pid: runtimeapi.NamespaceMode_CONTAINER, CgroupnsOptions: &runtimeapi.CgroupNamespace{Mode: mode}}
			}))
			name := fmt.Sprintf("%s, privileged %t", mode, privileged)
			shared, err := os.Readlink("/proc/self/ns/cgroup")
			harness.Must(t, err)
			theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/cgroup", c.Pid(t)))
			harness.Must(t, err)
			harness.Equal(t, name+": own namespace", theirs != shared, own)
			harness.Equal(t, name+": sees its path", strings.Contains(c.Exec(t, "cat", "/proc/1/cgroup"), c.Id), !own)
			modes := c.Exec(t, "sh", "-c", `awk '$3 ~ "^cgroup" {print substr($4, 1, 2)}' /proc/mounts | sort -u`)
			harness.Equal(t, name+": mode of the cgroup mounts", modes, map[bool]string{false: "ro", true: "rw"}[privileged])
		}
	}
}

func TestContainerMaskedAndReadonlyPaths(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	c := pod.Run(t, harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.MaskedPaths = []string{"/proc/kcore", "/proc/keys", "/sys/firmware", "/no/such/path", "/etc/group", "/www"}
		s.ReadonlyPaths = []string{"/proc/sys", "/home"}
	}))
	harness.Equal(t, "masked file", c.Exec(t, "cat", "/etc/group"), "")
	harness.Equal(t, "masked directory", c.Exec(t, "ls", "/www"), "")
	harness.Equal(t, "masked proc file", c.Exec(t, "sh", "-c", "head -c 10 /proc/keys"), "")
	for _, cmd := range []string{"touch /home/x", "echo x >/proc/sys/kernel/hostname"} {
		if _, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"sh", "-c", cmd}, 0); harness.ExitCode(err) != 1 {
			t.Errorf("%s: %v, want a failure", cmd, err)
		}
	}
}

func TestContainerNoNewPrivs(t *testing.T) {
	// busybox drops its privileges unless the applet needs them. crontab prints an error without
	// them.
	suid := fixture.File("suid/crontab", 0o4755, string(harness.Get(os.ReadFile("/bin/busybox"))(t)))
	name, _ := harness.Push(t, harness.Registry, "suid:latest", harness.BuildImage(t, v1.Config{User: "1001"}, fixture.Tree{fixture.Dir("suid", 0o755), suid}))
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	privs := func(on bool) harness.ContainerOption {
		return harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) { s.NoNewPrivs = on })
	}
	off, on := pod.Run(t, harness.Image(name), privs(false)), pod.Run(t, harness.Image(name), privs(true))
	harness.Equal(t, "NoNewPrivs off", machine.StatusField(t, off.Pid(t), "NoNewPrivs"), "0")
	harness.Equal(t, "NoNewPrivs on", machine.StatusField(t, on.Pid(t), "NoNewPrivs"), "1")
	for c, refused := range map[*harness.Container]bool{off: false, on: true} {
		_, stderr, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"/suid/crontab", "-l"}, 0)
		if err == nil || strings.Contains(string(stderr), "must be suid") != refused {
			t.Errorf("no_new_privs %v: the set-user-ID program ends with %v: %s", refused, err, stderr)
		}
	}
}

func TestContainerSeccomp(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	profile := func(kind runtimeapi.SecurityProfile_ProfileType, ref string) harness.ContainerOption {
		return harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.Seccomp = &runtimeapi.SecurityProfile{ProfileType: kind, LocalhostRef: ref}
		})
	}
	harness.Equal(t, "default profile", machine.StatusField(t, pod.Run(t, profile(runtimeapi.SecurityProfile_RuntimeDefault, "")).Pid(t), "Seccomp"), "2")
	harness.Equal(t, "unconfined", machine.StatusField(t, pod.Run(t, profile(runtimeapi.SecurityProfile_Unconfined, "")).Pid(t), "Seccomp"), "0")
	file := filepath.Join(t.TempDir(), "no-mkdir.json")
	harness.Must(t, os.WriteFile(file, []byte(`{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO"}]}`), 0o600))
	local := pod.Run(t, profile(runtimeapi.SecurityProfile_Localhost, file))
	if _, stderr, err := d.Cri.ExecSync(t.Context(), local.Id, []string{"mkdir", "/tmp/x"}, 0); harness.ExitCode(err) != 1 || !strings.Contains(string(stderr), "not permitted") {
		t.Errorf("mkdir under a profile that forbids it: %v %s", err, stderr)
	}
	local.Exec(t, "touch", "/tmp/y")
	_, err := pod.TryCreate(t, profile(runtimeapi.SecurityProfile_Localhost, "/no/such/profile.json"))
	if err == nil {
		t.Error("a missing profile is accepted")
	}
}

// Profiles of the host need not allow what prepares a container's process: fstatfs, openat2, statx
// (runc#5059), or setuid and capset. A profile without execve is named as the reason.
func TestTightLocalhostSeccomp(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	with := func(file string, nnp bool) harness.ContainerOption {
		return harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.Seccomp = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Localhost, LocalhostRef: file}
			s.NoNewPrivs = nnp
		})
	}
	for _, name := range []string{"seccomp-tight.json", "seccomp-small.json"} {
		for _, nnp := range []bool{false, true} {
			t.Run(fmt.Sprint(name, " ", nnp), func(t *testing.T) {
				file := harness.Get(filepath.Abs(filepath.Join("testdata", name)))(t)
				waits := func(c *runtimeapi.ContainerConfig) { c.Stdin = true } // sleep needs clock_nanosleep
				c := pod.Run(t, with(file, nnp), harness.Command("cat"), waits)
				harness.Equal(t, "seccomp mode", machine.StatusField(t, c.Pid(t), "Seccomp"), "2")
				harness.Equal(t, "filters", machine.StatusField(t, c.Pid(t), "Seccomp_filters"), "1")
				c.Exec(t, "true")
			})
		}
	}
	tight := harness.Get(filepath.Abs(filepath.Join("testdata", "seccomp-tight.json")))(t)
	ofPod := d.RunPod(t, harness.HostNetwork, func(c *runtimeapi.PodSandboxConfig) { // kubelet sets both from the pod's spec
		c.Linux.SecurityContext.Seccomp = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Localhost, LocalhostRef: tight}
	})
	harness.Equal(t, "filters of the pause", machine.StatusField(t, ofPod.PausePID(t), "Seccomp_filters"), "1")
	ofPod.Run(t, with(tight, true), harness.Command("cat"), func(c *runtimeapi.ContainerConfig) { c.Stdin = true }).Exec(t, "true")
	dir := machine.HostDir(t)
	harness.Must(t, os.WriteFile(filepath.Join(dir, "garbage"), []byte("no program"), 0o755))
	volume := harness.Mount(&runtimeapi.Mount{ContainerPath: "/v", HostPath: dir, Readonly: true})
	for _, denied := range []string{"execve", "write"} {
		file := filepath.Join(dir, denied+".json")
		harness.Must(t, os.WriteFile(file, fmt.Appendf(nil,
			`{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": [%q], "action": "SCMP_ACT_ERRNO"}]}`, denied), 0o600))
		for _, nnp := range []bool{false, true} {
			c := pod.Create(t, with(file, nnp), volume, harness.Command("/v/garbage"))
			err := d.Cri.StartContainer(t.Context(), c.Id)
			if err == nil || !strings.Contains(err.Error(), "does not allow "+denied) {
				t.Errorf("a profile without %s, no_new_privs %v: %v", denied, nnp, err)
			}
		}
	}
}

// The default profile refuses dangerous system calls, also in execs.
func TestContainerDefaultSeccompInExec(t *testing.T) {
	d := harness.StartDaemon(t)
	c := d.RunPod(t, harness.HostNetwork).Run(t, harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.Seccomp = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault}
		s.Capabilities.AddCapabilities = []string{"SYS_ADMIN"}
		s.Capabilities.DropCapabilities = []string{"SYS_ADMIN"}
	}))
	harness.Equal(t, "seccomp mode in exec", c.Exec(t, "sh", "-c", "awk '/^Seccomp:/ {print $2}' /proc/self/status"), "2")
	if _, stderr, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"unshare", "-r", "true"}, 0); harness.ExitCode(err) == 0 {
		t.Errorf("unshare of a user namespace is allowed: %v %s", err, stderr)
	}
}

func TestContainerRlimitsAndDefaults(t *testing.T) {
	d := harness.StartDaemon(t)
	c := d.RunPod(t, harness.HostNetwork).Run(t)
	for _, check := range []string{
		"test -L /dev/fd && test -L /dev/stdin && test -e /dev/ptmx",
		"grep -q ' /proc proc ' /proc/mounts && grep -q ' /sys sysfs ro' /proc/mounts",
		"if echo x >/proc/sys/kernel/hostname; then exit 1; fi",
		"test $(ulimit -n) -ge 1024",
	} {
		c.Exec(t, "sh", "-c", check)
	}
}

func TestContainerTTY(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	c, status := pod.RunToEnd(t, harness.Script("test -t 0 && test -t 1 && test -t 2 && tty && echo err >&2"), func(c *runtimeapi.ContainerConfig) { c.Tty = true })
	harness.Equal(t, "exit code", status.ExitCode, 0)
	for _, line := range c.Log(t) {
		harness.Equal(t, "stream of "+line.Text, line.Stream, "stdout")
	}
	if out := c.Output(t); !strings.Contains(out, "/dev/") || !strings.Contains(out, "err") {
		t.Errorf("output is %q", out)
	}
	harness.Equal(t, "TERM", strings.TrimRight(pod.Sh(t, "echo $TERM", func(c *runtimeapi.ContainerConfig) { c.Tty = true }), "\r\n"), "xterm")
}

// Standard input is /dev/null by default. With stdin it stays open.
func TestContainerStdin(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	harness.Equal(t, "without stdin", pod.Sh(t, "cat; echo end"), "end\n")
	c := pod.Run(t, harness.Script("echo waiting; cat; echo end"), func(c *runtimeapi.ContainerConfig) { c.Stdin = true })
	c.WaitOutput(t, "waiting")
	harness.Eventually(t, "cat waits", func() error { // cat itself and the waiting process
		return wantEqual("number of processes that read", c.Exec(t, "sh", "-c", "cat /proc/[0-9]*/comm | grep -c '^cat$'"), "2")
	})
	c.Stop(t, 0)
}

func TestStopSignals(t *testing.T) {
	trap := func(signal string) string {
		return "trap 'echo got " + signal + "; exit 5' " + signal + "; echo ready; while :; do sleep 0.05; done"
	}
	naming := func(tag, signal string) []harness.ContainerOption {
		name, _ := harness.Push(t, harness.Registry, "stopsignal:"+tag, harness.BuildImage(t, v1.Config{StopSignal: signal}))
		return []harness.ContainerOption{harness.Image(name)}
	}
	fromImage := naming("latest", "SIGUSR1")
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	for _, c := range []struct {
		name   string
		opts   []harness.ContainerOption
		signal runtimeapi.Signal
		short  string
	}{
		{"default", nil, runtimeapi.Signal_SIGNAL_SIGTERM, "TERM"},
		{"image", fromImage, runtimeapi.Signal_SIGNAL_SIGUSR1, "USR1"},
		{"config", append(fromImage, func(c *runtimeapi.ContainerConfig) { c.StopSignal = runtimeapi.Signal_SIGNAL_SIGINT }),
			runtimeapi.Signal_SIGNAL_SIGINT, "INT"},
		{"lower case", naming("lower", "usr2"), runtimeapi.Signal_SIGNAL_SIGUSR2, "USR2"},
		{"unknown name", naming("foo", "SIGFOO"), runtimeapi.Signal_SIGNAL_SIGTERM, "TERM"},
		{"zero", naming("zero", "0"), runtimeapi.Signal_SIGNAL_SIGTERM, "TERM"},
		{"too large", naming("large", "65"), runtimeapi.Signal_SIGNAL_SIGTERM, "TERM"},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctr := pod.Run(t, append(c.opts, harness.Script(trap(c.short)))...)
			ctr.WaitOutput(t, "ready")
			harness.Equal(t, "reported signal", ctr.Status(t).StopSignal, c.signal)
			ctr.Stop(t, 60)
			status := ctr.Status(t)
			harness.Equal(t, "state", status.State, runtimeapi.ContainerState_CONTAINER_EXITED)
			harness.Equal(t, "exit code", status.ExitCode, 5)
			harness.WantText(t, "output", ctr.Output(t), "got "+c.short)
		})
	}
	log, err := os.ReadFile(d.LogFile())
	harness.Must(t, err)
	harness.WantText(t, "log", string(log), "stop signal does not exist", "signal=SIGFOO", "signal=65")
	_, err = pod.TryCreate(t, func(c *runtimeapi.ContainerConfig) { c.StopSignal = 999 })
	harness.WantCode(t, err, codes.InvalidArgument, "stop_signal")
}

// A container that ignores its stop signal is killed after the grace period, with all its
// processes.
func TestStopKillsAfterGracePeriod(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork, harness.HostPID)
	c := pod.Run(t, harness.Script("trap '' TERM; (trap '' TERM; sleep 3333) & echo ready; while :; do sleep 0.05; done"))
	c.WaitOutput(t, "ready")
	c.Stop(t, 1)
	status := c.Status(t)
	harness.Equal(t, "exit code", status.ExitCode, 137)
	awaitNoProcesses(t, "sleep 3333")
}

// A repeated stop has a new deadline and sends no second signal, even after a restart of berth.
func TestStopSignalIsSentOnce(t *testing.T) {
	for name, between := range map[string]func(*testing.T, *harness.Daemon){
		"same daemon": func(*testing.T, *harness.Daemon) {},
		"next daemon": func(t *testing.T, d *harness.Daemon) { d.Restart(t) },
	} {
		t.Run(name, func(t *testing.T) {
			d := harness.StartDaemon(t)
			c := d.RunPod(t, harness.HostNetwork).Run(t,
				harness.Script("trap 'echo term' TERM; echo ready; while :; do sleep 0.05; done"))
			c.WaitOutput(t, "ready")
			ctx, cancel := context.WithCancel(t.Context())
			stopped := make(chan error, 1)
			go func() { stopped <- d.Cri.StopContainer(ctx, c.Id, 3600) }()
			c.WaitOutput(t, "term")
			cancel()
			harness.WantCode(t, <-stopped, codes.Canceled, "")
			between(t, d)
			c.Stop(t, 2)
			harness.Equal(t, "exit code", c.Status(t).ExitCode, 137)
			harness.Equal(t, "output", c.Output(t), "ready\nterm\n")
		})
	}
}

func TestListContainersFilters(t *testing.T) {
	d := harness.StartDaemon(t)
	first, second := d.RunPod(t, harness.HostNetwork), d.RunPod(t, harness.HostNetwork)
	label := func(value string) harness.ContainerOption {
		return func(c *runtimeapi.ContainerConfig) { c.Labels["app"] = value }
	}
	created, running := first.Create(t, label("a")), first.Run(t, label("b"))
	exited, _ := second.RunToEnd(t, label("b"), harness.Command("true"))
	state := func(s runtimeapi.ContainerState) *runtimeapi.ContainerStateValue {
		return &runtimeapi.ContainerStateValue{State: s}
	}
	for _, c := range []struct {
		name   string
		filter *runtimeapi.ContainerFilter
		want   []*harness.Container
	}{
		{"none", nil, []*harness.Container{created, running, exited}},
		{"id", &runtimeapi.ContainerFilter{Id: running.Id}, []*harness.Container{running}},
		{"id prefix", &runtimeapi.ContainerFilter{Id: running.Id[:13]}, []*harness.Container{running}},
		{"unknown id", &runtimeapi.ContainerFilter{Id: "ffffffff"}, nil},
		{"created", &runtimeapi.ContainerFilter{State: state(runtimeapi.ContainerState_CONTAINER_CREATED)}, []*harness.Container{created}},
		{"running", &runtimeapi.ContainerFilter{State: state(runtimeapi.ContainerState_CONTAINER_RUNNING)}, []*harness.Container{running}},
		{"exited", &runtimeapi.ContainerFilter{State: state(runtimeapi.ContainerState_CONTAINER_EXITED)}, []*harness.Container{exited}},
		{"pod", &runtimeapi.ContainerFilter{PodSandboxId: first.Id}, []*harness.Container{created, running}},
		{"label", &runtimeapi.ContainerFilter{LabelSelector: map[string]string{"app": "b"}}, []*harness.Container{running, exited}},
		{"label and pod", &runtimeapi.ContainerFilter{LabelSelector: map[string]string{"app": "b"}, PodSandboxId: first.Id}, []*harness.Container{running}},
	} {
		var got, want []string
		for _, item := range harness.Get(d.Cri.ListContainers(t.Context(), c.filter))(t) {
			got = append(got, item.Id)
		}
		for _, ctr := range c.want {
			want = append(want, ctr.Id)
		}
		sameSet(t, "filter "+c.name, got, want)
	}
}

// Two containers of a pod talk over localhost.
func TestContainersShareNetwork(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t)
	serveHTTP(t, pod, "local")
	harness.Equal(t, "page", pod.Run(t).Exec(t, "wget", "-q", "-O-", "http://127.0.0.1/"), "local")
}
