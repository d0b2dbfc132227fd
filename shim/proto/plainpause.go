package proto

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/internal/rootfs"
)

// PauseArgs is the command of berth's own pause, below its root filesystem.
var PauseArgs = []string{"/pause"}

// MaxPauseGroups is the number of additional groups that pause.c has space for.
const MaxPauseGroups = 64

// PauseKind is how a sandbox's pause is made. The daemon decides it when it plans the sandbox.
type PauseKind string

const (
	// PlainPause is berth's own pause, whose program makes the namespaces itself ("pause enter").
	// It has no /proc and no /dev, because pause uses neither. Its launcher can serve again.
	PlainPause PauseKind = "plain"
	// ContainerPause is a pause that libcontainer or an OCI runtime makes like a container.
	ContainerPause PauseKind = "container"
)

// FitsPlainPause returns whether a PlainPause carries out the whole request. It must be for berth's
// own pause, and libcontainer must not be needed for its spec.
func (l *Launch) FitsPlainPause() bool {
	return l.Runtime == nil && l.RootPlace == "" && len(l.Volumes) == 0 &&
		isPlainRoot(l.Rootfs) && isPlainSpec(l.Spec)
}

func isPlainRoot(r rootfs.Spec) bool {
	return r.Upper == "" && r.Label == "" && r.IDMap == nil && len(r.Layers) == 1 && r.Layers[0].Kind == rootfs.Directory
}

// isPlainSpec returns false for every field that it does not know.
func isPlainSpec(s *specs.Spec) bool {
	if s == nil || s.Process == nil || s.Linux == nil {
		return false
	}
	p, l := s.Process, s.Linux
	known := &specs.Spec{
		Version:  s.Version,
		Root:     &specs.Root{Readonly: true},
		Hostname: s.Hostname,
		Mounts:   s.Mounts,
		Process: &specs.Process{
			Args:            p.Args,
			Env:             p.Env,
			Cwd:             "/",
			User:            specs.User{UID: p.User.UID, GID: p.User.GID, AdditionalGids: p.User.AdditionalGids},
			OOMScoreAdj:     p.OOMScoreAdj,
			Capabilities:    &specs.LinuxCapabilities{},
			NoNewPrivileges: p.NoNewPrivileges,
		},
		Linux: &specs.Linux{
			CgroupsPath: l.CgroupsPath,
			Namespaces:  l.Namespaces,
			Resources:   l.Resources,
			Sysctl:      l.Sysctl,
			Seccomp:     l.Seccomp,
		},
	}
	flags, err := PauseNamespaces(s)
	return reflect.DeepEqual(s, known) && err == nil && slices.Equal(p.Args, PauseArgs) &&
		len(p.User.AdditionalGids) <= MaxPauseGroups &&
		!slices.ContainsFunc(s.Mounts, isNeededMount) && allowsPause(l.Seccomp) && ownsSysctls(flags, l.Sysctl)
}

// PauseNamespaces returns the clone flags of a plain pause's namespaces. With CLONE_NEWNET the
// pause joins an existing network namespace. It creates all others.
func PauseNamespaces(s *specs.Spec) (flags uintptr, err error) {
	kinds := map[specs.LinuxNamespaceType]uintptr{
		specs.MountNamespace: unix.CLONE_NEWNS, specs.PIDNamespace: unix.CLONE_NEWPID, specs.IPCNamespace: unix.CLONE_NEWIPC,
		specs.UTSNamespace: unix.CLONE_NEWUTS, specs.NetworkNamespace: unix.CLONE_NEWNET,
	}
	for _, ns := range s.Linux.Namespaces {
		flag, known := kinds[ns.Type]
		if !known || flags&flag != 0 || (ns.Path != "") != (ns.Type == specs.NetworkNamespace) {
			return 0, fmt.Errorf("unsupported namespace %s at %q", ns.Type, ns.Path)
		}
		flags |= flag
	}
	if flags&unix.CLONE_NEWNS == 0 || s.Hostname != "" && flags&unix.CLONE_NEWUTS == 0 {
		return 0, errors.New("a namespace is missing")
	}
	return flags, nil
}

// ipcSysctls are the sysctls of an IPC namespace, besides fs.mqueue.*.
var ipcSysctls = []string{"kernel.msgmax", "kernel.msgmnb", "kernel.msgmni", "kernel.sem", "kernel.shmall",
	"kernel.shmmax", "kernel.shmmni", "kernel.shm_rmid_forced"}

// ownsSysctls returns whether all sysctls belong to the pause's own namespaces. For other sysctls
// libcontainer returns a clear error.
func ownsSysctls(flags uintptr, sysctls map[string]string) bool {
	for name := range sysctls {
		var namespace uintptr
		switch {
		case slices.Contains(ipcSysctls, name), strings.HasPrefix(name, "fs.mqueue."):
			namespace = unix.CLONE_NEWIPC
		case strings.HasPrefix(name, "net."):
			namespace = unix.CLONE_NEWNET
		case name == "kernel.domainname":
			namespace = unix.CLONE_NEWUTS
		}
		if flags&namespace == 0 || strings.Contains(name, "/") { // a path with dots could lead elsewhere
			return false
		}
	}
	return true
}

// isNeededMount returns false for the mounts that a plain pause leaves out.
func isNeededMount(m specs.Mount) bool {
	return (m.Destination != "/proc" || m.Type != "proc") && (m.Destination != "/dev" || m.Type != "tmpfs")
}

// PauseSyscalls are the system calls of pause. The filter in pause.c allows these only.
var PauseSyscalls = []string{
	"execve", "exit_group", "restart_syscall",
	"rt_sigprocmask", "rt_sigtimedwait", "wait4", "write",
}

// allowsPause returns whether a seccomp profile allows all of pause's system calls with any
// arguments. Then the filter in pause.c is at least as strict as the profile.
func allowsPause(profile *specs.LinuxSeccomp) bool {
	if profile == nil {
		return true
	}
	// Metadata without a path are a base profile.
	if profile.ListenerPath != "" || profile.ListenerMetadata != "" {
		return false
	}
	for _, name := range PauseSyscalls {
		rules := slices.DeleteFunc(slices.Clone(profile.Syscalls),
			func(c specs.LinuxSyscall) bool { return !slices.Contains(c.Names, name) })
		if len(rules) == 0 && profile.DefaultAction == specs.ActAllow {
			continue
		}
		if len(rules) != 1 || rules[0].Action != specs.ActAllow || len(rules[0].Args) > 0 {
			return false
		}
	}
	return true
}
