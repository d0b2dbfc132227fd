package integration

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
	"berth/internal/host"
	"berth/shim"
)

func cgroupMounts(mode runtimeapi.CgroupMountMode) harness.ContainerOption {
	return harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) { s.CgroupMountMode = mode })
}

var (
	writableCgroups = cgroupMounts(runtimeapi.CgroupMountMode_CGROUP_MOUNT_MODE_READ_WRITE)
	readOnlyCgroups = cgroupMounts(runtimeapi.CgroupMountMode_CGROUP_MOUNT_MODE_READ_ONLY)
	limitedMemory   = harness.Resources(func(r *runtimeapi.LinuxContainerResources) { r.MemoryLimitInBytes = 64 << 20 })
)

func cgroupNamespace(mode runtimeapi.NamespaceMode) harness.ContainerOption {
	return harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.NamespaceOptions.CgroupnsOptions = &runtimeapi.CgroupNamespace{Mode: mode}
	})
}

// inInnerCgroup makes a container move itself to a cgroup below its own, as systemd does, and make
// another one with limits. Then it runs a script.
func inInnerCgroup(script string) harness.ContainerOption {
	return harness.Script(`cd /sys/fs/cgroup && mkdir init leaf leaf/deep && echo $$ >init/cgroup.procs &&
		echo "+memory +pids" >cgroup.subtree_control && echo 16M >leaf/memory.max &&
		echo 20 >leaf/pids.max || exit 9
	echo ready
	` + script)
}

// runInInnerCgroup runs such a container and returns its own cgroup's directory on the node.
func runInInnerCgroup(t *testing.T, pod *harness.Pod, script string, opts ...harness.ContainerOption) (c *harness.Container, dir string) {
	t.Helper()
	c = pod.Run(t, append([]harness.ContainerOption{inInnerCgroup(script), writableCgroups, limitedMemory,
		// Berth's AppArmor profile and Debian's SELinux policy forbid user namespaces.
		harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.Apparmor = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Unconfined}
			s.SelinuxOptions = &runtimeapi.SELinuxOption{Type: privilegedType}
		}),
		harness.Mount(&runtimeapi.Mount{ContainerPath: "/node", HostPath: copyUnshare(t), Readonly: true, SelinuxRelabel: true})}, opts...)...)
	c.WaitOutput(t, "ready")
	inner := machine.CgroupDir(t, c.InitPID(t), "memory")
	harness.Equal(t, "cgroup of init", filepath.Base(inner), "init")
	return c, filepath.Dir(inner)
}

func readCgroup(t *testing.T, dir, file string) string {
	t.Helper()
	return strings.TrimSpace(string(harness.Get(os.ReadFile(filepath.Join(dir, file)))(t)))
}

// CRI v0.38: with cgroup_mount_mode READ_WRITE an unprivileged container makes cgroups and limits
// them, but cannot change its own limits.
func TestContainerWritableCgroups(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	features := harness.Get(d.Cri.Status(t.Context(), false))(t).Features
	harness.Equal(t, "feature cgroup_mount_mode", features.CgroupMountMode, machine.Cgroup2())
	if !machine.Cgroup2() {
		_, err := pod.TryCreate(t, writableCgroups)
		harness.WantCode(t, err, codes.FailedPrecondition, "cgroup_mount_mode", "cgroup v2")
		return
	}
	t.Run("refusals", func(t *testing.T) { testCgroupMountRefusals(t, d, pod) })
	c, dir := runInInnerCgroup(t, pod, "sleep 100000")
	t.Run("own limits", func(t *testing.T) { testOwnLimits(t, c, dir) })
	t.Run("exec", func(t *testing.T) { testExecBesideInnerCgroups(t, c) })
	t.Run("freeze", func(t *testing.T) { testFreezeInnerCgroups(t, c, dir) })
	t.Run("restart and resize", func(t *testing.T) {
		d.Kill(t)
		d.Start(t)
		harness.Equal(t, "exec", c.Exec(t, "echo", "hello"), "hello")
		resizeContainer(t, c, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 128 << 20})
		harness.Equal(t, "memory.max", readCgroup(t, dir, "memory.max"), "134217728")
		testOwnLimits(t, c, dir)
	})
	t.Run("OOM", func(t *testing.T) {
		c, _ := runInInnerCgroup(t, pod, "(echo 0 >leaf/cgroup.procs && tail /dev/zero); exit 3")
		status := c.WaitExited(t)
		harness.Equal(t, "exit code", status.ExitCode, 3)
		harness.Equal(t, "reason", status.Reason, "OOMKilled")
	})
	t.Run("nesting", func(t *testing.T) {
		c, dir := runInInnerCgroup(t, pod, `d=n; while mkdir $d 2>/dev/null; do d=$d/n; done; echo $d; mkdir $(seq 2000) 2>/dev/null; echo full; sleep 100000`)
		c.WaitOutput(t, "full")
		harness.WantText(t, "the first cgroup that is too deep", c.Output(t), "\nn"+strings.Repeat("/n", 12)+"\n")
		harness.WantText(t, "number of cgroups", readCgroup(t, dir, "cgroup.stat"), "nr_descendants 1000\n")
		harness.Equal(t, "exec", c.Exec(t, "sed", "s/.*://", "/proc/self/cgroup"), "/init")
	})
	t.Run("statistics and removal", func(t *testing.T) { testInnerCgroupsEnd(t, d) })
	t.Run("user namespace", func(t *testing.T) {
		const base = 9 * usernsLength
		c, dir := runInInnerCgroup(t, runMapped(t, d, base), "sleep 100000", inUserNamespace(base))
		harness.Equal(t, "owner of the cgroup", strings.Split(owner(t, dir), ":")[0], fmt.Sprint(base))
		testOwnLimits(t, c, dir)
	})
	t.Run("another user", func(t *testing.T) {
		c, dir := runInInnerCgroup(t, pod, "sleep 100000", harness.RunAs(1001))
		testOwnLimits(t, c, dir)
	})
}

func testCgroupMountRefusals(t *testing.T, d *harness.Daemon, pod *harness.Pod) {
	privileged := d.RunPod(t, harness.HostNetwork, harness.PodSecurity(func(s *runtimeapi.LinuxSandboxSecurityContext) { s.Privileged = true }))
	_, err := pod.TryCreate(t, writableCgroups, cgroupNamespace(runtimeapi.NamespaceMode_NODE))
	harness.WantCode(t, err, codes.InvalidArgument, "cgroup_mount_mode", "privileged")
	_, err = privileged.TryCreate(t, readOnlyCgroups, harness.Security(harness.Privileged))
	harness.WantCode(t, err, codes.InvalidArgument, "cgroup_mount_mode", "READ_ONLY")
	harness.Equal(t, "mount of READ_ONLY", pod.Sh(t, "mkdir /sys/fs/cgroup/x 2>/dev/null || echo refused", readOnlyCgroups), "refused\n")

	options := func() string { return strings.Join(harness.Get(host.CgroupOptions())(t), ",") }
	before := options()
	pod.Sh(t, "true", cgroupNamespace(runtimeapi.NamespaceMode_NODE))
	harness.Equal(t, "options of the node after a container in its cgroup namespace", options(), before)

	remount := func(options string) { harness.Must(t, unix.Mount("", "/sys/fs/cgroup", "", unix.MS_REMOUNT, options)) }
	remount("memory_recursiveprot")
	defer remount("nsdelegate,memory_recursiveprot")
	_, err = pod.TryCreate(t, writableCgroups)
	harness.WantCode(t, err, codes.FailedPrecondition, "cgroup_mount_mode", "nsdelegate")
}

// nested runs a command in mount, cgroup and user namespaces below the container's, with the
// node's program for it (copyUnshare). The name of the loader depends on the architecture.
const nested = "/node/ld-linux-*.so.* --library-path /node /node/unshare --user --map-root-user --cgroup --mount "

// copyUnshare copies the node's unshare and its libraries to a new directory. Where SELinux is
// enforced, containers may not execute the node's own.
func copyUnshare(t *testing.T) (dir string) {
	t.Helper()
	program := harness.Get(exec.LookPath("unshare"))(t)
	libraries := harness.Get(exec.CommandContext(t.Context(), "ldd", program).Output())(t)
	files := []string{program}
	for _, word := range strings.Fields(string(libraries)) {
		if filepath.IsAbs(word) {
			files = append(files, word)
		}
	}
	dir = machine.HostDir(t)
	for _, file := range files {
		content := harness.Get(os.ReadFile(file))(t)
		harness.Must(t, os.WriteFile(filepath.Join(dir, filepath.Base(file)), content, 0o755)) //nolint:gosec // containers execute it
	}
	return dir
}

// testOwnLimits checks that no process of the container can change the limits of its own cgroup.
func testOwnLimits(t *testing.T, c *harness.Container, dir string) {
	t.Helper()
	files := []string{"memory.max", "memory.high", "pids.max", "cpu.max", "cgroup.max.depth", "cgroup.max.descendants", "cgroup.freeze"}
	values := func() (all []string) {
		for _, file := range files {
			all = append(all, file+": "+readCgroup(t, dir, file))
		}
		return all
	}
	before := values()
	write := "for f in *; do echo max >$f && echo $f; echo 1 >$f && echo $f; done 2>/dev/null; true"
	// In the copy of the mount, nothing covers a file.
	uncover := "mkdir -p /tmp/m; umount memory.max; mount -o bind . /tmp/m && cd /tmp/m; "
	for where, script := range map[string]string{
		"in the container":     "cd /sys/fs/cgroup; " + write,
		"in nested namespaces": nested + "sh -c 'cd /sys/fs/cgroup; " + uncover + write + "'",
	} {
		written := slices.Compact(strings.Fields(c.Exec(t, "sh", "-c", script)))
		written = slices.DeleteFunc(written, func(file string) bool { return slices.Contains(delegated, file) })
		harness.Equal(t, "files that can be written "+where, strings.Join(written, " "), "")
		harness.Equal(t, "limits", strings.Join(values(), ", "), strings.Join(before, ", "))
	}
}

// delegated are the files that cgroups(7) leaves to the container.
var delegated = []string{"cgroup.procs", "cgroup.threads", "cgroup.subtree_control", "memory.oom.group", "memory.reclaim"}

// An exec has a cgroup beside the container's. It can go to another one, and ends there too.
func testExecBesideInnerCgroups(t *testing.T, c *harness.Container) {
	harness.WantText(t, "cgroup of an exec", c.Exec(t, "cat", "/proc/self/cgroup"), "0::/exec-")
	_, _, err := c.Pod.D.Cri.ExecSync(t.Context(), c.Id,
		[]string{"sh", "-c", "echo $$ >/sys/fs/cgroup/leaf/cgroup.procs && exec sleep 66666"}, 2*time.Second)
	if err == nil || !harness.Contains(err.Error(), "timed out") {
		t.Errorf("an exec that outlives its timeout: %v", err)
	}
	awaitNoProcesses(t, "sleep 66666")
	harness.Equal(t, "limit of another cgroup", c.Exec(t, "sh", "-c", "cd /sys/fs/cgroup && mkdir more && echo 5 >more/pids.max && cat more/pids.max && rmdir more"), "5")
}

func testFreezeInnerCgroups(t *testing.T, c *harness.Container, dir string) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	frozen, err := shim.OpenMonitor(filepath.Join(c.Pod.D.State, "c", c.Id)).Freeze(ctx, dir, time.Minute)
	harness.Must(t, err)
	harness.WantText(t, "events of an inner cgroup", readCgroup(t, dir, "init/cgroup.events"), "frozen 1")
	harness.Must(t, frozen.Thaw())
	harness.Eventually(t, "the inner cgroup is thawed", func() error {
		return wantEqual("frozen", strings.Contains(readCgroup(t, dir, "init/cgroup.events"), "frozen 0"), true)
	})
}

// Processes in inner cgroups count in the statistics, and end with their container. In a shared PID
// namespace they do not end with init.
func testInnerCgroupsEnd(t *testing.T, d *harness.Daemon) {
	pod := d.RunPod(t, harness.HostNetwork, harness.SharedPID)
	c, dir := runInInnerCgroup(t, pod, `echo 60M >leaf/memory.max
		sh -c 'echo 0 >leaf/deep/cgroup.procs; mkfifo /tmp/f; exec 3<>/tmp/f; exec dd if=/dev/zero of=/tmp/f bs=20971520 count=2' &
		sh -c 'echo 0 >leaf/deep/cgroup.procs; exec sleep 66667' & sleep 100000`)
	harness.EventuallyGot(t, "the memory counts", func() (bool, any) {
		used := containerStats(t, c).Memory.UsageBytes.GetValue()
		return used > 20<<20, used
	})
	waitProcesses(t, pod, 4) // the shell has become sleep
	harness.Equal(t, "processes in the inner cgroup", len(strings.Fields(readCgroup(t, dir, "leaf/deep/cgroup.procs"))), 2)
	c.Stop(t, 0)
	c.WaitExited(t)
	harness.Equal(t, "processes left", len(machine.CommandLines("sleep 66667")), 0)
	harness.Must(t, d.Cri.RemoveContainer(t.Context(), c.Id))
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("the cgroup is left: %v", err)
	}
}
