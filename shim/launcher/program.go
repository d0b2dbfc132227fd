package launcher

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
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
	"berth/shim/launcher/complaint"
	"berth/shim/launcher/sysmon"
	"berth/shim/ociruntime"
	"berth/shim/proto"
)

// programMaker is the program of an OCI runtime. The runtime's processes are children
// of ours, and so, since we are a subreaper while it works, is what it leaves behind: the
// container's init. The rest of a launch is the same.
type programMaker struct {
	*launch
	streams *programStreams // of a container that joins a sandbox, until it runs
}

// joinsSandbox tells whether the container is to be part of a sandbox that pause has made.
func (m *programMaker) joinsSandbox() bool { return m.Runtime.Sandboxed && !m.Pause }

func (m *programMaker) prepare() error {
	if len(m.Spec.Process.Args) == 0 {
		return proto.Errorf(proto.InvalidArgument, "there is no command to run")
	}
	for _, l := range m.Spec.Process.Rlimits { // crun ignores what it does not know
		if _, ok := rlimits[l.Type]; !ok {
			return proto.Errorf(proto.InvalidArgument, "unknown resource limit %q", l.Type)
		}
	}
	m.Spec.Version = ociruntime.SpecVersion
	return nil
}

func (m *programMaker) hostRoot() (uid, gid int, err error) {
	return hostRootIn(m.Spec.Linux.UIDMappings, m.Spec.Linux.GIDMappings)
}

func hostRootIn(uids, gids []specs.LinuxIDMapping) (uid, gid int, err error) {
	if uid, err = hostID(uids); err != nil {
		return 0, 0, err
	}
	gid, err = hostID(gids)
	return uid, gid, err
}

// hostID maps the container's root to the host. Without mappings it is the host's.
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

// create calls the runtime. From before the first call on, Dir/oci says how to remove
// what it makes.
func (m *programMaker) create() (pid int, err error) {
	if m.Runtime.Has(m.ID) {
		return 0, errors.New("it exists")
	}
	if err := m.writeBundle(); err != nil {
		return 0, fmt.Errorf("write its bundle: %w", err)
	}
	streams, err := m.io.forProgram(m.Dir)
	if err != nil {
		return 0, err
	}
	m.undo.Add("destroy container "+m.ID, m.destroy)
	if m.joinsSandbox() {
		m.streams = streams
		streams = &programStreams{IO: ociruntime.IO{ConsoleSocket: streams.ConsoleSocket}}
	}
	defer streams.close()
	failpoint.Reach("launcher.program-create")
	err = adopting(m.inheritsOrphans(), func() (err error) {
		pid, err = m.Runtime.Create(m.ctx, m.ID, m.Dir, streams.IO)
		return err
	})
	failpoint.Reach("launcher.program-created")
	if err == nil && m.joinsSandbox() {
		return 0, nil // the process is the sandbox's, and no child of ours
	}
	if err == nil {
		err = streams.receive(m.io)
	}
	if err != nil {
		return 0, nameCommand(m.Spec.Process, err)
	}
	return pid, nil
}

// nameCommand adds the command to a complaint about it: crun does not always name it.
func nameCommand(p *specs.Process, err error) error {
	if complaint.IsOfRequest(err) {
		return fmt.Errorf("command %q: %w", p.Args[0], err)
	}
	return err
}

// writeBundle makes the shim directory the container's bundle.
func (m *programMaker) writeBundle() error {
	for name, content := range map[string]any{proto.RuntimeFile: m.Runtime, ociruntime.ConfigFile: m.Spec} {
		data, err := json.Marshal(content)
		if err != nil {
			return err
		}
		m.undo.Add("remove "+name, func() error {
			failpoint.Reach("launcher.remove-bundle")
			return ignore(unix.Unlink(filepath.Join(m.Dir, name)), unix.ENOENT)
		})
		failpoint.Reach("launcher.write-bundle")
		if err := proto.WriteFile(m.Dir, name, data); err != nil {
			return err
		}
		failpoint.Reach("launcher.bundle-written")
	}
	return nil
}

// execute calls the runtime from another thread than ours: that has gone back to the
// host's mount namespace by now, and gVisor starts what serves the root filesystem here.
func (m *programMaker) execute() error {
	done := make(chan error)
	go func() {
		var streams ociruntime.IO
		if m.streams != nil {
			streams = m.streams.IO
		}
		err := adopting(m.inheritsOrphans(), func() error {
			return sysmon.WithRestored(func() error { return m.Runtime.Start(m.ctx, m.ID, m.Dir, streams) })
		})
		done <- nameCommand(m.Spec.Process, err)
	}()
	err := <-done
	if err == nil && !m.Runtime.Sandboxed { // gVisor answers when the command runs
		err = m.explainNotExecuted(m.awaitCommand(m.programPatience()))
	}
	if m.streams == nil {
		return err
	}
	defer m.streams.close()
	if err != nil {
		return err
	}
	return m.streams.receive(m.io)
}

func (m *programMaker) follow() (pid int, verdict *os.File, err error) {
	w, verdict, err := pipe("verdict")
	if err != nil {
		return 0, nil, err
	}
	defer w.Close()
	cmd := m.Runtime.Waiter(m.ID, w)
	failpoint.Reach("launcher.start-waiter")
	if err := cmd.Start(); err != nil {
		return 0, nil, errors.Join(err, verdict.Close())
	}
	failpoint.Reach("launcher.waiter-started")
	return cmd.Process.Pid, verdict, nil
}

// destroy leaves it to the runtime; what that does not get done is done without it.
func (m *programMaker) destroy() error {
	ctx, cancel := context.WithTimeout(context.Background(), destroyPatience)
	defer cancel()
	failpoint.Reach("launcher.program-delete")
	err := m.Runtime.Delete(ctx, m.ID)
	failpoint.Reach("launcher.program-deleted")
	killErr := m.group.Kill(ctx)
	if err != nil { // perhaps for its processes
		err = m.Runtime.Delete(ctx, m.ID)
	}
	endChildren(destroyPatience)
	return errors.Join(err, killErr, m.group.Destroy(ctx))
}

// adopting runs a command of a runtime's. What its processes leave behind become our
// children. keep: so it shall be for ever, else only until then.
func adopting(keep bool, run func() error) error {
	if err := becomeSubreaper(true); err != nil {
		return err
	}
	err := run()
	if !keep {
		err = errors.Join(err, becomeSubreaper(false))
	}
	return err
}

func becomeSubreaper(yes bool) error {
	value := uintptr(0)
	if yes {
		value = 1
	}
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, value, 0, 0, 0); err != nil {
		return fmt.Errorf("become subreaper: %w", err)
	}
	return nil
}

// reapAll collects children that have ended. No command of package os/exec may be
// running: its status would be taken away.
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

// endChildren kills what a start that failed has left to us, and collects it: even a zombie keeps its cgroup busy, and its PID namespace from ending.
func endChildren(patience time.Duration) {
	for deadline := time.Now().Add(patience); reapAll() && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		below, err := pidfd.Below(os.Getpid())
		if err != nil {
			return
		}
		for _, pid := range below {
			_ = unix.Kill(pid, unix.SIGKILL) // our child's, or ended
		}
	}
}

// programStreams are the streams of a command of a runtime's.
type programStreams struct {
	ociruntime.IO
	listener *net.UnixListener // for a terminal's master
	dir      *os.File          // that the listener's socket is in
}

// consoleSocket is where a runtime sends a terminal's master.
const consoleSocket = "console"

// forProgram returns the container's ends as a program takes them. For a terminal it
// listens in dir.
func (s *stdio) forProgram(dir string) (*programStreams, error) {
	p := &programStreams{IO: ociruntime.IO{Stdin: s.theirs.stdin, Stdout: s.theirs.stdout, Stderr: s.theirs.stderr}}
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

// consoleTime is how long a terminal's master may take after its command has ended.
const consoleTime = 5 * time.Second

// receive takes the terminal's master, if there is to be one.
func (p *programStreams) receive(s *stdio) error {
	if p.listener == nil {
		return nil
	}
	if err := p.listener.SetDeadline(time.Now().Add(consoleTime)); err != nil {
		return err
	}
	conn, err := p.listener.AcceptUnix()
	if err != nil {
		return fmt.Errorf("terminal: %w", err)
	}
	defer conn.Close()
	socket, err := conn.File()
	if err != nil {
		return fmt.Errorf("terminal: %w", err)
	}
	defer socket.Close()
	if s.console, err = receiveFile(socket); err != nil {
		return fmt.Errorf("terminal: %w", err)
	}
	return nil
}

func (p *programStreams) close() {
	if p.listener != nil {
		_ = p.listener.Close() // removes the socket as well
		_ = p.dir.Close()
	}
}

// programExec is an exec by the program of an OCI runtime.
type programExec struct {
	*execution
	dir      string
	ctx      context.Context // of the command that starts it
	giveUp   context.CancelFunc
	internal atomic.Int64 // the process in its sandbox
}

func newProgramExec(e *execution) *programExec {
	p := &programExec{execution: e}
	p.ctx, p.giveUp = context.WithCancel(context.Background())
	return p
}

func (e *programExec) start() (pid int, err error) {
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
	streams, err := e.io.forProgram(e.dir)
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

// ownPipes is libraryExec's, for the container's root as the runtime was told of it.
func (e *programExec) ownPipes(bundle ociruntime.Bundle) error {
	uid, gid, err := hostRootIn(bundle.UIDMappings, bundle.GIDMappings)
	if err != nil {
		return fmt.Errorf("owner of stdio: %w", err)
	}
	return e.io.theirs.pipes().chown(uid, gid)
}

// explain gives an error the code that fits if the container has ended.
func (e *programExec) explain(err error) error {
	if data, readErr := os.ReadFile(filepath.Join(e.Dir, proto.ShimFile)); readErr == nil {
		if s, decodeErr := proto.DecodeProcesses(data); decodeErr == nil && s.InitPID != 0 {
			init, openErr := pidfd.OpenVerified(s.InitPID, s.InitStartTime)
			if openErr == nil {
				_ = init.Close()
				return nameCommand(e.Process, err)
			}
		}
	}
	return proto.Errorf(proto.FailedPrecondition, "it is not running: %v", err)
}

// makeCgroup makes the exec's own cgroup and returns its name if the runtime can put
// the process there. A sandbox's processes are in none of their own.
func (e *programExec) makeCgroup(bundle ociruntime.Bundle) (name string) {
	if e.Runtime.Sandboxed {
		return ""
	}
	group, err := cgroup.Open(bundle.CgroupsPath, e.Runtime.SystemdCgroup)
	if err != nil {
		return "" // it is killed by its place in the process tree then
	}
	dir, hierarchy := makeExecCgroup(group.Paths(), e.ExecID)
	e.setCgroup(dir)
	if dir == "" || hierarchy != "" || !e.Runtime.SubCgroups {
		return "" // on v1 crun would look for it in all hierarchies
	}
	return filepath.Base(dir)
}

// enterCgroup moves the process, and what it has started by now, to the exec's cgroup. A
// process that left the tree before this is missed: it ends with the container.
func (e *programExec) enterCgroup(pid int) {
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
				// One that has ended meanwhile can't be moved.
				_ = os.WriteFile(filepath.Join(e.cgroup, "cgroup.procs"), []byte(strconv.Itoa(p)), 0)
				moved = append(moved, p)
			}
		}
		if len(moved) == before {
			return
		}
	}
}

func (e *programExec) wait() (*os.ProcessState, error) {
	p, err := os.FindProcess(e.pid)
	if err != nil {
		return nil, err
	}
	state, err := p.Wait()
	reapAll() // in the host's PID namespace orphans may have come to us
	return state, err
}

// kill asks the runtime, for a process that is in a sandbox.
func (e *programExec) kill() error {
	e.giveUp()
	if !e.Runtime.Sandboxed {
		return e.killProcesses()
	}
	internal := int(e.internal.Load())
	if internal == 0 {
		return nil // nothing runs
	}
	ctx, cancel := context.WithTimeout(context.Background(), killTime)
	defer cancel()
	err := sysmon.WithRestored(func() error { return e.Runtime.KillExec(ctx, e.ID, internal) }) // obey's goroutine is another than ours
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.pidfd != nil {
		if ended, exitErr := pidfd.Exited(e.pidfd); ended && exitErr == nil {
			return nil
		}
	}
	return err
}
