package integration

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/fixture"
)

func TestContainerLifecycle(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t)
	c := pod.create(t, containerNamed("main"), func(c *runtimeapi.ContainerConfig) {
		c.Labels["role"] = "main"
		c.Annotations["note.example/bytes"] = "\x01ü\n"
	})
	status := c.status(t)
	equal(t, "state", status.State, runtimeapi.ContainerState_CONTAINER_CREATED)
	if status.CreatedAt == 0 || status.StartedAt != 0 || status.FinishedAt != 0 {
		t.Errorf("times of a created container: %d %d %d", status.CreatedAt, status.StartedAt, status.FinishedAt)
	}
	if !maps.Equal(status.Labels, c.config.Labels) || !maps.Equal(status.Annotations, c.config.Annotations) {
		t.Errorf("labels or annotations changed: %v %v", status.Labels, status.Annotations)
	}
	equal(t, "metadata", status.Metadata.String(), c.config.Metadata.String())
	equal(t, "image", status.Image.Image, baseImage)
	equal(t, "log path", status.LogPath, c.logPath())

	c.start(t)
	status = c.status(t)
	equal(t, "state after start", status.State, runtimeapi.ContainerState_CONTAINER_RUNNING)
	if status.StartedAt < status.CreatedAt {
		t.Errorf("started_at %d is before created_at %d", status.StartedAt, status.CreatedAt)
	}
	c.stop(t, 0)
	c.stop(t, 0) // idempotent
	status = c.status(t)
	equal(t, "state after stop", status.State, runtimeapi.ContainerState_CONTAINER_EXITED)
	equal(t, "exit code", status.ExitCode, 137)
	if status.FinishedAt < status.StartedAt {
		t.Errorf("finished_at %d is before started_at %d", status.FinishedAt, status.StartedAt)
	}
	wantCode(t, d.cri.StartContainer(t.Context(), c.id), codes.FailedPrecondition, c.id)
	for range 2 {
		must(t, d.cri.RemoveContainer(t.Context(), c.id))
	}
	_, err := d.cri.ContainerStatus(t.Context(), c.id, false)
	wantCode(t, err, codes.NotFound, c.id)
}

func TestContainerExit(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
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
			// The shell that kills itself is not the namespace's init, which its own children cannot kill.
			_, status := pod.runToEnd(t, script("sh -c '"+c.script+"'; exit $?"))
			equal(t, "exit code", status.ExitCode, c.code)
			equal(t, "reason", status.Reason, c.reason)
		})
	}
	t.Run("killed from outside", func(t *testing.T) {
		c := pod.run(t)
		must(t, syscall.Kill(c.pid(t), syscall.SIGKILL))
		status := c.waitExited(t)
		equal(t, "exit code", status.ExitCode, 137)
		equal(t, "reason", status.Reason, "Error")
	})
}

func TestContainerOOMKilled(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	limit := resources(func(r *runtimeapi.LinuxContainerResources) { r.MemoryLimitInBytes = 16 << 20 })
	const hog = "tail /dev/zero"
	t.Run("init", func(t *testing.T) {
		_, status := pod.runToEnd(t, limit, command("tail", "/dev/zero"))
		equal(t, "exit code", status.ExitCode, 137)
		equal(t, "reason", status.Reason, "OOMKilled")
	})
	t.Run("child", func(t *testing.T) {
		_, status := pod.runToEnd(t, limit, script(hog+"; exit 3"))
		equal(t, "reason", status.Reason, "OOMKilled")
	})
}

// Command, arguments, environment and directory of the config win over the image's.
func TestContainerProcessMergedWithImage(t *testing.T) {
	name, _ := push(t, registry, "process:latest", buildImage(t, v1.Config{
		Entrypoint: []string{"sh", "-c", `echo "$0 $@ A=$A B=$B $(pwd)"`, "zero"}, Cmd: []string{"image-arg"},
		Env: []string{"PATH=/bin", "A=image", "B=image"}, WorkingDir: "/www",
	}))
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	for _, c := range []struct {
		name string
		opt  containerOption
		want string
	}{
		{"image", imageDefaults, "zero image-arg A=image B=image /www\n"},
		{"args", func(c *runtimeapi.ContainerConfig) { c.Command, c.Args = nil, []string{"x", "y"} }, "zero x y A=image B=image /www\n"},
		{"command", command("echo", "own"), "own\n"},
		{"command and args", func(c *runtimeapi.ContainerConfig) { c.Command, c.Args = []string{"echo"}, []string{"both"} }, "both\n"},
		{"env", func(c *runtimeapi.ContainerConfig) { imageDefaults(c); env("B", "config")(c) }, "zero image-arg A=image B=config /www\n"},
		{"directory", func(c *runtimeapi.ContainerConfig) { imageDefaults(c); c.WorkingDir = "/tmp/new/dir" }, "zero image-arg A=image B=image /tmp/new/dir\n"},
		{"values", func(c *runtimeapi.ContainerConfig) { script(`printf %s "$A"`)(c); env("A", "a\nb  c=d'\"")(c) }, "a\nb  c=d'\"\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			container, _ := pod.runToEnd(t, image(name), c.opt)
			equal(t, "output", strings.TrimSuffix(container.output(t), "\n")+"\n", c.want)
		})
	}
}

func TestContainerUsers(t *testing.T) {
	byName, _ := push(t, registry, "user:name", buildImage(t, v1.Config{User: "web"}))
	byID, _ := push(t, registry, "user:ids", buildImage(t, v1.Config{User: "1001:2001"}))
	unlisted, _ := push(t, registry, "user:unlisted", buildImage(t, v1.Config{User: "4321"}))
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	type context = runtimeapi.LinuxContainerSecurityContext
	for _, c := range []struct {
		name, image string
		change      func(*context)
		want        string // uid gid groups
	}{
		{"root", baseImage, func(*context) {}, "0 0 0 2002"},
		{"image's name", byName, func(*context) {}, "1001 1001 1001 2001 2002"},
		{"image's numbers", byID, func(*context) {}, "1001 2001 2001 2002"},
		{"image's unlisted number", unlisted, func(*context) {}, "4321 0 0"},
		{"user", baseImage, func(s *context) { s.RunAsUser = &runtimeapi.Int64Value{Value: 1001} }, "1001 1001 1001 2001 2002"},
		{"user and group", baseImage, func(s *context) {
			s.RunAsUser, s.RunAsGroup = &runtimeapi.Int64Value{Value: 1001}, &runtimeapi.Int64Value{Value: 7}
		}, "1001 7 7 2001 2002"},
		{"username", baseImage, func(s *context) { s.RunAsUsername = "web" }, "1001 1001 1001 2001 2002"},
		{"supplemental groups", baseImage, func(s *context) {
			s.RunAsUser, s.SupplementalGroups = &runtimeapi.Int64Value{Value: 1001}, []int64{5000}
		}, "1001 1001 1001 2001 2002 5000"},
		{"strict groups", baseImage, func(s *context) {
			s.RunAsUser, s.SupplementalGroups = &runtimeapi.Int64Value{Value: 1001}, []int64{5000}
			s.SupplementalGroupsPolicy = runtimeapi.SupplementalGroupsPolicy_Strict
		}, "1001 1001 1001 5000"},
	} {
		t.Run(c.name, func(t *testing.T) {
			running := pod.run(t, image(c.image), security(c.change))
			pid := running.pid(t)
			ids := map[int64]bool{}
			status := running.status(t).User.GetLinux()
			for _, g := range append(status.GetSupplementalGroups(), status.GetGid()) {
				ids[g] = true
			}
			want := strings.Fields(c.want)
			equal(t, "uid", strings.Fields(statusField(t, pid, "Uid"))[0], want[0])
			equal(t, "gid", strings.Fields(statusField(t, pid, "Gid"))[0], want[1])
			sameSet(t, "groups of the process and its gid", append(strings.Fields(statusField(t, pid, "Groups")), want[1]), want[1:])
			equal(t, "reported uid and gid", fmt.Sprint(status.GetUid(), status.GetGid()), want[0]+" "+want[1])
			var reported []string
			for g := range ids {
				reported = append(reported, fmt.Sprint(g))
			}
			sameSet(t, "reported groups and gid", reported, want[1:])
			running.stop(t, 0)
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
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	host := t.TempDir()
	must(t, os.WriteFile(filepath.Join(host, "file"), []byte("from the host\n"), 0o644))
	must(t, os.Mkdir(filepath.Join(host, "sub"), 0o755))
	writable := &runtimeapi.Mount{ContainerPath: "/data/deep", HostPath: host}
	readonly := &runtimeapi.Mount{ContainerPath: "/readonly", HostPath: host, Readonly: true}
	file := &runtimeapi.Mount{ContainerPath: "/etc/one-file", HostPath: filepath.Join(host, "file")}
	nested := &runtimeapi.Mount{ContainerPath: "/data/deep/sub/nested", HostPath: host}
	c := pod.run(t, mount(nested), mount(writable), mount(readonly), mount(file)) // in no good order
	c.exec(t, "sh", "-c", "echo written >/data/deep/new")
	equal(t, "content on the host", strings.Join(readLines(filepath.Join(host, "new")), ""), "written")
	equal(t, "content of the file", c.exec(t, "cat", "/etc/one-file"), "from the host")
	equal(t, "content through the nested mount", c.exec(t, "cat", "/data/deep/sub/nested/file"), "from the host")
	_, stderr, err := d.cri.ExecSync(t.Context(), c.id, []string{"touch", "/readonly/x"}, 0)
	if exitCode(err) != 1 || !strings.Contains(string(stderr), "Read-only") {
		t.Errorf("write to a read-only mount: %v, %s", err, stderr)
	}
	mounts := c.status(t).Mounts
	equal(t, "number of reported mounts", len(mounts), 4)
	for _, m := range mounts {
		if m.ContainerPath == "/readonly" && (!m.Readonly || m.HostPath != host) {
			t.Errorf("the read-only mount is reported as %v", m)
		}
	}
}

func TestContainerDevices(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	// The kernel's log is no device that every container has.
	device := filepath.Join(t.TempDir(), "kmsg")
	must(t, syscall.Mknod(device, syscall.S_IFCHR|0o666, 1<<8|11))
	mayReadIt := security(func(s *runtimeapi.LinuxContainerSecurityContext) { s.Capabilities.AddCapabilities = []string{"SYSLOG"} })
	c := pod.run(t, mayReadIt, func(c *runtimeapi.ContainerConfig) {
		c.Devices = []*runtimeapi.Device{{HostPath: device, ContainerPath: "/dev/my-kmsg", Permissions: "r"}}
	})
	c.exec(t, "sh", "-c", ": </dev/my-kmsg")
	if _, _, err := d.cri.ExecSync(t.Context(), c.id, []string{"sh", "-c", ": >/dev/my-kmsg"}, 0); exitCode(err) == 0 || err == nil {
		t.Errorf("open for writing of a device with permission r: %v", err)
	}
	other := pod.run(t, mayReadIt)
	if _, _, err := d.cri.ExecSync(t.Context(), other.id, []string{"sh", "-c", "mknod /k c 1 11; : </k"}, 0); err == nil {
		t.Error("a container without the device can open it")
	}
	for _, device := range []string{"null", "zero", "full", "random", "urandom", "tty"} {
		c.exec(t, "test", "-c", "/dev/"+device)
	}
}

func TestContainerReadonlyRootfs(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	readonly := pod.run(t, security(func(s *runtimeapi.LinuxContainerSecurityContext) { s.ReadonlyRootfs = true }))
	_, stderr, err := d.cri.ExecSync(t.Context(), readonly.id, []string{"touch", "/file"}, 0)
	if exitCode(err) != 1 || !strings.Contains(string(stderr), "Read-only") {
		t.Errorf("write to a read-only root: %v, %s", err, stderr)
	}
	readonly.exec(t, "touch", "/dev/shm/file")
	// Two containers of an image do not see each other's changes.
	a, b := pod.run(t), pod.run(t)
	a.exec(t, "sh", "-c", "echo mine >/www/index.html; rm /etc/group")
	equal(t, "file in the other container", b.exec(t, "cat", "/www/index.html"), "hello from a pod")
	b.exec(t, "test", "-f", "/etc/group")
}

// capabilities of the container's init: effective and ambient.
func (c *container) caps(t *testing.T, set string) string {
	t.Helper()
	return statusField(t, c.pid(t), set)
}

func TestContainerCapabilities(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, podSecurity(func(s *runtimeapi.LinuxSandboxSecurityContext) { s.Privileged = true }))
	const (
		chown   = 1 << 0
		netRaw  = 1 << 13
		sysTime = 1 << 25
	)
	caps := func(c *container, set string) (bits uint64) {
		_, err := fmt.Sscanf(c.caps(t, set), "%x", &bits)
		must(t, err)
		return bits
	}
	with := func(change func(*runtimeapi.Capability)) *container {
		return pod.run(t, security(func(s *runtimeapi.LinuxContainerSecurityContext) { change(s.Capabilities) }))
	}
	plain := caps(with(func(*runtimeapi.Capability) {}), "CapEff")
	if plain&chown == 0 || plain&sysTime != 0 {
		t.Errorf("default capabilities are %x", plain)
	}
	added := caps(with(func(c *runtimeapi.Capability) { c.AddCapabilities = []string{"SYS_TIME"} }), "CapEff")
	equal(t, "added", added, plain|sysTime)
	dropped := with(func(c *runtimeapi.Capability) { c.DropCapabilities = []string{"CHOWN", "NET_RAW"} })
	equal(t, "dropped", caps(dropped, "CapEff"), plain&^(chown|netRaw))
	equal(t, "bounding set", caps(dropped, "CapBnd"), plain&^(chown|netRaw))
	equal(t, "none", caps(with(func(c *runtimeapi.Capability) { c.DropCapabilities = []string{"ALL"} }), "CapEff"), uint64(0))
	ambient := with(func(c *runtimeapi.Capability) { c.AddAmbientCapabilities = []string{"SYS_TIME"} })
	equal(t, "ambient", caps(ambient, "CapAmb"), uint64(sysTime))
	equal(t, "inheritable without ambient", caps(dropped, "CapInh"), uint64(0))
	full := pod.run(t, security(privileged))
	equal(t, "privileged", caps(full, "CapEff"), hostCaps(t))
	if user := pod.run(t, runAs(1001)); caps(user, "CapEff") != 0 {
		t.Errorf("a user other than root has the capabilities %s", user.caps(t, "CapEff"))
	}
}

func hostCaps(t *testing.T) (bits uint64) {
	t.Helper()
	_, err := fmt.Sscanf(statusField(t, os.Getpid(), "CapBnd"), "%x", &bits)
	must(t, err)
	return bits
}

func TestContainerPrivileged(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork, podSecurity(func(s *runtimeapi.LinuxSandboxSecurityContext) { s.Privileged = true }))
	c := pod.run(t, security(privileged))
	equal(t, "seccomp", statusField(t, c.pid(t), "Seccomp"), "0")
	c.exec(t, "sh", "-c", "mkdir /m && mount -t tmpfs none /m")
	c.exec(t, "sh", "-c", "test -e /dev/kmsg || test -e /dev/loop-control || test -e /dev/mem")
	c.exec(t, "sh", "-c", "hostname >/proc/sys/kernel/hostname")
	equal(t, "options of /sys", c.exec(t, "sh", "-c", `awk '$2 == "/sys" {print substr($4, 1, 2)}' /proc/mounts`), "rw")
}

func TestContainerMaskedAndReadonlyPaths(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	c := pod.run(t, security(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.MaskedPaths = []string{"/proc/kcore", "/proc/keys", "/sys/firmware", "/no/such/path", "/etc/group", "/www"}
		s.ReadonlyPaths = []string{"/proc/sys", "/home"}
	}))
	equal(t, "masked file", c.exec(t, "cat", "/etc/group"), "")
	equal(t, "masked directory", c.exec(t, "ls", "/www"), "")
	equal(t, "masked proc file", c.exec(t, "sh", "-c", "head -c 10 /proc/keys"), "")
	for _, cmd := range []string{"touch /home/x", "echo x >/proc/sys/kernel/hostname"} {
		if _, _, err := d.cri.ExecSync(t.Context(), c.id, []string{"sh", "-c", cmd}, 0); exitCode(err) != 1 {
			t.Errorf("%s: %v, want a failure", cmd, err)
		}
	}
}

func TestContainerNoNewPrivs(t *testing.T) {
	// busybox gives up its privileges unless the applet needs them, and crontab says so if it has none.
	suid := fixture.File("suid/crontab", 0o4755, string(get(os.ReadFile("/bin/busybox"))(t)))
	name, _ := push(t, registry, "suid:latest", buildImage(t, v1.Config{User: "1001"}, fixture.Tree{fixture.Dir("suid", 0o755), suid}))
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	privs := func(on bool) containerOption {
		return security(func(s *runtimeapi.LinuxContainerSecurityContext) { s.NoNewPrivs = on })
	}
	off, on := pod.run(t, image(name), privs(false)), pod.run(t, image(name), privs(true))
	equal(t, "NoNewPrivs off", statusField(t, off.pid(t), "NoNewPrivs"), "0")
	equal(t, "NoNewPrivs on", statusField(t, on.pid(t), "NoNewPrivs"), "1")
	for c, refused := range map[*container]bool{off: false, on: true} {
		_, stderr, err := d.cri.ExecSync(t.Context(), c.id, []string{"/suid/crontab", "-l"}, 0)
		if err == nil || strings.Contains(string(stderr), "must be suid") != refused {
			t.Errorf("no_new_privs %v: the set-user-ID program ends with %v: %s", refused, err, stderr)
		}
	}
}

func TestContainerSeccomp(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	profile := func(kind runtimeapi.SecurityProfile_ProfileType, ref string) containerOption {
		return security(func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.Seccomp = &runtimeapi.SecurityProfile{ProfileType: kind, LocalhostRef: ref}
		})
	}
	equal(t, "default profile", statusField(t, pod.run(t, profile(runtimeapi.SecurityProfile_RuntimeDefault, "")).pid(t), "Seccomp"), "2")
	equal(t, "unconfined", statusField(t, pod.run(t, profile(runtimeapi.SecurityProfile_Unconfined, "")).pid(t), "Seccomp"), "0")
	file := filepath.Join(t.TempDir(), "no-mkdir.json")
	must(t, os.WriteFile(file, []byte(`{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO"}]}`), 0o600))
	local := pod.run(t, profile(runtimeapi.SecurityProfile_Localhost, file))
	if _, stderr, err := d.cri.ExecSync(t.Context(), local.id, []string{"mkdir", "/tmp/x"}, 0); exitCode(err) != 1 || !strings.Contains(string(stderr), "not permitted") {
		t.Errorf("mkdir under a profile that forbids it: %v %s", err, stderr)
	}
	local.exec(t, "touch", "/tmp/y")
	_, err := pod.tryCreate(t, profile(runtimeapi.SecurityProfile_Localhost, "/no/such/profile.json"))
	if err == nil {
		t.Error("a missing profile is accepted")
	}
}

// The default profile keeps dangerous system calls away and is in force for exec too.
func TestContainerDefaultSeccompInExec(t *testing.T) {
	d := startDaemon(t)
	c := d.runPod(t, hostNetwork).run(t, security(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.Seccomp = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault}
		s.Capabilities.AddCapabilities = []string{"SYS_ADMIN"}
		s.Capabilities.DropCapabilities = []string{"SYS_ADMIN"}
	}))
	equal(t, "seccomp mode in exec", c.exec(t, "sh", "-c", "awk '/^Seccomp:/ {print $2}' /proc/self/status"), "2")
	if _, stderr, err := d.cri.ExecSync(t.Context(), c.id, []string{"unshare", "-r", "true"}, 0); exitCode(err) == 0 {
		t.Errorf("unshare of a user namespace is allowed: %v %s", err, stderr)
	}
}

func TestContainerRlimitsAndDefaults(t *testing.T) {
	d := startDaemon(t)
	c := d.runPod(t, hostNetwork).run(t)
	for _, check := range []string{
		"test -L /dev/fd && test -L /dev/stdin && test -e /dev/ptmx",
		"grep -q ' /proc proc ' /proc/mounts && grep -q ' /sys sysfs ro' /proc/mounts",
		"if echo x >/proc/sys/kernel/hostname; then exit 1; fi",
		"test $(ulimit -n) -ge 1024",
	} {
		c.exec(t, "sh", "-c", check)
	}
}

func TestContainerTTY(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	c, status := pod.runToEnd(t, script("test -t 0 && test -t 1 && test -t 2 && tty && echo err >&2"), func(c *runtimeapi.ContainerConfig) { c.Tty = true })
	equal(t, "exit code", status.ExitCode, 0)
	for _, line := range c.log(t) {
		equal(t, "stream of "+line.text, line.stream, "stdout")
	}
	if out := c.output(t); !strings.Contains(out, "/dev/") || !strings.Contains(out, "err") {
		t.Errorf("output is %q", out)
	}
	equal(t, "TERM", strings.TrimRight(pod.sh(t, "echo $TERM", func(c *runtimeapi.ContainerConfig) { c.Tty = true }), "\r\n"), "xterm")
}

// Standard input is /dev/null, unless it is asked for; then it stays open.
func TestContainerStdin(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	equal(t, "without stdin", pod.sh(t, "cat; echo end"), "end\n")
	c := pod.run(t, script("echo waiting; cat; echo end"), func(c *runtimeapi.ContainerConfig) { c.Stdin = true })
	c.waitOutput(t, "waiting")
	equal(t, "process that reads", c.exec(t, "sh", "-c", "cat /proc/[0-9]*/comm | grep -c '^cat$'"), "2") // itself and the one that waits
	c.stop(t, 0)
}

func TestStopSignals(t *testing.T) {
	trap := func(signal string) string {
		return "trap 'echo got " + signal + "; exit 5' " + signal + "; echo ready; while :; do sleep 0.05; done"
	}
	fromImage, _ := push(t, registry, "stopsignal:latest", buildImage(t, v1.Config{StopSignal: "SIGUSR1"}))
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	for _, c := range []struct {
		name   string
		opts   []containerOption
		signal runtimeapi.Signal
		short  string
	}{
		{"default", nil, runtimeapi.Signal_SIGNAL_SIGTERM, "TERM"},
		{"image", []containerOption{image(fromImage)}, runtimeapi.Signal_SIGNAL_SIGUSR1, "USR1"},
		{"config", []containerOption{image(fromImage), func(c *runtimeapi.ContainerConfig) { c.StopSignal = runtimeapi.Signal_SIGNAL_SIGINT }},
			runtimeapi.Signal_SIGNAL_SIGINT, "INT"},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctr := pod.run(t, append(c.opts, script(trap(c.short)))...)
			ctr.waitOutput(t, "ready")
			equal(t, "reported signal", ctr.status(t).StopSignal, c.signal)
			ctr.stop(t, 60)
			status := ctr.status(t)
			equal(t, "state", status.State, runtimeapi.ContainerState_CONTAINER_EXITED)
			equal(t, "exit code", status.ExitCode, 5)
			if out := ctr.output(t); !strings.Contains(out, "got "+c.short) {
				t.Errorf("output is %q", out)
			}
		})
	}
}

// A container that ignores its stop signal is killed after the grace period, its children with it.
func TestStopKillsAfterGracePeriod(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork, hostPID)
	c := pod.run(t, script("trap '' TERM; (trap '' TERM; sleep 3333) & echo ready; while :; do sleep 0.05; done"))
	c.waitOutput(t, "ready")
	c.stop(t, 1)
	status := c.status(t)
	equal(t, "exit code", status.ExitCode, 137)
	eventually(t, "the child is gone", func() error {
		if left := commandLines("sleep 3333"); len(left) > 0 {
			return fmt.Errorf("still running: %q", left)
		}
		return nil
	})
}

func TestListContainersFilters(t *testing.T) {
	d := startDaemon(t)
	first, second := d.runPod(t, hostNetwork), d.runPod(t, hostNetwork)
	label := func(value string) containerOption {
		return func(c *runtimeapi.ContainerConfig) { c.Labels["app"] = value }
	}
	created, running := first.create(t, label("a")), first.run(t, label("b"))
	exited, _ := second.runToEnd(t, label("b"), command("true"))
	state := func(s runtimeapi.ContainerState) *runtimeapi.ContainerStateValue {
		return &runtimeapi.ContainerStateValue{State: s}
	}
	for _, c := range []struct {
		name   string
		filter *runtimeapi.ContainerFilter
		want   []*container
	}{
		{"none", nil, []*container{created, running, exited}},
		{"id", &runtimeapi.ContainerFilter{Id: running.id}, []*container{running}},
		{"id prefix", &runtimeapi.ContainerFilter{Id: running.id[:13]}, []*container{running}},
		{"unknown id", &runtimeapi.ContainerFilter{Id: "ffffffff"}, nil},
		{"created", &runtimeapi.ContainerFilter{State: state(runtimeapi.ContainerState_CONTAINER_CREATED)}, []*container{created}},
		{"running", &runtimeapi.ContainerFilter{State: state(runtimeapi.ContainerState_CONTAINER_RUNNING)}, []*container{running}},
		{"exited", &runtimeapi.ContainerFilter{State: state(runtimeapi.ContainerState_CONTAINER_EXITED)}, []*container{exited}},
		{"pod", &runtimeapi.ContainerFilter{PodSandboxId: first.id}, []*container{created, running}},
		{"label", &runtimeapi.ContainerFilter{LabelSelector: map[string]string{"app": "b"}}, []*container{running, exited}},
		{"label and pod", &runtimeapi.ContainerFilter{LabelSelector: map[string]string{"app": "b"}, PodSandboxId: first.id}, []*container{running}},
	} {
		var got, want []string
		for _, item := range get(d.cri.ListContainers(t.Context(), c.filter))(t) {
			got = append(got, item.Id)
		}
		for _, ctr := range c.want {
			want = append(want, ctr.id)
		}
		sameSet(t, "filter "+c.name, got, want)
	}
}

// Two containers of a pod talk over localhost.
func TestContainersShareNetwork(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t)
	serveHTTP(t, pod, "local")
	equal(t, "page", pod.run(t).exec(t, "wget", "-q", "-O-", "http://127.0.0.1/"), "local")
}
