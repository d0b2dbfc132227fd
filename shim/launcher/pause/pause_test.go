package pause

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/moby/profiles/seccomp"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/internal/pidfd"
	"berth/internal/rootfs"
	"berth/shim/ociruntime"
	"berth/shim/proto"
)

func plainOrder() *proto.Launch {
	return &proto.Launch{
		Pause:   true,
		BuiltIn: true,
		Rootfs:  rootfs.Spec{Layers: []rootfs.Layer{{Kind: rootfs.Directory, Path: "/pause-root"}}},
		Spec: &specs.Spec{
			Root:     &specs.Root{Readonly: true},
			Hostname: "pod",
			Process:  &specs.Process{Args: []string{"/pause"}, Cwd: "/", Capabilities: &specs.LinuxCapabilities{}},
			Mounts:   []specs.Mount{{Destination: "/proc", Type: "proc"}, {Destination: "/dev", Type: "tmpfs"}},
			Linux: &specs.Linux{
				CgroupsPath: "/pod",
				Namespaces:  []specs.LinuxNamespace{{Type: specs.MountNamespace}, {Type: specs.UTSNamespace}, {Type: specs.NetworkNamespace, Path: "/run/netns/pod"}},
			},
		},
	}
}

// What Maker does not do, libcontainer does.
func TestPlainPause(t *testing.T) {
	if !Plain(plainOrder()) {
		t.Fatal("a pause without anything else is not plain")
	}
	namespace := func(kind specs.LinuxNamespaceType, path string) func(*proto.Launch) {
		return func(o *proto.Launch) {
			o.Spec.Linux.Namespaces = append(o.Spec.Linux.Namespaces, specs.LinuxNamespace{Type: kind, Path: path})
		}
	}
	for name, change := range map[string]func(*proto.Launch){
		"a container":                       func(o *proto.Launch) { o.Pause = false },
		"an image":                          func(o *proto.Launch) { o.BuiltIn = false },
		"a program":                         func(o *proto.Launch) { o.Runtime = &ociruntime.Runtime{} },
		"place of its root":                 func(o *proto.Launch) { o.RootPlace = "/run/berth-rootfs" },
		"writable layer":                    func(o *proto.Launch) { o.Rootfs.Upper = "/upper" },
		"label of its root":                 func(o *proto.Launch) { o.Rootfs.Label = "system_u:object_r:container_file_t:s0" },
		"mapped root":                       func(o *proto.Launch) { o.Rootfs.IDMap = &rootfs.IDMap{} },
		"two layers":                        func(o *proto.Launch) { o.Rootfs.Layers = append(o.Rootfs.Layers, o.Rootfs.Layers[0]) },
		"another program":                   func(o *proto.Launch) { o.Spec.Process.Args = []string{"/bin/sh"} },
		"sysctl of the node":                func(o *proto.Launch) { o.Spec.Linux.Sysctl = map[string]string{"kernel.core_pattern": "|/x"} },
		"sysctl of no namespace of its own": func(o *proto.Launch) { o.Spec.Linux.Sysctl = map[string]string{"kernel.shmmax": "1"} },
		"sysctl that leads elsewhere": func(o *proto.Launch) {
			o.Spec.Linux.Sysctl = map[string]string{"net.x/../../kernel.core_pattern": "|/x"}
		},
		"capabilities":          func(o *proto.Launch) { o.Spec.Process.Capabilities.Bounding = []string{"CAP_CHOWN"} },
		"all capabilities":      func(o *proto.Launch) { o.Spec.Process.Capabilities = nil },
		"SELinux":               func(o *proto.Launch) { o.Spec.Process.SelinuxLabel = "system_u:system_r:container_t:s0" },
		"AppArmor":              func(o *proto.Launch) { o.Spec.Process.ApparmorProfile = "default" },
		"arguments":             func(o *proto.Launch) { o.Spec.Process.Args = []string{"/pause", "-v"} },
		"working directory":     func(o *proto.Launch) { o.Spec.Process.Cwd = "/dev" },
		"limits":                func(o *proto.Launch) { o.Spec.Process.Rlimits = []specs.POSIXRlimit{{Type: "RLIMIT_CORE"}} },
		"hooks":                 func(o *proto.Launch) { o.Spec.Hooks = &specs.Hooks{} },
		"another mount":         func(o *proto.Launch) { o.Spec.Mounts = append(o.Spec.Mounts, specs.Mount{Destination: "/etc/hosts"}) },
		"masked paths":          func(o *proto.Launch) { o.Spec.Linux.MaskedPaths = []string{"/proc/kcore"} },
		"writable root":         func(o *proto.Launch) { o.Spec.Root.Readonly = false },
		"user namespace":        namespace(specs.UserNamespace, "/run/berth/pods/1/userns"),
		"cgroup namespace":      namespace(specs.CgroupNamespace, ""),
		"PID namespace by path": namespace(specs.PIDNamespace, "/proc/1/ns/pid"),
		"a namespace twice":     namespace(specs.MountNamespace, ""),
		"new network":           func(o *proto.Launch) { o.Spec.Linux.Namespaces[2].Path = "" },
		"the host's hostname":   func(o *proto.Launch) { o.Spec.Linux.Namespaces = o.Spec.Linux.Namespaces[:1] },
		"no mount namespace":    func(o *proto.Launch) { o.Spec.Linux.Namespaces = o.Spec.Linux.Namespaces[1:] },
		"strict seccomp":        func(o *proto.Launch) { o.Spec.Linux.Seccomp = &specs.LinuxSeccomp{DefaultAction: specs.ActErrno} },
		"no spec":               func(o *proto.Launch) { o.Spec = nil },
	} {
		o := plainOrder()
		change(o)
		if Plain(o) {
			t.Errorf("%s: it is plain", name)
		}
	}
}

func TestAllowsPause(t *testing.T) {
	byDefault, err := seccomp.GetDefaultProfile(plainOrder().Spec)
	if err != nil {
		t.Fatal(err)
	}
	rule := func(action specs.LinuxSeccompAction, args ...specs.LinuxSeccompArg) []specs.LinuxSyscall {
		return []specs.LinuxSyscall{{Names: []string{"wait4"}, Action: action, Args: args}}
	}
	for name, test := range map[string]struct {
		profile *specs.LinuxSeccomp
		want    bool
	}{
		"none":                {nil, true},
		"the default":         {byDefault, true},
		"everything":          {&specs.LinuxSeccomp{DefaultAction: specs.ActAllow}, true},
		"all but another":     {&specs.LinuxSeccomp{DefaultAction: specs.ActAllow, Syscalls: []specs.LinuxSyscall{{Names: []string{"mkdir"}, Action: specs.ActErrno}}}, true},
		"all but one of them": {&specs.LinuxSeccomp{DefaultAction: specs.ActAllow, Syscalls: rule(specs.ActErrno)}, false},
		"with an argument":    {&specs.LinuxSeccomp{DefaultAction: specs.ActAllow, Syscalls: rule(specs.ActAllow, specs.LinuxSeccompArg{Op: specs.OpEqualTo})}, false},
		"twice":               {&specs.LinuxSeccomp{DefaultAction: specs.ActAllow, Syscalls: append(rule(specs.ActAllow), rule(specs.ActLog)...)}, false},
		"logged":              {&specs.LinuxSeccomp{DefaultAction: specs.ActLog}, false},
		"nothing":             {&specs.LinuxSeccomp{DefaultAction: specs.ActErrno}, false},
		"told to another":     {&specs.LinuxSeccomp{DefaultAction: specs.ActAllow, ListenerPath: "/run/listener"}, false},
	} {
		if got := allowsPause(test.profile); got != test.want {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
}

// pause.c counts sysctls from one, in the order of its arguments.
func TestStepError(t *testing.T) {
	spec := plainOrder().Spec
	spec.Linux.Sysctl = map[string]string{"net.b": "2", "net.a": "1"}
	for step, want := range map[int]string{
		stepClone:         "clone: invalid argument",
		stepSysctl + 2<<8: `failed to write sysctl net.b = "2": invalid argument`, // package launcher knows it by that
		stepSysctl + 3<<8: "step 772: invalid argument",
		len(steps) - 1:    "execute it: invalid argument",
		len(steps):        "step 17: invalid argument",
	} {
		if got := (&stepError{step: step, errno: 22, spec: spec}).Error(); got != want {
			t.Errorf("step %d: %q, want %q", step, got, want)
		}
	}
}

// Only of hierarchies that limit nothing may it fail to join the cgroup.
func TestListsOf(t *testing.T) {
	root := t.TempDir()
	dir := func(hierarchy, file string) string {
		path := filepath.Join(root, hierarchy)
		if err := errors.Join(os.Mkdir(path, 0o700), os.WriteFile(filepath.Join(path, file), nil, 0o600)); err != nil {
			t.Fatal(err)
		}
		return path
	}
	cpu, memory, shared := dir("cpu", "tasks"), dir("memory", "tasks"), dir("pids,misc", "tasks")
	systemd, misc, v2 := dir("systemd", "tasks"), dir("misc", "tasks"), dir("unified", "cgroup.procs")
	for name, test := range map[string]struct {
		paths   map[string]string
		lists   []string
		unified string
	}{
		"hybrid": {map[string]string{"cpu": cpu, "cpuacct": cpu, "memory": memory, "name=systemd": systemd, "misc": misc, "": v2},
			[]string{cpu + "/tasks", memory + "/tasks", "-" + misc + "/tasks", "-" + systemd + "/tasks"}, v2},
		"misc with another": {map[string]string{"pids": shared, "misc": shared}, []string{shared + "/tasks"}, ""},
		"systemd's is gone": {map[string]string{"cpu": cpu, "name=systemd": filepath.Join(root, "none")}, []string{cpu + "/tasks"}, ""},
	} {
		lists, unified := listsOf(test.paths)
		if !slices.Equal(lists, test.lists) || unified != test.unified {
			t.Errorf("%s: %q, %q, want %q, %q", name, lists, unified, test.lists, test.unified)
		}
	}
}

// stageEnv makes the test binary a second stage: it holds descriptor 3, awaits the word to go on, and does what the variable says.
const stageEnv = "BERTH_TEST_PAUSE"

func TestMain(m *testing.M) {
	if what := os.Getenv(stageEnv); what != "" {
		fmt.Fprintln(os.Stderr, stage(what))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func stage(what string) error {
	if what == "hold" { // it is pause
		time.Sleep(time.Hour)
	}
	if n, err := unix.Read(3, make([]byte, 1)); n != 1 || err != nil {
		return fmt.Errorf("it is not told to go on: %d, %w", n, err)
	}
	switch what {
	case "executes":
		unix.CloseOnExec(3)
		return unix.Exec("/proc/self/exe", command, []string{stageEnv + "=hold"})
	case "is killed":
		return unix.Kill(os.Getpid(), unix.SIGKILL)
	}
	_, err := unix.Write(3, binary.NativeEndian.AppendUint32(binary.NativeEndian.AppendUint32(nil, uint32(len(steps)-1)), uint32(unix.ENOENT)))
	return err
}

// The end of the second stage's socket says that it has executed pause, unless it was killed meanwhile.
func TestExecute(t *testing.T) {
	for what, want := range map[string]string{"executes": "", "is killed": "it was killed", "fails": "execute it: no such file or directory"} {
		t.Run(what, func(t *testing.T) {
			for range 10 { // the socket of one that is killed is closed a moment before it has ended
				m, second := startStage(t, what)
				err := m.Execute()
				switch {
				case want == "" && err != nil, want != "" && (err == nil || err.Error() != want):
					t.Errorf("Execute: %v, want %q", err, want)
				}
				_ = second.Process.Kill() // it may have ended,
				_ = second.Wait()         // and been reaped
			}
		})
	}
}

// startStage starts a second stage, which alone has the other end of m.child.
func startStage(t *testing.T, what string) (*Maker, *exec.Cmd) {
	t.Helper()
	second := exec.Command("/proc/self/exe")
	second.Env, second.Stderr = append(os.Environ(), stageEnv+"="+what), t.Output()
	m := &Maker{Launch: plainOrder(), first: exec.Command("true")}
	for _, s := range []struct {
		cmd  *exec.Cmd
		ours **os.File
	}{{m.first, &m.parent}, {second, &m.child}} {
		fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		*s.ours = os.NewFile(uintptr(fds[0]), "ours")
		theirs := os.NewFile(uintptr(fds[1]), "theirs")
		s.cmd.ExtraFiles = []*os.File{theirs}
		if err := errors.Join(s.cmd.Start(), theirs.Close()); err != nil {
			t.Fatal(err)
		}
	}
	m.pid = second.Process.Pid
	var err error
	if m.second, err = pidfd.Open(m.pid); err != nil {
		t.Fatal(err)
	}
	return m, second
}
