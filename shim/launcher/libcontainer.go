package launcher

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runc/libcontainer/specconv"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/internal/cgroup"
	"berth/internal/failpoint"
	"berth/internal/pidfd"
	"berth/shim/ociruntime"
	"berth/shim/proto"
)

// libcontainerBackend makes a container with libcontainer, in this process.
type libcontainerBackend struct {
	*launch
	config    *configs.Config
	container *libcontainer.Container
	process   *libcontainer.Process
}

func (b *libcontainerBackend) prepare() (err error) {
	b.config, err = specconv.CreateLibcontainerConfig(&specconv.CreateOpts{
		CgroupName:       b.ID,
		UseSystemdCgroup: b.SystemdCgroup,
		Spec:             withoutMappings(b.Spec),
	})
	if err != nil {
		return proto.Errorf(proto.InvalidArgument, "runtime spec: %v", err)
	}
	if b.Spec.Hooks != nil {
		if err := b.writeBundle(); err != nil {
			return err
		}
	}
	b.process, err = newProcess(b.Spec.Process)
	if err != nil {
		return err
	}
	b.process.Init = true
	return nil
}

// withoutMappings returns the spec. If the container joins a user namespace, it removes the ID
// mappings. libcontainer reads the mappings from the namespace and warns if the spec has them, too.
func withoutMappings(spec *specs.Spec) *specs.Spec {
	if !isMapped(spec) {
		return spec
	}
	changed, linux := *spec, *spec.Linux
	linux.UIDMappings, linux.GIDMappings = nil, nil
	changed.Linux = &linux
	return &changed
}

// isMapped reports whether a container joins a user namespace.
func isMapped(spec *specs.Spec) bool {
	joins := func(ns specs.LinuxNamespace) bool { return ns.Type == specs.UserNamespace && ns.Path != "" }
	return spec != nil && spec.Linux != nil && slices.ContainsFunc(spec.Linux.Namespaces, joins)
}

// writeBundle makes Dir the bundle of the container's hooks. Many hooks read the path of the root
// filesystem from the spec in it. The spec may hold secrets in the environment. It is removed with
// Dir.
func (b *libcontainerBackend) writeBundle() error {
	data, err := json.Marshal(b.Spec)
	if err != nil {
		return fmt.Errorf("encode the spec for hooks: %w", err)
	}
	path := filepath.Join(b.Dir, ociruntime.ConfigFile)
	b.undo.Add("remove "+path, func() error { return ignore(unix.Unlink(path), unix.ENOENT) })
	failpoint.Reach("launcher.write-spec")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		return fmt.Errorf("write the spec for hooks: %w", err)
	}
	failpoint.Reach("launcher.spec-written")
	// libcontainer's default is the working directory.
	b.config.Labels = slices.DeleteFunc(b.config.Labels, func(l string) bool { return strings.HasPrefix(l, "bundle=") })
	b.config.Labels = append(b.config.Labels, "bundle="+b.Dir)
	return nil
}

func (b *libcontainerBackend) hostRoot() (uid, gid int, err error) { return hostRootOf(b.config) }

func hostRootOf(config *configs.Config) (uid, gid int, err error) {
	if uid, err = config.HostRootUID(); err != nil {
		return 0, 0, err
	}
	gid, err = config.HostRootGID()
	return uid, gid, err
}

// makeContainer makes libcontainer's container, but starts no process.
func (b *libcontainerBackend) makeContainer() (err error) {
	failpoint.Reach("launcher.create")
	b.container, err = libcontainer.Create(b.l.settings.StateRoot, b.ID, b.config)
	if err != nil {
		return err
	}
	failpoint.Reach("launcher.created")
	b.endStep("libcontainer create")
	b.undo.Add("destroy container "+b.ID, b.backend.destroy)
	b.io.passTo(b.process)
	return nil
}

func (b *libcontainerBackend) create() (pid int, err error) {
	if err := b.setPauseFilter(); err != nil {
		return 0, err
	}
	if err := b.makeContainer(); err != nil {
		return 0, err
	}
	if err := b.l.passFilter(b.process, b.config); err != nil {
		return 0, err
	}
	if err := keepLockLimit(b.startInit); err != nil {
		return 0, err
	}
	failpoint.Reach("launcher.init-started")
	b.endStep("libcontainer start")
	if err := b.delegateCgroup(); err != nil {
		return 0, err
	}
	return b.process.Pid()
}

// delegateCgroup gives the cgroup to the container's user, who owns it if the mount is writable.
// libcontainer does that only with the systemd driver.
func (b *libcontainerBackend) delegateCgroup() error {
	dir, owner := b.group.Paths()[""], b.config.Cgroups.OwnerUID
	if owner == nil || !cgroups.IsCgroup2UnifiedMode() {
		return nil
	}
	return cgroup.Delegate(dir, *owner)
}

// If a pod's seccomp profile denies system calls of berth's own pause, setPauseFilter replaces it.
// The new profile allows only these calls. The pod's profile is for its containers, and need not
// allow pause. A pause of an image has an upper directory, and keeps the profile.
func (b *libcontainerBackend) setPauseFilter() (err error) {
	if b.Pause == "" || b.Rootfs.Upper != "" || !slices.Equal(b.process.Args, proto.PauseArgs) {
		return nil
	}
	denied := func(call uint32) bool { return !b.l.filters.Allows(b.config.Seccomp, call) }
	if !slices.ContainsFunc(pauseCalls, denied) {
		return nil
	}
	b.config.Seccomp, err = specconv.SetupSeccomp(&specs.LinuxSeccomp{
		DefaultAction: specs.ActErrno,
		Syscalls:      []specs.LinuxSyscall{{Names: proto.PauseSyscalls, Action: specs.ActAllow}},
	})
	if err != nil {
		return fmt.Errorf("seccomp profile of pause: %w", err)
	}
	return nil
}

// pauseCalls are the system calls without which pause does not work.
var pauseCalls = []uint32{
	unix.SYS_EXECVE, unix.SYS_RT_SIGTIMEDWAIT, unix.SYS_RT_SIGPROCMASK, unix.SYS_WAIT4, unix.SYS_EXIT_GROUP,
}

func (b *libcontainerBackend) execute() error {
	if err := b.container.Exec(); err != nil {
		return err
	}
	err := b.awaitCommand(waitForever)
	if errors.Is(err, errNotExecuted) && !b.l.filters.Allows(b.config.Seccomp, unix.SYS_WRITE) {
		err = fmt.Errorf("%w; the seccomp profile does not allow write, so the reason is not known", err)
	}
	return b.explainNotExecuted(err)
}

func (b *libcontainerBackend) follow() (int, *os.File, error) {
	return 0, nil, errors.New("libcontainer's containers need no follower")
}

func (b *libcontainerBackend) destroy() error {
	failpoint.Reach("launcher.destroy")
	if b.process.Signal(unix.SIGKILL) == nil {
		_, _ = b.process.Wait() // the result only says that it was killed
	}
	ctx, cancel := context.WithTimeout(context.Background(), destroyTimeout)
	defer cancel()
	err := errors.Join(b.group.Kill(ctx), b.container.Destroy())
	failpoint.Reach("launcher.container-destroyed")
	err = errors.Join(err, b.group.Destroy(ctx), os.RemoveAll(filepath.Join(b.l.settings.StateRoot, b.ID)))
	failpoint.Reach("launcher.destroyed")
	return err
}

// passTo gives the container's ends of the streams to libcontainer.
func (s *stdio) passTo(p *libcontainer.Process) {
	// A nil *os.File in an interface is not a nil interface.
	if s.theirs.stdin != nil {
		p.Stdin = s.theirs.stdin
	}
	if s.theirs.stdout != nil {
		p.Stdout = s.theirs.stdout
	}
	if s.theirs.stderr != nil {
		p.Stderr = s.theirs.stderr
	}
	p.ConsoleSocket = s.theirs.console
}

// Limits of the interval between two checks whether init has executed the command. init needs less
// than a millisecond for that, unless there are startContainer hooks or no free processor.
const (
	firstCheck   = 50 * time.Microsecond
	longestCheck = 10 * time.Millisecond
)

// errNotExecuted means that init has ended without executing the container's command.
var errNotExecuted = errors.New("init ended before it executed the command")

// waitPolicy returns whether to continue waiting. waited is the time since the start of init.
// runnable says whether init is running or waits for a processor.
type waitPolicy func(waited time.Duration, runnable bool) bool

// awaitCommand waits until init has executed the container's command. Otherwise the daemon would
// report success while init is still the launcher's program. An exec would find that program as
// process 1, and could not write to /proc/1/fd/1. If init ends, and nil if mayWait returns false.
func (c *launch) awaitCommand(mayWait waitPolicy) error {
	begin := time.Now()
	for pause := firstCheck; ; pause = min(2*pause, longestCheck) {
		ended, err := pidfd.Ended(c.init) // it is reaped later
		if err != nil {
			return err
		}
		// Init is our child and not yet reaped, so the pid cannot have been reused.
		executed, runnable, err := pidfd.Executed(c.started.InitPID)
		if err != nil {
			return err
		}
		switch {
		case executed:
			c.awaitCredentials()
			return nil
		case ended:
			return errNotExecuted
		case c.ctx.Err() != nil:
			return errCancelled
		case !mayWait(time.Since(begin), runnable):
			return nil
		}
		interval := unix.NsecToTimespec(int64(pause))
		_ = unix.Nanosleep(&interval, nil) // an interruption shortens the sleep
	}
}

// awaitCredentials waits until execve has set the process's name and credentials. This happens some
// microseconds after the process counts as executed. The open of auxv waits in the kernel for the
// end of execve (exec_update_lock).
func (c *launch) awaitCredentials() {
	if f, err := os.Open(fmt.Sprintf("/proc/%d/auxv", c.started.InitPID)); err == nil { // otherwise it has ended
		_ = f.Close() // nothing was written
	}
}

// waitForever is the waitPolicy for libcontainer's init, which executes the command or ends.
func waitForever(time.Duration, bool) bool { return true }

// Limits of the wait for an OCI runtime's init. It may never execute a command: crun runs
// WebAssembly in init.
const (
	maxWaitAsleep   = 20 * time.Millisecond // init sleeps
	maxWaitRunnable = time.Second           // init waits for a processor
)

// ociWaitPolicy returns the policy for an OCI runtime's init. crun's init runs startContainer hooks
// as its children and sleeps meanwhile. So the time with children does not count.
func (c *launch) ociWaitPolicy() waitPolicy {
	hooks := c.Spec.Hooks != nil && len(c.Spec.Hooks.StartContainer) > 0
	var idleSince time.Duration
	return func(waited time.Duration, runnable bool) bool {
		if hooks && hasChild(c.started.InitPID) {
			idleSince = waited
		}
		waited -= idleSince
		return waited < maxWaitAsleep || runnable && waited < maxWaitRunnable
	}
}

// hasChild returns whether a process with one thread has a child.
func hasChild(pid int) bool {
	f, err := os.Open(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid)) // needs CONFIG_PROC_CHILDREN
	if err != nil {
		return false
	}
	defer f.Close()
	n, _ := f.Read(make([]byte, 1)) // on an error the process has no children or has ended
	return n > 0
}

// explainNotExecuted adds init's own message to errNotExecuted. libcontainer and crun write it to
// standard error, because they have closed all other files by then.
func (c *launch) explainNotExecuted(err error) error {
	if !errors.Is(err, errNotExecuted) {
		return err
	}
	message := c.lastOutput()
	code := proto.Internal
	if strings.Contains(strings.ToLower(message), "exec ") {
		code = proto.InvalidArgument
	}
	if message == "" {
		return proto.Errorf(code, "command %q: %v", c.Spec.Process.Args[0], err)
	}
	return proto.Errorf(code, "command %q: %s", c.Spec.Process.Args[0], message)
}

// maxLastOutput bounds the part of init's output that goes into an error, in bytes.
const maxLastOutput = 1 << 10

// lastOutput returns the content of the container's standard error or terminal.
func (c *launch) lastOutput() string {
	for _, f := range []*os.File{c.io.stderr, c.io.console} {
		if f == nil || unix.SetNonblock(int(f.Fd()), true) != nil { // the launch has failed, so no other process reads them
			continue
		}
		text := make([]byte, maxLastOutput)
		n, err := unix.Read(int(f.Fd()), text)
		if err == nil && n > 0 {
			return strings.TrimSpace(strings.ToValidUTF8(string(text[:n]), "?"))
		}
	}
	return ""
}
