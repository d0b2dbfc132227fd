package checkpoint

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
)

// credentials are the fields of /proc/PID/status with the rights of a process.
var credentials = []string{"Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Seccomp_filters"}

// rights returns the rights of a process.
func rights(t *testing.T, pid int) string {
	t.Helper()
	var lines []string
	for _, field := range credentials {
		lines = append(lines, field+" "+machine.StatusField(t, pid, field))
	}
	return strings.Join(lines, "\n")
}

// The processes have exactly the rights that they had: users, groups, capabilities, no_new_privs
// and seccomp filters. Execs get those of the request.
func TestRestoredRights(t *testing.T) {
	d := startDaemon(t)
	for name, option := range map[string]harness.ContainerOption{
		"supplementary groups": harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.SupplementalGroups = []int64{2001, 2002}
		}),
		"capabilities": harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.Capabilities = &runtimeapi.Capability{AddCapabilities: []string{"NET_ADMIN", "SYS_TIME"}, DropCapabilities: []string{"KILL"}}
		}),
		"no capabilities": harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.Capabilities = &runtimeapi.Capability{DropCapabilities: []string{"ALL"}}
			s.NoNewPrivs = true
		}),
		"default profile": confinedConfig,
		"user":            userConfig,
	} {
		t.Run(name, func(t *testing.T) {
			if name == "user" {
				needSysResource(t)
			}
			pod := d.RunPod(t)
			c := pod.Run(t, harness.Script(counting), option)
			waitCounted(t, c, 1)
			before, inExec := rights(t, c.Pid(t)), c.Exec(t, "grep", "-E", "^(Uid|Gid|Groups|Cap|NoNewPrivs|Seccomp:)", "/proc/self/status")
			restored, list := revive(t, pod, c)
			waitCounted(t, list[0], 1)
			harness.Equal(t, "rights", rights(t, list[0].Pid(t)), before)
			harness.Equal(t, "rights of an exec", list[0].Exec(t, "grep", "-E", "^(Uid|Gid|Groups|Cap|NoNewPrivs|Seccomp:)", "/proc/self/status"), inExec)
			restored.Remove(t)
		})
	}
}

// userConfig is the configuration of a container that runs as an ordinary user with groups and an
// ambient capability.
func userConfig(c *runtimeapi.ContainerConfig) {
	s := c.Linux.SecurityContext
	s.RunAsUser, s.RunAsGroup = &runtimeapi.Int64Value{Value: 1001}, &runtimeapi.Int64Value{Value: 1002}
	s.SupplementalGroups = []int64{2001, 2002}
	s.NoNewPrivs = true
	s.Capabilities = &runtimeapi.Capability{DropCapabilities: []string{"ALL"}, AddCapabilities: []string{"NET_BIND_SERVICE"}, AddAmbientCapabilities: []string{"NET_BIND_SERVICE"}}
}

// needSysResource skips the test without CAP_SYS_RESOURCE. CRIU needs it to read the limits of
// other users' processes.
func needSysResource(t *testing.T) {
	t.Helper()
	var effective uint64
	_, err := fmt.Sscanf(machine.StatusField(t, os.Getpid(), "CapEff"), "%x", &effective)
	harness.Must(t, err)
	if effective&(1<<unix.CAP_SYS_RESOURCE) == 0 {
		t.Skip("NOT TESTED: this machine has no CAP_SYS_RESOURCE")
	}
}

// A seccomp filter still denies the same system calls, to the restored processes and to their
// children.
func TestRestoredSeccomp(t *testing.T) {
	d := startDaemon(t)
	profile := filepath.Join(t.TempDir(), "no-mkdir.json")
	harness.Must(t, os.WriteFile(profile, []byte(`{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 95}]}`), 0o600))
	pod := d.RunPod(t)
	c := pod.Run(t, harness.Script("while true; do mkdir /made 2>&1 && echo made; sleep 0.02; done"), harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.Seccomp = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Localhost, LocalhostRef: profile}
	}))
	const denied = "Operation not supported" // EOPNOTSUPP, which only this filter gives
	c.WaitOutput(t, denied)
	restored, list := revive(t, pod, c)
	list[0].WaitOutput(t, denied)
	harness.WantNoText(t, "log", list[0].Output(t), "\nmade\n")
	harness.Equal(t, "mode", machine.StatusField(t, list[0].Pid(t), "Seccomp"), "2")
	_, stderr, err := d.Cri.ExecSync(t.Context(), list[0].Id, []string{"mkdir", "/exec"}, 0)
	if harness.ExitCode(err) != 1 || !strings.Contains(string(stderr), denied) {
		t.Errorf("mkdir in an exec: %v %s", err, stderr)
	}
	restored.Remove(t)
}

// The root filesystem stays read-only, and masked and read-only paths stay so. Writable volumes
// stay writable.
func TestRestoredReadOnly(t *testing.T) {
	d := startDaemon(t)
	volume := machine.HostDir(t, "volume")
	pod := d.RunPod(t)
	// The file stays empty. CRIU refuses to restore a process with a file of another size.
	c := pod.Run(t, harness.Script("while true; do touch /volume/file; sleep 0.02; done"),
		harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) { s.ReadonlyRootfs = true }),
		harness.Mount(&runtimeapi.Mount{HostPath: volume, ContainerPath: "/volume"}),
		harness.Mount(&runtimeapi.Mount{HostPath: volume, ContainerPath: "/fixed", Readonly: true}))
	written := filepath.Join(volume, "file")
	exists := func() bool { _, err := os.Stat(written); return err == nil }
	harness.EventuallyTrue(t, "it writes", exists)
	const look = `for f in /new /proc/sys/kernel/hostname /proc/bus/new /fixed/new; do echo x 2>/dev/null >$f && echo wrote $f; done
ls /sys/firmware; cat /proc/keys; cat /proc/kcore; grep -E ' (/|/proc/sys|/proc/bus|/sys/firmware|/volume|/fixed) ' /proc/self/mounts | sed 's/^[^ ]* //' | sort`
	before := c.Exec(t, "sh", "-c", look)
	harness.WantNoText(t, "what an exec does", before, "wrote")
	restored, list := revive(t, pod, c)
	harness.Must(t, os.Remove(written))
	harness.EventuallyTrue(t, "it writes again", exists)
	harness.Equal(t, "what an exec does and sees", hideOverlay(list[0].Exec(t, "sh", "-c", look)), hideOverlay(before))
	restored.Remove(t)
}

// A request that restricts mounts more than a checkpoint of this node is refused: CRIU would
// restore the flags of the checkpoint. The same request without the restriction still works.
func TestStricterMountsAreRefused(t *testing.T) {
	d := startDaemon(t)
	volume := machine.HostDir(t, "volume")
	pod := d.RunPod(t)
	c := pod.Run(t, harness.Script(counting), harness.Mount(&runtimeapi.Mount{HostPath: volume, ContainerPath: "/volume"}))
	waitCounted(t, c, 1)
	s := save(t, pod, c)
	pod.Remove(t)
	for want, change := range map[string]func(*runtimeapi.ContainerConfig){
		"mount of /volume: the checkpoint has no option ro": func(c *runtimeapi.ContainerConfig) {
			for _, m := range c.Mounts {
				m.Readonly = m.Readonly || m.ContainerPath == "/volume"
			}
		},
		"root filesystem: the checkpoint has a writable one": func(c *runtimeapi.ContainerConfig) {
			c.Linux.SecurityContext.ReadonlyRootfs = true
		},
		"masked path /proc/meminfo: the checkpoint has none": func(c *runtimeapi.ContainerConfig) {
			security := c.Linux.SecurityContext
			security.MaskedPaths = append(security.MaskedPaths, "/proc/meminfo")
		},
		"read-only path /proc/tty: the checkpoint has none": func(c *runtimeapi.ContainerConfig) {
			security := c.Linux.SecurityContext
			security.ReadonlyPaths = append(security.ReadonlyPaths, "/proc/tty")
		},
		"mount of /more: the checkpoint has none": func(c *runtimeapi.ContainerConfig) {
			c.Mounts = append(c.Mounts, &runtimeapi.Mount{HostPath: volume, ContainerPath: "/more"})
		},
	} {
		request := s.identity(t)
		change(request.ContainerConfigs[0])
		restoreRefused(t, d, request, codes.FailedPrecondition, want)
	}
	restored, list := restorePod(t, d, s.identity(t))
	list[0].Start(t)
	waitCounted(t, list[0], 1)
	restored.Remove(t)
}

// hideOverlay removes the layers of an overlay filesystem, which differ, from lines of
// /proc/self/mounts.
func hideOverlay(mounts string) string {
	var lines []string
	for line := range strings.Lines(mounts) {
		if strings.HasPrefix(line, "/ overlay") {
			options := strings.Split(strings.TrimSpace(line), ",")
			line = options[0] + "\n"
		}
		lines = append(lines, line)
	}
	return strings.Join(lines, "")
}

// An AppArmor profile confines the restored processes and their execs, on this node and on another
// one.
func TestRestoredAppArmor(t *testing.T) {
	machine.NeedAppArmor(t)
	local := machine.LoadProfile(t)
	d := startDaemon(t)
	for name, profile := range map[string]*runtimeapi.SecurityProfile{
		"default":   {ProfileType: runtimeapi.SecurityProfile_RuntimeDefault},
		"localhost": {ProfileType: runtimeapi.SecurityProfile_Localhost, LocalhostRef: local},
	} {
		t.Run(name, func(t *testing.T) {
			want, denied := "berth-default (enforce)", "/proc/sysrq-trigger"
			if name == "localhost" {
				want, denied = local+" (enforce)", "/denied"
			}
			pod := d.RunPod(t)
			c := pod.Run(t, harness.Script("while true; do { true >>"+denied+"; } 2>&1; sleep 0.02; done"), harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) { s.Apparmor = profile }))
			c.WaitOutput(t, "Permission denied")
			restored, list := revive(t, pod, c)
			harness.Equal(t, "profile", machine.Confinement(t, list[0].Pid(t)), want)
			list[0].WaitOutput(t, "Permission denied")
			harness.Equal(t, "profile of an exec", list[0].Exec(t, "cat", "/proc/self/attr/current"), want)
			restored.Remove(t)
		})
	}
}
