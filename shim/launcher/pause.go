package launcher

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
	"berth/internal/failpoint"
	"berth/internal/pidfd"
	"berth/shim/proto"
)

// pauseBackend makes a plain pause (proto.PlainPause) without libcontainer's init. The
// pause's program makes the pod's namespaces itself ("pause enter", shim/pause/pause.c). This takes
// a tenth of the CPU time. It does not change the launcher, so the launcher can serve again.
//
// The program has two stages. The first stage joins the cgroup and clones the second stage with the
// namespaces. If the launch fails, it reaps the second stage. The second sets itself up and
// executes pause.
//
// libcontainer's state file has the fields that berth reads (cgroup.FromState).
type pauseBackend struct {
	*launch
	manager cgroups.Manager
	cgroups *cgroups.Cgroup

	taskFiles []string // the first stage writes itself to these to join its cgroup (cgroup v1)
	unified   string   // the cgroup's v2 directory, where the first stage starts; empty: none

	pid        int       // of the second stage, later pause
	first      *exec.Cmd // the first stage; nil after execute
	second     *os.File  // pidfd of the second stage
	parent     *os.File  // socket to the first stage
	child      *os.File  // socket to the second stage
	firstLetGo bool      // the first stage got its byte to continue
}

// prepare only checks the spec. It returns InvalidArgument for an invalid one.
func (b *pauseBackend) prepare() error {
	if !b.FitsPlainPause() { // a part of the spec would be ignored
		return proto.Errorf(proto.InvalidArgument, "runtime spec: a plain pause does not support it")
	}
	options := &specconv.CreateOpts{CgroupName: b.ID, UseSystemdCgroup: b.SystemdCgroup, Spec: b.Spec}
	config, err := specconv.CreateLibcontainerConfig(options)
	if err != nil {
		return proto.Errorf(proto.InvalidArgument, "runtime spec: %v", err)
	}
	b.cgroups = config.Cgroups
	if b.manager, err = manager.New(b.cgroups); err != nil {
		return fmt.Errorf("open the pause's cgroup: %w", err)
	}
	return nil
}

func (b *pauseBackend) hostRoot() (uid, gid int, err error) { return 0, 0, nil }

func (b *pauseBackend) follow() (int, *os.File, error) {
	return 0, nil, errors.New("a pause has an init process and needs no follower")
}

// create makes the second stage, in its namespaces and its cgroup. It waits for execute.
func (b *pauseBackend) create() (pid int, err error) {
	if err := b.checkCgroup(); err != nil {
		return 0, err
	}
	if err := b.writeState(); err != nil {
		return 0, err
	}
	b.undo.Add("destroy pause "+b.ID, b.destroy)
	for _, step := range []func() error{b.makeCgroup, b.start, b.confine, b.letGo} {
		if err := step(); err != nil {
			return 0, err
		}
	}
	if pid, err = b.receive(b.parent, pauseStarted); err != nil {
		return 0, err
	}
	if b.second, err = pidfd.Open(pid); err != nil { // its parent has not reaped it, so the pid is valid
		return 0, err
	}
	if _, err = b.receive(b.child, pauseReady); err != nil {
		return 0, err
	}
	failpoint.Reach("launcher.pause-ready")
	b.pid = pid
	return pid, nil
}

// checkCgroup refuses a cgroup that has processes or is frozen.
func (b *pauseBackend) checkCgroup() error {
	pids, err := b.group.Procs()
	if err != nil {
		return err
	}
	if len(pids) > 0 {
		return fmt.Errorf("its cgroup is not empty: it has %d processes", len(pids))
	}
	state, err := b.manager.GetFreezerState()
	if err != nil {
		return fmt.Errorf("read the freezer state of its cgroup: %w", err)
	}
	if state == cgroups.Frozen {
		return errors.New("its cgroup is frozen")
	}
	return nil
}

// pauseCmdline is /proc/PID/cmdline of a second stage that has executed pause.
var pauseCmdline = strings.Join(proto.PauseArgs, "\x00") + "\x00"

// writeState writes the state file. Other code finds the cgroup in it by the ID. Like a container's
// state file, it exists before the first process.
func (b *pauseBackend) writeState() error {
	dir := filepath.Join(b.l.settings.StateRoot, b.ID)
	var state struct {
		ID     string `json:"id"`
		Config struct {
			Cgroups *cgroups.Cgroup `json:"cgroups"`
		} `json:"config"`
	}
	state.ID = b.ID
	state.Config.Cgroups = &cgroups.Cgroup{
		Name: b.cgroups.Name, Parent: b.cgroups.Parent, Path: b.cgroups.Path,
		ScopePrefix: b.cgroups.ScopePrefix, Systemd: b.cgroups.Systemd,
	}
	data, err := json.Marshal(state)
	if err != nil {
		return fmt.Errorf("encode its state: %w", err)
	}
	failpoint.Reach("launcher.make-state")
	if err := errors.Join(os.MkdirAll(b.l.settings.StateRoot, 0o700), os.Mkdir(dir, 0o711)); err != nil {
		return fmt.Errorf("make its state: %w", err)
	}
	b.undo.Add("remove "+dir, func() error {
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

// makeCgroup creates the cgroup if the first stage starts in it or moves itself to it.
func (b *pauseBackend) makeCgroup() error {
	if !cgroup.StartsInside(b.SystemdCgroup) {
		return nil
	}
	failpoint.Reach("launcher.make-cgroup")
	if err := b.manager.Apply(nobody); err != nil {
		return fmt.Errorf("make its cgroup: %w", err)
	}
	failpoint.Reach("launcher.cgroup-made")
	b.taskFiles, b.unified = taskFilesOf(b.manager.GetPaths())
	return nil
}

// optionalControllers are the hierarchies, besides v2, that package cgroups may fail to join
// (NameGroup).
var optionalControllers = []string{"name=systemd", "misc"}

// taskFilesOf returns the files to which a process writes itself to join a cgroup, in the form of
// pause.c. It also returns the cgroup's directory in the v2 hierarchy, or "" if there is none.
// paths are the cgroup's directories by controller.
func taskFilesOf(paths map[string]string) (lists []string, unified string) {
	controllers := map[string][]string{} // by directory, because a hierarchy may have several controllers
	for name, dir := range paths {
		controllers[dir] = append(controllers[dir], name)
	}
	for _, dir := range slices.Sorted(maps.Keys(controllers)) {
		isNeeded := func(name string) bool { return !slices.Contains(optionalControllers, name) }
		needed := slices.ContainsFunc(controllers[dir], isNeeded)
		tasks := filepath.Join(dir, "tasks")
		switch {
		case unix.Access(tasks, unix.F_OK) == nil && needed:
			lists = append(lists, tasks)
		case unix.Access(tasks, unix.F_OK) == nil:
			lists = append(lists, "-"+tasks)
		case unix.Access(dir, unix.F_OK) == nil:
			unified = dir
		} // if this controller is missing, systemd could not create the directory, and it is not needed
	}
	return lists, unified
}

// start starts the first stage. It waits for letGo.
func (b *pauseBackend) start() error {
	flags, err := proto.PauseNamespaces(b.Spec)
	if err != nil {
		return err
	}
	files, err := b.openFiles()
	defer closeFiles(files)
	if err != nil {
		return err
	}
	if err := utils.CloseExecFrom(3); err != nil { // the inherited files; libcontainer does the same
		return fmt.Errorf("mark files close-on-exec: %w", err)
	}
	failpoint.Reach("launcher.start-pause")
	err = b.startInCgroup(flags, files)
	if err != nil && b.unified != "" { // CLONE_INTO_CGROUP exists since Linux 5.7; on older kernels confine moves it
		b.taskFiles, b.unified = nil, ""
		err = b.startInCgroup(flags, files)
	}
	if err != nil {
		return fmt.Errorf("start it: %w", err)
	}
	failpoint.Reach("launcher.pause-started")
	return nil
}

// startInCgroup starts the first stage in unified, unless that is empty.
func (b *pauseBackend) startInCgroup(flags uintptr, files []*os.File) error {
	dir := b.Rootfs.Layers[0].Path
	b.first = &exec.Cmd{
		Path:       filepath.Join(dir, b.Spec.Process.Args[0]),
		Args:       pauseArguments(flags, dir, b.taskFiles, b.Spec),
		Env:        b.Spec.Process.Env,
		Dir:        "/",
		ExtraFiles: files,
	}
	if b.unified == "" {
		return b.first.Start()
	}
	unified, err := os.Open(b.unified)
	if err != nil {
		return err
	}
	defer unified.Close()
	b.first.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(unified.Fd())}
	return b.first.Start()
}

// pauseArguments returns the arguments of "pause enter".
func pauseArguments(flags uintptr, dir string, lists []string, s *specs.Spec) []string {
	mode := ""
	switch {
	case s.Linux.Seccomp != nil:
		mode = "f"
	case s.Process.NoNewPrivileges:
		mode = "n"
	}
	var groups []string
	for _, g := range s.Process.User.AdditionalGids {
		groups = append(groups, decimal(g))
	}
	args := []string{
		s.Process.Args[0], "enter", decimal(flags), dir, s.Hostname,
		decimal(s.Process.User.UID), decimal(s.Process.User.GID), strings.Join(groups, ","),
		mode, strconv.Itoa(len(lists)),
	}
	args = append(args, lists...)
	for _, key := range sysctlNames(s) {
		args = append(args, "/proc/sys/"+strings.ReplaceAll(key, ".", "/"), s.Linux.Sysctl[key])
	}
	return args
}

func decimal[T uint32 | uintptr](n T) string { return strconv.FormatUint(uint64(n), 10) }

// sysctlNames returns the sysctls in the order of pause.c's arguments.
func sysctlNames(s *specs.Spec) []string { return slices.Sorted(maps.Keys(s.Linux.Sysctl)) }

// openFiles returns the files that both stages inherit: their sockets and the network namespace.
func (b *pauseBackend) openFiles() (files []*os.File, err error) {
	for _, ours := range []**os.File{&b.parent, &b.child} {
		fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return files, os.NewSyscallError("socketpair", err)
		}
		*ours = os.NewFile(uintptr(fds[0]), "pause")
		files = append(files, os.NewFile(uintptr(fds[1]), "pause"))
	}
	for _, ns := range b.Spec.Linux.Namespaces {
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

func closeFiles(files []*os.File) {
	for _, f := range files {
		if f != nil {
			_ = f.Close() // nothing was written
		}
	}
}

// confine moves the first stage to the cgroup, unless it starts there or moves itself, and sets the
// limits. The second stage starts there.
func (b *pauseBackend) confine() error {
	pid := b.first.Process.Pid
	if len(b.taskFiles) == 0 && b.unified == "" {
		failpoint.Reach("launcher.join-cgroup")
		if err := b.manager.Apply(pid); err != nil {
			return fmt.Errorf("join its cgroup: %w", err)
		}
		failpoint.Reach("launcher.cgroup-joined")
	}
	failpoint.Reach("launcher.set-cgroup")
	if err := keepLockLimit(func() error { return b.manager.Set(b.cgroups.Resources) }); err != nil {
		return fmt.Errorf("set up its cgroup: %w", err)
	}
	failpoint.Reach("launcher.cgroup-set")
	if score := b.Spec.Process.OOMScoreAdj; score != nil {
		if err := os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid), []byte(strconv.Itoa(*score)), 0); err != nil {
			return fmt.Errorf("set its oom_score_adj: %w", err)
		}
	}
	return nil
}

// keepLockLimit calls set and restores this process's limit of locked memory. On cgroup v2 package
// cgroups lifts the limit to load the device program, for kernels before 5.11. Later children of
// the launcher would have no limit.
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

// letGo makes the first stage join the cgroup and start the second.
func (b *pauseBackend) letGo() error {
	failpoint.Reach("launcher.enter-pause")
	b.firstLetGo = true
	return tellToContinue(b.parent)
}

// tellToContinue lets a stage continue.
func tellToContinue(socket *os.File) error {
	if _, err := socket.Write([]byte("+")); err != nil {
		return fmt.Errorf("lost connection to pause: %w", err)
	}
	return nil
}

// Reports of pause.c. There are two reports of success, and one for each step that can fail.
const (
	pauseStarted = iota
	pauseReady
	stepClone
	_          // setns
	stepSysctl // the bits from 8 up hold the sysctl's number, from one
)

var pauseSteps = []string{
	"started", "ready", "clone", "join its network namespace", "", "make its mounts private",
	"mount its root", "change its root", "set its hostname", "join a keyring", "set its groups",
	"drop its capabilities", "change its user", "set no_new_privs", "set its filter of system calls",
	"join its cgroup", "execute it",
}

// pauseStepError is a failed step of pause.
type pauseStepError struct {
	step  int
	errno unix.Errno
	spec  *specs.Spec
}

func (e *pauseStepError) Error() string {
	names := sysctlNames(e.spec)
	switch which := e.step >> 8; {
	case e.step&0xff == stepSysctl && which > 0 && which <= len(names):
		name := names[which-1]
		return fmt.Sprintf("failed to write sysctl %s = %q: %v", name, e.spec.Linux.Sysctl[name], e.errno)
	case e.step < len(pauseSteps) && e.step != stepSysctl:
		return pauseSteps[e.step] + ": " + e.errno.Error()
	}
	return fmt.Sprintf("step %d: %v", e.step, e.errno)
}

// receive waits for a report of success and returns its value.
func (b *pauseBackend) receive(socket *os.File, want int) (int, error) {
	var data [9]byte // one byte more than a report has
	n, err := socket.Read(data[:])
	if err != nil {
		return 0, fmt.Errorf("lost connection to pause: %w", err)
	}
	if n != 8 {
		return 0, fmt.Errorf("lost connection to pause: got %d of 8 bytes", n)
	}
	step, value := int(binary.NativeEndian.Uint32(data[:])), int(binary.NativeEndian.Uint32(data[4:]))
	if step != want {
		return 0, &pauseStepError{step, unix.Errno(value), b.Spec}
	}
	return value, nil
}

// execute makes the second stage execute pause. The first stage exits, and the next subreaper
// adopts pause.
func (b *pauseBackend) execute() error {
	first := b.first
	b.first = nil
	err := b.parent.Close() // then the first stage exits
	if sayErr := tellToContinue(b.child); sayErr != nil {
		return errors.Join(sayErr, err)
	}
	_, reportErr := b.receive(b.child, pauseReady) // only a failure is reported
	if errors.Is(reportErr, io.EOF) {
		reportErr = b.checkAlive()
	}
	_ = first.Wait() // its status does not matter
	return errors.Join(reportErr, err, b.child.Close(), b.second.Close())
}

// endTimeout bounds the time between the closing of an exiting process's files and its end, also on
// a busy machine.
const endTimeout = 10 * time.Second

// checkAlive returns an error if the second stage was killed. Both execve and an exit close its
// socket. On an exit the kernel frees the memory with the arguments a moment before the pidfd
// becomes readable (do_exit: exit_mm, exit_files, exit_notify).
func (b *pauseBackend) checkAlive() error {
	alive, err := b.hasExecuted()
	if err != nil || !alive {
		ctx, cancel := context.WithTimeout(context.Background(), endTimeout)
		defer cancel()
		if err := pidfd.Wait(ctx, b.second); err != nil && ctx.Err() == nil {
			return err
		}
	}
	ended, err := pidfd.Exited(b.second) // if it has not exited, the pid was not reused, and cmdline was its own
	if err == nil && ended {
		err = errors.New("pause was killed")
	}
	return err
}

// hasExecuted compares the second stage's arguments with pause's. It reads only so many bytes,
// because a process controls the length of its /proc/PID/cmdline.
func (b *pauseBackend) hasExecuted() (bool, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/cmdline", b.pid))
	if err != nil {
		return false, err
	}
	defer f.Close()
	args, err := io.ReadAll(io.LimitReader(f, int64(len(pauseCmdline))+1))
	return string(args) == pauseCmdline, err
}

// reapTimeout bounds the wait for the first stage to reap the second. Then both are killed.
const reapTimeout = time.Second

// destroy removes pause and its cgroup, but not its state file.
func (b *pauseBackend) destroy() error {
	failpoint.Reach("launcher.destroy-pause")
	ctx, cancel := context.WithTimeout(context.Background(), destroyTimeout)
	defer cancel()
	if b.first != nil && b.first.Process != nil {
		b.reap(ctx)
	}
	err := errors.Join(b.group.Kill(ctx), b.group.Destroy(ctx))
	failpoint.Reach("launcher.pause-destroyed")
	return err
}

// reap ends both stages. The first stage is the parent of the second.
func (b *pauseBackend) reap(ctx context.Context) {
	failpoint.Reach("launcher.kill-pause")
	if b.second != nil {
		_ = pidfd.Signal(b.second, unix.SIGKILL) // it may have ended
		_ = b.second.Close()
	}
	_ = b.child.Close() // a second stage whose pid is not known yet exits
	if b.firstLetGo {
		_ = tellToContinue(b.parent) // it reaps the second; it may have ended
	}
	_ = b.parent.Close() // if the first stage still waits for letGo, it exits and makes no second stage
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = b.first.Wait() // its status does not matter
	}()
	select {
	case <-ended:
		return
	case <-time.After(reapTimeout):
	}
	_ = b.group.Kill(ctx)
	_ = b.first.Process.Signal(syscall.SIGKILL) // it may not be in the cgroup
	<-ended
}
