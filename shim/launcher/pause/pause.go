// Package pause makes berth's own pause, which needs so little that it can do without libcontainer's init: its program
// makes the pod's namespaces itself ("pause enter", shim/pause/pause.c). That takes a tenth of the CPU time, and leaves the
// launcher as it was, so that it can serve again.
//
// What such a pause lacks of a container, beside what Plain tells of, is /proc and /dev, of which it uses nothing. libcontainer's
// state is there as far as berth reads it (cgroup.FromState).
package pause

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/cgroups/manager"
	"github.com/opencontainers/runc/libcontainer/specconv"
	"github.com/opencontainers/runc/libcontainer/utils"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/internal/cgroup"
	"berth/internal/cleanup"
	"berth/internal/failpoint"
	"berth/internal/pidfd"
	"berth/internal/rootfs"
	"berth/shim/proto"
)

// Maker makes the pause of one order. Its methods are called in this order.
type Maker struct {
	*proto.Launch
	stateRoot string // of libcontainer
	undo      *cleanup.List
	group     *cgroup.Group
	mgr       cgroups.Manager
	cgroups   *cgroups.Cgroup

	lists   []string // files by which the first stage moves itself into the cgroup, see listsOf; none: it is moved
	unified string   // the cgroup's directory in v2's hierarchy beside those of v1, in which it is born; empty: there is none

	pid    int
	first  *exec.Cmd // makes the second stage, which becomes pause, and is its parent; nil from Execute on
	second *os.File  // pidfd
	parent *os.File  // our end of the socket of the first stage
	child  *os.File  // and of the second
	going  bool      // the first stage was let go
}

// Plain tells whether an order is for a pause that Maker can make.
func Plain(o *proto.Launch) bool {
	return o.Pause && o.BuiltIn && o.Runtime == nil && o.RootPlace == "" && len(o.Volumes) == 0 && isPlainRoot(o.Rootfs) && isPlainSpec(o.Spec)
}

func isPlainRoot(r rootfs.Spec) bool {
	return r.Upper == "" && r.Label == "" && r.IDMap == nil && len(r.Layers) == 1 && r.Layers[0].Kind == rootfs.Directory
}

// isPlainSpec is false for everything that it does not know.
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
	flags, err := namespaces(s)
	return reflect.DeepEqual(s, known) && err == nil && slices.Equal(p.Args, command) && len(p.User.AdditionalGids) <= maxGroups &&
		!slices.ContainsFunc(s.Mounts, isNeededMount) && allowsPause(l.Seccomp) && ownsSysctls(flags, l.Sysctl)
}

// command is what the second stage executes, and executed what /proc/PID/cmdline is then.
var (
	command  = []string{"/pause"}
	executed = strings.Join(command, "\x00") + "\x00"
)

// ipcSysctls are those of an IPC namespace, but for the ones below fs.mqueue.
var ipcSysctls = []string{"kernel.msgmax", "kernel.msgmnb", "kernel.msgmni", "kernel.sem", "kernel.shmall", "kernel.shmmax", "kernel.shmmni", "kernel.shm_rmid_forced"}

// ownsSysctls tells whether sysctls are those of the pause's own namespaces, by flags. Of others libcontainer says why they cannot be.
func ownsSysctls(flags uintptr, sysctls map[string]string) bool {
	for name := range sysctls {
		var of uintptr
		switch {
		case slices.Contains(ipcSysctls, name), strings.HasPrefix(name, "fs.mqueue."):
			of = unix.CLONE_NEWIPC
		case strings.HasPrefix(name, "net."):
			of = unix.CLONE_NEWNET
		case name == "kernel.domainname":
			of = unix.CLONE_NEWUTS
		}
		if flags&of == 0 || strings.Contains(name, "/") { // a path with dots could lead elsewhere
			return false
		}
	}
	return true
}

// maxGroups is the size of pause.c's list.
const maxGroups = 64

// isNeededMount is false for those that pause does without.
func isNeededMount(m specs.Mount) bool {
	return (m.Destination != "/proc" || m.Type != "proc") && (m.Destination != "/dev" || m.Type != "tmpfs")
}

// calls are the system calls of pause; pause.c's filter has them and no others.
var calls = []string{"execve", "exit_group", "restart_syscall", "rt_sigprocmask", "rt_sigtimedwait", "wait4", "write"}

// allowsPause tells whether a seccomp profile allows pause what it does, whatever the arguments are. It never does anything
// else, so a filter that allows nothing else is as good as the profile's.
func allowsPause(profile *specs.LinuxSeccomp) bool {
	if profile == nil {
		return true
	}
	if profile.ListenerPath != "" {
		return false
	}
	for _, name := range calls {
		rules := slices.DeleteFunc(slices.Clone(profile.Syscalls), func(c specs.LinuxSyscall) bool { return !slices.Contains(c.Names, name) })
		if len(rules) == 0 && profile.DefaultAction == specs.ActAllow {
			continue
		}
		if len(rules) != 1 || rules[0].Action != specs.ActAllow || len(rules[0].Args) > 0 {
			return false
		}
	}
	return true
}

// namespaces returns the clone flags of the namespaces that pause is to make, with CLONE_NEWNET if it is to join one.
func namespaces(s *specs.Spec) (flags uintptr, err error) {
	kinds := map[specs.LinuxNamespaceType]uintptr{
		specs.MountNamespace: unix.CLONE_NEWNS, specs.PIDNamespace: unix.CLONE_NEWPID, specs.IPCNamespace: unix.CLONE_NEWIPC,
		specs.UTSNamespace: unix.CLONE_NEWUTS, specs.NetworkNamespace: unix.CLONE_NEWNET,
	}
	for _, ns := range s.Linux.Namespaces {
		flag, known := kinds[ns.Type]
		if !known || flags&flag != 0 || (ns.Path != "") != (ns.Type == specs.NetworkNamespace) {
			return 0, fmt.Errorf("namespace %s at %q", ns.Type, ns.Path)
		}
		flags |= flag
	}
	if flags&unix.CLONE_NEWNS == 0 || s.Hostname != "" && flags&unix.CLONE_NEWUTS == 0 {
		return 0, errors.New("a namespace is missing")
	}
	return flags, nil
}

// Prepare finds out whether the spec can be carried out, which makes nothing. InvalidArgument if it can't.
// What is made later is entered in undo.
func (m *Maker) Prepare(stateRoot string, o *proto.Launch, group *cgroup.Group, undo *cleanup.List) error {
	m.Launch, m.stateRoot, m.group, m.undo = o, stateRoot, group, undo
	config, err := specconv.CreateLibcontainerConfig(&specconv.CreateOpts{CgroupName: m.ID, UseSystemdCgroup: m.SystemdCgroup, Spec: m.Spec})
	if err != nil {
		return proto.Errorf(proto.InvalidArgument, "runtime spec: %v", err)
	}
	m.cgroups = config.Cgroups
	if m.mgr, err = manager.New(m.cgroups); err != nil {
		return fmt.Errorf("cgroup: %w", err)
	}
	return nil
}

// Create makes pause, in its namespaces and its cgroup; it waits for Execute.
func (m *Maker) Create() (pid int, err error) {
	if err := m.checkCgroup(); err != nil {
		return 0, err
	}
	if err := m.writeState(); err != nil {
		return 0, err
	}
	m.undo.Add("destroy pause "+m.ID, m.Destroy)
	for _, step := range []func() error{m.makeCgroup, m.start, m.confine, m.letGo} {
		if err := step(); err != nil {
			return 0, err
		}
	}
	if pid, err = m.receive(m.parent, started); err != nil {
		return 0, err
	}
	if m.second, err = pidfd.Open(pid); err != nil { // its parent does not reap it yet: it is this one
		return 0, err
	}
	if _, err = m.receive(m.child, ready); err != nil {
		return 0, err
	}
	failpoint.Reach("launcher.pause-ready")
	m.pid = pid
	return pid, nil
}

// checkCgroup refuses a cgroup that somebody else is in, or that would stop us.
func (m *Maker) checkCgroup() error {
	pids, err := m.group.Procs()
	if err != nil {
		return err
	}
	if len(pids) > 0 {
		return fmt.Errorf("its cgroup is not empty: it has %d processes", len(pids))
	}
	state, err := m.mgr.GetFreezerState()
	if err != nil {
		return fmt.Errorf("look whether its cgroup is frozen: %w", err)
	}
	if state == cgroups.Frozen {
		return errors.New("its cgroup is frozen")
	}
	return nil
}

// writeState writes what names the cgroup to who knows nothing but the ID. As a
// container's it is there before the first process.
func (m *Maker) writeState() error {
	dir := filepath.Join(m.stateRoot, m.ID)
	var state struct {
		ID     string `json:"id"`
		Config struct {
			Cgroups *cgroups.Cgroup `json:"cgroups"`
		} `json:"config"`
	}
	state.ID = m.ID
	state.Config.Cgroups = &cgroups.Cgroup{Name: m.cgroups.Name, Parent: m.cgroups.Parent, Path: m.cgroups.Path, ScopePrefix: m.cgroups.ScopePrefix, Systemd: m.cgroups.Systemd}
	data, err := json.Marshal(state)
	if err != nil {
		return fmt.Errorf("encode its state: %w", err)
	}
	failpoint.Reach("launcher.make-state")
	if err := errors.Join(os.MkdirAll(m.stateRoot, 0o700), os.Mkdir(dir, 0o711)); err != nil {
		return fmt.Errorf("make its state: %w", err)
	}
	m.undo.Add("remove "+dir, func() error {
		failpoint.Reach("launcher.remove-state")
		return os.RemoveAll(dir)
	})
	failpoint.Reach("launcher.state-made")
	if err := proto.WriteFile(dir, "state.json", data); err != nil {
		return fmt.Errorf("write its state: %w", err)
	}
	failpoint.Reach("launcher.state-written")
	return nil
}

// makeCgroup makes the cgroup that the first stage moves itself into, if it does.
func (m *Maker) makeCgroup() error {
	if !cgroup.MovesItself(m.SystemdCgroup) {
		return nil
	}
	const nobody = -1 // to package cgroups
	failpoint.Reach("launcher.make-cgroup")
	if err := m.mgr.Apply(nobody); err != nil {
		return fmt.Errorf("make its cgroup: %w", err)
	}
	failpoint.Reach("launcher.cgroup-made")
	m.lists, m.unified = listsOf(m.mgr.GetPaths())
	return nil
}

// optional are the hierarchies that package cgroups does not mind to fail to join (NameGroup), beside v2's.
var optional = []string{"name=systemd", "misc"}

// listsOf returns by which files a process joins a cgroup, as pause.c takes them, and the cgroup's directory in v2's hierarchy, empty if there is none.
// paths are the cgroup's directories by controller.
func listsOf(paths map[string]string) (lists []string, unified string) {
	controllers := map[string][]string{} // by directory: a hierarchy may have several
	for name, dir := range paths {
		controllers[dir] = append(controllers[dir], name)
	}
	for _, dir := range slices.Sorted(maps.Keys(controllers)) {
		needed := slices.ContainsFunc(controllers[dir], func(name string) bool { return !slices.Contains(optional, name) })
		tasks := filepath.Join(dir, "tasks")
		switch {
		case unix.Access(tasks, unix.F_OK) == nil && needed:
			lists = append(lists, tasks)
		case unix.Access(tasks, unix.F_OK) == nil:
			lists = append(lists, "-"+tasks)
		case unix.Access(dir, unix.F_OK) == nil:
			unified = dir
		} // else it is one of systemd's that could not be made, which nobody needs
	}
	return lists, unified
}

// start starts the first stage, which waits.
func (m *Maker) start() error {
	flags, err := namespaces(m.Spec)
	if err != nil {
		return err
	}
	files, err := m.openFiles()
	defer closeAll(files)
	if err != nil {
		return err
	}
	if err := utils.CloseExecFrom(3); err != nil { // what this process was born with, as libcontainer does
		return fmt.Errorf("mark files close-on-exec: %w", err)
	}
	failpoint.Reach("launcher.start-pause")
	err = m.startInCgroup(flags, files)
	if err != nil && m.unified != "" { // CLONE_INTO_CGROUP is Linux 5.7: it is moved
		m.lists, m.unified = nil, ""
		err = m.startInCgroup(flags, files)
	}
	if err != nil {
		return fmt.Errorf("start it: %w", err)
	}
	failpoint.Reach("launcher.pause-started")
	return nil
}

// startInCgroup starts it in unified, if there is that.
func (m *Maker) startInCgroup(flags uintptr, files []*os.File) error {
	dir := m.Rootfs.Layers[0].Path
	m.first = &exec.Cmd{Path: filepath.Join(dir, m.Spec.Process.Args[0]), Args: arguments(flags, dir, m.lists, m.Spec), Env: m.Spec.Process.Env, Dir: "/", ExtraFiles: files}
	if m.unified == "" {
		return m.first.Start()
	}
	unified, err := os.Open(m.unified)
	if err != nil {
		return err
	}
	defer unified.Close()
	m.first.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(unified.Fd())}
	return m.first.Start()
}

// arguments are the arguments of "pause enter".
func arguments(flags uintptr, dir string, lists []string, s *specs.Spec) []string {
	mode := ""
	switch {
	case s.Linux.Seccomp != nil:
		mode = "f"
	case s.Process.NoNewPrivileges:
		mode = "n"
	}
	var groups []string
	for _, g := range s.Process.User.AdditionalGids {
		groups = append(groups, number(g))
	}
	args := []string{s.Process.Args[0], "enter", number(flags), dir, s.Hostname, number(s.Process.User.UID), number(s.Process.User.GID),
		strings.Join(groups, ","), mode, strconv.Itoa(len(lists))}
	args = append(args, lists...)
	for _, key := range sysctlNames(s) {
		args = append(args, "/proc/sys/"+strings.ReplaceAll(key, ".", "/"), s.Linux.Sysctl[key])
	}
	return args
}

func number[T uint32 | uintptr](n T) string { return strconv.FormatUint(uint64(n), 10) }

// sysctlNames has them in the order in which they are set.
func sysctlNames(s *specs.Spec) []string { return slices.Sorted(maps.Keys(s.Linux.Sysctl)) }

// openFiles returns the stages' descriptors.
func (m *Maker) openFiles() (files []*os.File, err error) {
	for _, ours := range []**os.File{&m.parent, &m.child} {
		fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return files, os.NewSyscallError("socketpair", err)
		}
		*ours = os.NewFile(uintptr(fds[0]), "pause")
		files = append(files, os.NewFile(uintptr(fds[1]), "pause"))
	}
	for _, ns := range m.Spec.Linux.Namespaces {
		if ns.Type == specs.NetworkNamespace {
			f, err := os.Open(ns.Path)
			if err != nil {
				return files, fmt.Errorf("its network namespace: %w", err)
			}
			files = append(files, f)
		}
	}
	return files, nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		if f != nil {
			_ = f.Close() // nothing was written
		}
	}
}

// confine puts the first stage into the cgroup, unless it moves itself, and sets the limits. The second one is born there.
func (m *Maker) confine() error {
	pid := m.first.Process.Pid
	if len(m.lists) == 0 {
		failpoint.Reach("launcher.join-cgroup")
		if err := m.mgr.Apply(pid); err != nil {
			return fmt.Errorf("join its cgroup: %w", err)
		}
		failpoint.Reach("launcher.cgroup-joined")
	}
	failpoint.Reach("launcher.set-cgroup")
	if err := keepLockLimit(func() error { return m.mgr.Set(m.cgroups.Resources) }); err != nil {
		return fmt.Errorf("set up its cgroup: %w", err)
	}
	failpoint.Reach("launcher.cgroup-set")
	if score := m.Spec.Process.OOMScoreAdj; score != nil {
		if err := os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid), []byte(strconv.Itoa(*score)), 0); err != nil {
			return fmt.Errorf("set its oom_score_adj: %w", err)
		}
	}
	return nil
}

// keepLockLimit calls set with this process's limit of locked memory as it is, and as it is again afterwards: to load the program that says which
// devices may be used (cgroup v2), the library lifts it, for kernels before 5.11, and what the launcher starts next would have no limit.
func keepLockLimit(set func() error) error {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &limit); err != nil {
		return os.NewSyscallError("getrlimit", err)
	}
	if err := set(); err != nil {
		return err
	}
	return os.NewSyscallError("setrlimit", unix.Setrlimit(unix.RLIMIT_MEMLOCK, &limit))
}

// letGo lets the first stage join the cgroup and make the second.
func (m *Maker) letGo() error {
	failpoint.Reach("launcher.enter-pause")
	m.going = true
	return sayTo(m.parent)
}

// sayTo lets a stage go on.
func sayTo(socket *os.File) error {
	if _, err := socket.Write([]byte("+")); err != nil {
		return fmt.Errorf("it is lost: %w", err)
	}
	return nil
}

// Reports of pause.c: these two, and the steps that failed.
const (
	started = iota
	ready
	stepClone
	_          // setns
	stepSysctl // which one is in the bits above the lowest eight, counted from one
)

var steps = []string{"started", "ready", "clone", "join its network namespace", "", "make its mounts private", "mount its root",
	"change its root", "set its hostname", "join a keyring", "set its groups", "drop its capabilities", "change its user",
	"set no_new_privs", "set its filter of system calls", "join its cgroup", "execute it"}

// stepError is a step of pause's that failed.
type stepError struct {
	step  int
	errno unix.Errno
	spec  *specs.Spec
}

func (e *stepError) Error() string {
	names := sysctlNames(e.spec)
	switch which := e.step >> 8; {
	case e.step&0xff == stepSysctl && which > 0 && which <= len(names):
		name := names[which-1]
		return fmt.Sprintf("failed to write sysctl %s = %q: %v", name, e.spec.Linux.Sysctl[name], e.errno)
	case e.step < len(steps) && e.step != stepSysctl:
		return steps[e.step] + ": " + e.errno.Error()
	}
	return fmt.Sprintf("step %d: %v", e.step, e.errno)
}

// receive waits for a report of success, and returns its value.
func (m *Maker) receive(socket *os.File, want int) (int, error) {
	var data [9]byte // one more than there are
	n, err := socket.Read(data[:])
	if err != nil {
		return 0, fmt.Errorf("it is lost: %w", err)
	}
	if n != 8 {
		return 0, fmt.Errorf("it is lost: %d bytes of it", n)
	}
	step, value := int(binary.NativeEndian.Uint32(data[:])), int(binary.NativeEndian.Uint32(data[4:]))
	if step != want {
		return 0, &stepError{step, unix.Errno(value), m.Spec}
	}
	return value, nil
}

// Execute lets it become pause, and leaves it to the reaper of orphans.
func (m *Maker) Execute() error {
	first := m.first
	m.first = nil
	err := m.parent.Close() // upon which it ends
	if sayErr := sayTo(m.child); sayErr != nil {
		return errors.Join(sayErr, err)
	}
	_, reportErr := m.receive(m.child, ready) // it only says what failed
	if errors.Is(reportErr, io.EOF) {
		reportErr = m.checkAlive()
	}
	_ = first.Wait() // it has nothing to say
	return errors.Join(reportErr, err, m.child.Close(), m.second.Close())
}

// endTime is more than a process needs from closing its files to its end, also where it gets no processor for a while. Only one that ends is waited for.
const endTime = 10 * time.Second

// checkAlive tells a pause that has executed its command, which closed its socket, from one that was killed. That one's socket
// is closed, and its arguments are gone, a moment before its pidfd says so (do_exit: exit_mm, exit_files, exit_notify).
func (m *Maker) checkAlive() error {
	alive, err := m.hasExecuted()
	if err != nil || !alive {
		ctx, cancel := context.WithTimeout(context.Background(), endTime)
		defer cancel()
		if err := pidfd.Wait(ctx, m.second); err != nil && ctx.Err() == nil {
			return err
		}
	}
	ended, err := pidfd.Exited(m.second) // if not, what was read is not another process's with the same ID
	if err == nil && ended {
		err = errors.New("it was killed")
	}
	return err
}

// hasExecuted compares the pause's arguments. No more is read: a process decides itself how long
// what /proc/PID/cmdline tells is.
func (m *Maker) hasExecuted() (bool, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/cmdline", m.pid))
	if err != nil {
		return false, err
	}
	defer f.Close()
	args, err := io.ReadAll(io.LimitReader(f, int64(len(executed))+1))
	return string(args) == executed, err
}

// reapTime is how long the first stage may take to reap the second before both are killed.
const reapTime = time.Second

// destroyPatience is how long it is tried to get rid of processes.
const destroyPatience = 10 * time.Second

// Destroy removes what there is of pause, but for its state.
func (m *Maker) Destroy() error {
	failpoint.Reach("launcher.destroy-pause")
	ctx, cancel := context.WithTimeout(context.Background(), destroyPatience)
	defer cancel()
	if m.first != nil && m.first.Process != nil {
		m.reap(ctx)
	}
	err := errors.Join(m.group.Kill(ctx), m.group.Destroy(ctx))
	failpoint.Reach("launcher.pause-destroyed")
	return err
}

// reap ends both stages. The first one is the parent of the second.
func (m *Maker) reap(ctx context.Context) {
	failpoint.Reach("launcher.kill-pause")
	if m.second != nil {
		_ = pidfd.Signal(m.second, unix.SIGKILL) // it may have ended
		_ = m.second.Close()
	}
	_ = m.child.Close() // a second stage that nobody knows ends
	if m.going {
		_ = sayTo(m.parent) // it reaps the second; it may have ended
	}
	_ = m.parent.Close() // still waiting for its first word it ends, and there is no second
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = m.first.Wait() // it has nothing to say
	}()
	select {
	case <-ended:
		return
	case <-time.After(reapTime):
	}
	_ = m.group.Kill(ctx)
	_ = m.first.Process.Signal(syscall.SIGKILL) // it may not be in the cgroup
	<-ended
}
