package proto

import (
	"testing"

	"github.com/moby/profiles/seccomp"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"berth/internal/rootfs"
	"berth/shim/ociruntime"
)

func plainOrder() *Launch {
	return &Launch{
		Pause:  PlainPause,
		Rootfs: rootfs.Spec{Layers: []rootfs.Layer{{Kind: rootfs.Directory, Path: "/pause-root"}}},
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

func TestFitsPlainPause(t *testing.T) {
	if !plainOrder().FitsPlainPause() {
		t.Fatal("a minimal pause does not fit")
	}
	namespace := func(kind specs.LinuxNamespaceType, path string) func(*Launch) {
		return func(o *Launch) {
			o.Spec.Linux.Namespaces = append(o.Spec.Linux.Namespaces, specs.LinuxNamespace{Type: kind, Path: path})
		}
	}
	for name, change := range map[string]func(*Launch){
		"OCI runtime":                  func(o *Launch) { o.Runtime = &ociruntime.Runtime{} },
		"root on another mount point":  func(o *Launch) { o.RootPlace = "/run/berth-rootfs" },
		"writable layer":               func(o *Launch) { o.Rootfs.Upper = "/upper" },
		"SELinux label of its root":    func(o *Launch) { o.Rootfs.Label = "system_u:object_r:container_file_t:s0" },
		"ID-mapped root":               func(o *Launch) { o.Rootfs.IDMap = &rootfs.IDMap{} },
		"two layers":                   func(o *Launch) { o.Rootfs.Layers = append(o.Rootfs.Layers, o.Rootfs.Layers[0]) },
		"other command":                func(o *Launch) { o.Spec.Process.Args = []string{"/bin/sh"} },
		"sysctl of the node":           func(o *Launch) { o.Spec.Linux.Sysctl = map[string]string{"kernel.core_pattern": "|/x"} },
		"sysctl of a shared namespace": func(o *Launch) { o.Spec.Linux.Sysctl = map[string]string{"kernel.shmmax": "1"} },
		"sysctl with a path": func(o *Launch) {
			o.Spec.Linux.Sysctl = map[string]string{"net.x/../../kernel.core_pattern": "|/x"}
		},
		"capabilities":                   func(o *Launch) { o.Spec.Process.Capabilities.Bounding = []string{"CAP_CHOWN"} },
		"all capabilities":               func(o *Launch) { o.Spec.Process.Capabilities = nil },
		"SELinux":                        func(o *Launch) { o.Spec.Process.SelinuxLabel = "system_u:system_r:container_t:s0" },
		"AppArmor":                       func(o *Launch) { o.Spec.Process.ApparmorProfile = "default" },
		"arguments":                      func(o *Launch) { o.Spec.Process.Args = []string{"/pause", "-v"} },
		"working directory":              func(o *Launch) { o.Spec.Process.Cwd = "/dev" },
		"limits":                         func(o *Launch) { o.Spec.Process.Rlimits = []specs.POSIXRlimit{{Type: "RLIMIT_CORE"}} },
		"hooks":                          func(o *Launch) { o.Spec.Hooks = &specs.Hooks{} },
		"other mount":                    func(o *Launch) { o.Spec.Mounts = append(o.Spec.Mounts, specs.Mount{Destination: "/etc/hosts"}) },
		"masked paths":                   func(o *Launch) { o.Spec.Linux.MaskedPaths = []string{"/proc/kcore"} },
		"writable root":                  func(o *Launch) { o.Spec.Root.Readonly = false },
		"user namespace":                 namespace(specs.UserNamespace, "/run/berth/pods/1/userns"),
		"cgroup namespace":               namespace(specs.CgroupNamespace, ""),
		"PID namespace by path":          namespace(specs.PIDNamespace, "/proc/1/ns/pid"),
		"duplicate namespace":            namespace(specs.MountNamespace, ""),
		"new network":                    func(o *Launch) { o.Spec.Linux.Namespaces[2].Path = "" },
		"hostname without UTS namespace": func(o *Launch) { o.Spec.Linux.Namespaces = o.Spec.Linux.Namespaces[:1] },
		"no mount namespace":             func(o *Launch) { o.Spec.Linux.Namespaces = o.Spec.Linux.Namespaces[1:] },
		"strict seccomp":                 func(o *Launch) { o.Spec.Linux.Seccomp = &specs.LinuxSeccomp{DefaultAction: specs.ActErrno} },
		"no spec":                        func(o *Launch) { o.Spec = nil },
	} {
		t.Run(name, func(t *testing.T) {
			o := plainOrder()
			change(o)
			if o.FitsPlainPause() {
				t.Error("a plain pause would ignore a part of the request")
			}
		})
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
		"none":                     {nil, true},
		"default profile":          {byDefault, true},
		"all allowed":              {&specs.LinuxSeccomp{DefaultAction: specs.ActAllow}, true},
		"another call denied":      {&specs.LinuxSeccomp{DefaultAction: specs.ActAllow, Syscalls: []specs.LinuxSyscall{{Names: []string{"mkdir"}, Action: specs.ActErrno}}}, true},
		"one of its calls denied":  {&specs.LinuxSeccomp{DefaultAction: specs.ActAllow, Syscalls: rule(specs.ActErrno)}, false},
		"condition on an argument": {&specs.LinuxSeccomp{DefaultAction: specs.ActAllow, Syscalls: rule(specs.ActAllow, specs.LinuxSeccompArg{Op: specs.OpEqualTo})}, false},
		"two rules":                {&specs.LinuxSeccomp{DefaultAction: specs.ActAllow, Syscalls: append(rule(specs.ActAllow), rule(specs.ActLog)...)}, false},
		"logged":                   {&specs.LinuxSeccomp{DefaultAction: specs.ActLog}, false},
		"all denied":               {&specs.LinuxSeccomp{DefaultAction: specs.ActErrno}, false},
		"listener":                 {&specs.LinuxSeccomp{DefaultAction: specs.ActAllow, ListenerPath: "/run/listener"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := allowsPause(test.profile); got != test.want {
				t.Errorf("allowsPause = %v, want %v", got, test.want)
			}
		})
	}
}
