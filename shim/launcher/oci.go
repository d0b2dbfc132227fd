package launcher

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/internal/cgroup"
	"berth/internal/failpoint"
	"berth/internal/pidfd"
	"berth/shim/ociruntime"
	"berth/shim/proto"
)

// ociBackend makes a container with an OCI runtime. The runtime's processes are children of this
// one. This process is a subreaper while the runtime works, so it adopts the container's init, too.
type ociBackend struct {
	*launch
	streams *ociStreams // of a container that joins a sandbox, from create to execute

	// Of a TaskAPI runtime.
	attendant *exec.Cmd
	verdict   *os.File
	pid       int // the container's init, if the host sees it
}

// joinsSandbox returns whether the container is made in the runtime's process that its pause has
// started.
func (b *ociBackend) joinsSandbox() bool { return b.Runtime.Parent() && b.Pause == "" }

func (b *ociBackend) prepare() error {
	if len(b.Spec.Process.Args) == 0 {
		return proto.Errorf(proto.InvalidArgument, "there is no command to run")
	}
	for _, l := range b.Spec.Process.Rlimits { // crun ignores unknown limits
		if _, ok := rlimits[l.Type]; !ok {
			return proto.Errorf(proto.InvalidArgument, "unknown resource limit %q", l.Type)
		}
	}
	b.Spec.Version = ociruntime.SpecVersion
	return nil
}

func (b *ociBackend) hostRoot() (uid, gid int, err error) {
	return hostRootIn(b.Spec.Linux.UIDMappings, b.Spec.Linux.GIDMappings)
}

func hostRootIn(uids, gids []specs.LinuxIDMapping) (uid, gid int, err error) {
	if uid, err = hostID(uids); err != nil {
		return 0, 0, err
	}
	gid, err = hostID(gids)
	return uid, gid, err
}

// hostID returns the ID on the host of the container's root. If there are no mappings, it is 0.
func hostID(mappings []specs.LinuxIDMapping) (int, error) {
	for _, m := range mappings {
		if m.ContainerID == 0 && m.Size > 0 {
			return int(m.HostID), nil
		}
	}
	if len(mappings) > 0 {
		return 0, errors.New("the container's root is not mapped")
	}
	return 0, nil
}

// create calls the runtime. Dir/oci exists before the first call, so that a later daemon can remove
// the runtime's container.
func (b *ociBackend) create() (pid int, err error) {
	if b.Runtime.Has(b.ID) {
		return 0, errors.New("the runtime has a container of that ID")
	}
	if err := b.writeBundle(); err != nil {
		return 0, fmt.Errorf("write its bundle: %w", err)
	}
	streams, err := b.io.forRuntime(b.Dir)
	if err != nil {
		return 0, err
	}
	b.undo.Add("destroy container "+b.ID, b.destroy)
	if b.joinsSandbox() {
		b.streams = streams
		if !b.Runtime.TaskAPI {
			streams = &ociStreams{IO: ociruntime.IO{ConsoleSocket: streams.ConsoleSocket}}
		}
	}
	if b.streams == nil {
		defer streams.close()
	}
	failpoint.Reach("launcher.program-create")
	err = adopting(b.inheritsOrphans(), func() (err error) {
		pid, err = b.Runtime.Create(b.ctx, b.ID, b.Dir, streams.IO)
		return err
	})
	failpoint.Reach("launcher.program-created")
	if err == nil && b.Runtime.TaskAPI && !b.Runtime.Sandboxed {
		b.pid = pid
	}
	if err == nil && b.joinsSandbox() {
		return 0, nil // the process belongs to the sandbox, or to the shim
	}
	if err == nil {
		err = streams.receive(b.io)
	}
	if err != nil {
		return 0, nameCommand(b.Spec.Process, err)
	}
	return pid, nil
}

// nameCommand adds the command to an error about it, because crun does not always name it.
func nameCommand(p *specs.Process, err error) error {
	if isRequestError(err) {
		return fmt.Errorf("command %q: %w", p.Args[0], err)
	}
	return err
}

// writeBundle writes the container's bundle to the shim directory.
func (b *ociBackend) writeBundle() error {
	for name, content := range map[string]any{proto.RuntimeFile: b.Runtime, ociruntime.ConfigFile: b.Spec} {
		data, err := json.Marshal(content)
		if err != nil {
			return err
		}
		b.undo.Add("remove "+name, func() error {
			failpoint.Reach("launcher.remove-bundle")
			return ignore(unix.Unlink(filepath.Join(b.Dir, name)), unix.ENOENT)
		})
		failpoint.Reach("launcher.write-bundle")
		if err := proto.WriteFile(b.Dir, name, data); err != nil {
			return err
		}
		failpoint.Reach("launcher.bundle-written")
	}
	return nil
}

// execute calls the runtime from another thread. This thread has returned to the host's mount
// namespace, but gVisor must start its file server in the launcher's namespace.
func (b *ociBackend) execute() error {
	done := make(chan error)
	go func() {
		var streams ociruntime.IO
		if b.streams != nil {
			streams = b.streams.IO
		}
		err := adopting(b.inheritsOrphans(), func() error {
			return withSlackRestored(func() error {
				if b.Runtime.TaskAPI && b.streams != nil {
					return b.attend(streams)
				}
				return b.begin(streams)
			})
		})
		done <- nameCommand(b.Spec.Process, err)
	}()
	err := <-done
	if err == nil && !b.Runtime.Parent() { // gVisor and shims return when the command runs
		err = b.explainNotExecuted(b.awaitCommand(b.ociWaitPolicy()))
	}
	if err == nil && b.attendant == nil {
		b.awaitExecuted() // a pause
	}
	if b.streams == nil {
		return err
	}
	defer b.streams.close()
	if err != nil {
		return err
	}
	return b.streams.receive(b.io)
}

// begin starts or restores the created container.
func (b *ociBackend) begin(streams ociruntime.IO) error {
	if b.Restore == nil {
		return b.Runtime.Start(b.ctx, b.ID, b.Dir, streams)
	}
	if b.Pause == "" { // the sandbox continues with this container, and cannot be restored again
		if err := b.decide(); err != nil {
			return err
		}
		b.unrepeatable = true
	}
	ctx, cancel := context.WithTimeout(b.ctx, b.Restore.Timeout)
	defer cancel()
	failpoint.Reach("launcher.program-restore")
	err := b.Runtime.Restore(ctx, b.ID, b.Dir, b.Restore.Images, streams)
	failpoint.Reach("launcher.program-restored")
	if err == nil && b.Pause == "" { // a pause waits for its container
		err = b.Runtime.AwaitRestored(ctx, b.ID, b.Dir)
	}
	switch {
	case err == nil:
		return nil
	case b.ctx.Err() != nil:
		return errCancelled
	case ctx.Err() != nil:
		return proto.Errorf(proto.FailedPrecondition, "its runtime has not restored the processes within %v", b.Restore.Timeout)
	}
	return proto.Errorf(proto.FailedPrecondition, "restore from the checkpoint: %v", err)
}

// attend starts the container of a TaskAPI runtime. The process that starts it also follows it.
func (b *ociBackend) attend(streams ociruntime.IO) (err error) {
	verdict, ours, err := pipe("verdict")
	if err != nil {
		return err
	}
	defer verdict.Close()
	b.verdict = ours
	b.undo.Add("close the verdict", ours.Close)
	w, r, err := pipe("started")
	if err != nil {
		return err
	}
	defer r.Close()
	cmd := b.Runtime.Attend(b.ctx, b.ID, b.Dir, streams, verdict, w)
	failpoint.Reach("launcher.start-attendant")
	if err := errors.Join(cmd.Start(), w.Close()); err != nil {
		return err
	}
	failpoint.Reach("launcher.attendant-started")
	b.attendant = cmd
	answer, err := io.ReadAll(r)
	if err != nil {
		return err
	}
	if err := b.Runtime.Attended(b.Dir, answer); err != nil {
		return err
	}
	b.awaitExecuted()
	return nil
}

// awaitExecuted waits until the init of a shim's container has executed the command. runc answers
// before that. It returns if init has ended, and after a second.
func (b *ociBackend) awaitExecuted() {
	if b.pid == 0 {
		return
	}
	for begin := time.Now(); time.Since(begin) < maxWaitRunnable; {
		if executed, _, err := pidfd.Executed(b.pid); executed || err != nil {
			return
		}
		interval := unix.NsecToTimespec(int64(firstCheck))
		_ = unix.Nanosleep(&interval, nil) // an interruption shortens the sleep
	}
}

func (b *ociBackend) follow() (pid int, verdict *os.File, err error) {
	if b.attendant != nil {
		b.started.ContainerPID = b.pid
		return b.attendant.Process.Pid, b.verdict, nil
	}
	w, verdict, err := pipe("verdict")
	if err != nil {
		return 0, nil, err
	}
	defer w.Close()
	cmd := b.Runtime.Waiter(b.ID, w)
	failpoint.Reach("launcher.start-waiter")
	if err := cmd.Start(); err != nil {
		return 0, nil, errors.Join(err, verdict.Close())
	}
	failpoint.Reach("launcher.waiter-started")
	return cmd.Process.Pid, verdict, nil
}

// destroy calls the runtime, and removes the rest itself.
func (b *ociBackend) destroy() error {
	ctx, cancel := context.WithTimeout(context.Background(), destroyTimeout)
	defer cancel()
	failpoint.Reach("launcher.program-delete")
	err := b.Runtime.Delete(ctx, b.ID)
	failpoint.Reach("launcher.program-deleted")
	killErr := b.group.Kill(ctx)
	if err != nil { // perhaps because of its processes
		err = b.Runtime.Delete(ctx, b.ID)
	}
	b.l.endChildren(destroyTimeout)
	return errors.Join(err, killErr, b.group.Destroy(ctx))
}

// adopting runs a command of the runtime while this process is a subreaper. So this process adopts
// the processes that the command leaves. With keep, this process stays a subreaper.
func adopting(keep bool, run func() error) error {
	if err := setSubreaper(true); err != nil {
		return err
	}
	err := run()
	if !keep {
		err = errors.Join(err, setSubreaper(false))
	}
	return err
}

func setSubreaper(yes bool) error {
	value := uintptr(0)
	if yes {
		value = 1
	}
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, value, 0, 0, 0); err != nil {
		return fmt.Errorf("become subreaper: %w", err)
	}
	return nil
}

// reapAll reaps all children that have ended and returns whether others are left. No command of
// package os/exec may run, because os/exec would lose its exit status.
func reapAll() (left bool) {
	for {
		pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil)
		switch {
		case err == unix.EINTR:
		case err != nil: // ECHILD
			return false
		case pid == 0:
			return true
		}
	}
}

// endChildren kills and reaps the children that a failed start has left behind. A zombie would keep
// its cgroup busy and its PID namespace alive. The containers of earlier launches live on.
func (l *launcher) endChildren(timeout time.Duration) {
	for deadline := time.Now().Add(timeout); reapAll() && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		below, err := pidfd.Below(os.Getpid(), l.children.list()...)
		if err != nil || len(below) == 0 {
			return
		}
		for _, pid := range below {
			_ = unix.Kill(pid, unix.SIGKILL) // a descendant, which may have ended
		}
	}
}

// ociStreams are the streams of a runtime's command.
type ociStreams struct {
	ociruntime.IO
	listener *net.UnixListener // for a terminal's master
	dir      *os.File          // the directory of the listener's socket
}

// consoleSocket is the name of the socket that receives a terminal's master from a runtime.
const consoleSocket = "console"

// forRuntime returns the container's ends in the form that runtimes use. For a terminal it listens
// in dir.
func (s *stdio) forRuntime(dir string) (*ociStreams, error) {
	p := &ociStreams{IO: ociruntime.IO{Stdin: s.theirs.stdin, Stdout: s.theirs.stdout, Stderr: s.theirs.stderr}}
	if !s.terminal {
		return p, nil
	}
	var err error
	if p.dir, err = os.Open(dir); err != nil {
		return nil, err
	}
	// A socket's path is limited to 107 bytes.
	p.ConsoleSocket = "/proc/" + strconv.Itoa(os.Getpid()) + "/fd/" + strconv.Itoa(int(p.dir.Fd())) + "/" + consoleSocket
	p.listener, err = net.ListenUnix("unix", &net.UnixAddr{Name: p.ConsoleSocket, Net: "unix"})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("console socket: %w", err), p.dir.Close())
	}
	return p, nil
}

// consoleTimeout bounds the wait for a terminal's master after the runtime's command has ended.
const consoleTimeout = 5 * time.Second

// receive receives the terminal's master if the process has a terminal.
func (p *ociStreams) receive(s *stdio) error {
	if p.listener == nil {
		return nil
	}
	if err := p.listener.SetDeadline(time.Now().Add(consoleTimeout)); err != nil {
		return err
	}
	conn, err := p.listener.AcceptUnix()
	if err != nil {
		return fmt.Errorf("receive the terminal: %w", err)
	}
	defer conn.Close()
	socket, err := conn.File()
	if err != nil {
		return fmt.Errorf("receive the terminal: %w", err)
	}
	defer socket.Close()
	if s.console, err = receiveFile(socket); err != nil {
		return fmt.Errorf("receive the terminal: %w", err)
	}
	return nil
}

func (p *ociStreams) close() {
	if p.listener != nil {
		_ = p.listener.Close() // this also removes the socket
		_ = p.dir.Close()
	}
}

// ociExec is an exec with an OCI runtime.
type ociExec struct {
	*execution
	dir      string
	ctx      context.Context // of the runtime's command
	giveUp   context.CancelFunc
	internal atomic.Int64 // the process's PID in its sandbox
}

func newOCIExec(e *execution) *ociExec {
	p := &ociExec{execution: e}
	p.ctx, p.giveUp = context.WithCancel(context.Background())
	return p
}

func (e *ociExec) start() (pid int, err error) {
	if len(e.Process.Args) == 0 {
		return 0, proto.Errorf(proto.InvalidArgument, "there is no command to run")
	}
	e.dir = filepath.Join(e.Dir, proto.ExecName(e.ExecID))
	failpoint.Reach("launcher.make-exec-directory")
	if err := os.Mkdir(e.dir, 0o700); err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return 0, proto.Errorf(proto.FailedPrecondition, "it is not running")
		}
		return 0, err
	}
	failpoint.Reach("launcher.exec-directory-made")
	defer os.RemoveAll(e.dir)
	data, err := json.Marshal(e.Process)
	if err != nil {
		return 0, err
	}
	if err := proto.WriteFile(e.dir, ociruntime.ProcessFile, data); err != nil {
		return 0, err
	}
	bundle, err := ociruntime.ReadBundle(e.Dir)
	if err != nil {
		return 0, e.explain(err)
	}
	if err := e.ownPipes(bundle); err != nil {
		return 0, err
	}
	streams, err := e.io.forRuntime(e.dir)
	if err != nil {
		return 0, err
	}
	defer streams.close()
	name := e.makeCgroup(bundle)
	failpoint.Reach("launcher.program-exec")
	err = adopting(false, func() (err error) {
		var internal int
		pid, internal, err = e.Runtime.Exec(e.ctx, e.ID, e.dir, name, streams.IO)
		e.internal.Store(int64(internal))
		return err
	})
	failpoint.Reach("launcher.program-executed")
	if err == nil {
		err = streams.receive(e.io)
	}
	if err != nil {
		return pid, e.explain(err)
	}
	if name == "" {
		e.enterCgroup(pid)
	}
	return pid, nil
}

// ownPipes makes the container's root the owner of the daemon's pipes. The mappings are in the
// runtime's bundle.
func (e *ociExec) ownPipes(bundle ociruntime.Bundle) error {
	uid, gid, err := hostRootIn(bundle.UIDMappings, bundle.GIDMappings)
	if err != nil {
		return fmt.Errorf("owner of stdio: %w", err)
	}
	return e.io.theirs.pipes().chown(uid, gid)
}

// explain adds the command to err. It returns FailedPrecondition if the container has ended.
func (e *ociExec) explain(err error) error {
	return explainByEnd(nameCommand(e.Process, err), func() error {
		if e.initRuns() {
			return nil
		}
		return proto.Errorf(proto.FailedPrecondition, "it is not running: %v", err)
	})
}

func (e *ociExec) initRuns() bool {
	data, err := os.ReadFile(filepath.Join(e.Dir, proto.ShimFile))
	if err != nil {
		return false
	}
	s, err := proto.DecodePIDs(data)
	if err != nil || s.InitPID == 0 {
		return false
	}
	init, err := pidfd.OpenVerified(s.InitPID, s.InitStartTime)
	if err != nil {
		return false
	}
	exiting, err := pidfd.Exiting(s.InitPID)
	_ = init.Close()
	return err == nil && !exiting
}

// makeCgroup creates the exec's own cgroup. If the runtime can start the process in this cgroup,
// makeCgroup returns the cgroup's name. Execs of a runtime that is their parent have no cgroup.
func (e *ociExec) makeCgroup(bundle ociruntime.Bundle) (name string) {
	if e.Runtime.Parent() {
		return ""
	}
	group, err := cgroup.Open(bundle.CgroupsPath, e.Runtime.SystemdCgroup)
	if err != nil {
		return "" // kill then follows the process tree
	}
	dir, hierarchy := makeExecCgroup(group.Paths(), e.ExecID)
	e.setCgroup(dir)
	if dir == "" || hierarchy != "" || !e.Runtime.SubCgroups {
		return "" // on v1 crun would expect it in all hierarchies
	}
	return filepath.Base(dir)
}

// enterCgroup moves the process and its descendants to the exec's cgroup. It misses a process that
// has left the tree before. Such a process ends with the container.
func (e *ociExec) enterCgroup(pid int) {
	if e.cgroup == "" {
		return
	}
	failpoint.Reach("launcher.enter-exec-cgroup")
	for moved := []int{}; ; {
		below, err := pidfd.Below(pid)
		if err != nil {
			return
		}
		before := len(moved)
		for _, p := range append([]int{pid}, below...) {
			if !slices.Contains(moved, p) {
				// A process that has ended cannot be moved.
				_ = os.WriteFile(filepath.Join(e.cgroup, "cgroup.procs"), []byte(strconv.Itoa(p)), 0)
				moved = append(moved, p)
			}
		}
		if len(moved) == before {
			return
		}
	}
}

func (e *ociExec) wait() (*os.ProcessState, error) {
	p, err := os.FindProcess(e.pid)
	if err != nil {
		return nil, err
	}
	state, err := p.Wait()
	reapAll() // in the host's PID namespace this process adopts orphans
	return state, err
}

// kill uses the runtime to kill a process in a sandbox.
func (e *ociExec) kill() error {
	e.giveUp()
	if !e.Runtime.Parent() {
		return e.killProcesses()
	}
	internal := int(e.internal.Load())
	if internal == 0 {
		return nil // nothing runs
	}
	ctx, cancel := context.WithTimeout(context.Background(), killTimeout)
	defer cancel()
	// This is not the goroutine of carryOut, whose thread has the daemon's slack.
	err := withSlackRestored(func() error { return e.Runtime.KillExec(ctx, e.ID, internal) })
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.pidfd != nil {
		if ended, exitErr := pidfd.Exited(e.pidfd); ended && exitErr == nil {
			return nil
		}
	}
	return err
}
