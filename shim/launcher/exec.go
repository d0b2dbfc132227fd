package launcher

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/runc/libcontainer"
	"golang.org/x/sys/unix"

	"berth/internal/cgroup"
	"berth/internal/failpoint"
	"berth/internal/pidfd"
	"berth/shim/proto"
)

// execution is the state of one exec request.
type execution struct {
	*proto.Exec
	l     *launcher
	files []*os.File // that came with the request

	backend  execBackend
	io       *stdio
	starting chan struct{} // closed when start has returned

	mu     sync.Mutex // guards the fields below: start sets them, the listener reads them
	cgroup string     // directory of its own cgroup; empty: it has none
	pid    int
	pidfd  *os.File
}

// execBackend starts the process of an exec: libcontainer or an OCI runtime.
type execBackend interface {
	// start starts the process as a child of this one, with the container's ends of the streams. It
	// may set the execution's cgroup. The caller abandons a process that start returns with an
	// error.
	start() (pid int, err error)
	// wait waits for the process and reaps it.
	wait() (*os.ProcessState, error)
	// kill kills the process and its descendants. It may be called during start.
	kill() error
}

func (e *execution) newBackend() execBackend {
	if e.Runtime != nil {
		return newOCIExec(e)
	}
	return &libcontainerExec{execution: e}
}

// serveExec carries out an exec request. An error means that the daemon is gone.
func (l *launcher) serveExec(request *proto.Exec, files []*os.File) error {
	failpoint.Reach("launcher.exec-ordered")
	e := &execution{Exec: request, l: l, files: files, io: &stdio{}, starting: make(chan struct{})}
	e.backend = e.newBackend()
	defer e.closeKept()
	stopListening := e.listen()
	err := e.start()
	close(e.starting)
	if err != nil {
		gone := stopListening()
		e.abandon()
		if gone != nil {
			return gone
		}
		return l.reply(proto.Reply{Error: toReply(err)})
	}
	if err := e.announce(); err != nil {
		gone := stopListening()
		e.abandon()
		if gone != nil {
			return gone
		}
		return err
	}
	failpoint.Reach("launcher.exec-announced")
	defer e.pidfd.Close()
	code := exitCode(e.backend.wait())
	// The listener is stopped before the reply, because the daemon sends its next request after the
	// reply. All messages so far belong to this exec.
	gone := stopListening()
	failpoint.Reach("launcher.exec-ended")
	e.removeCgroup()
	if gone != nil {
		return gone
	}
	err = l.reply(proto.Reply{Exited: &proto.Exited{Code: code}})
	failpoint.Reach("launcher.exec-answered")
	return err
}

// closeKept closes the files that were held open for the process.
func (e *execution) closeKept() {
	for _, f := range e.Keep {
		f.Close() // nothing was written
	}
}

// announce reports to the daemon that the process runs.
func (e *execution) announce() error {
	files := []*os.File{e.pidfd}
	if e.io.console != nil {
		files = append(files, e.io.console)
	}
	err := e.l.reply(proto.Reply{Exec: &proto.ExecStarted{PID: e.pid}}, files...)
	if e.io.console != nil {
		err = errors.Join(err, e.io.console.Close())
	}
	return err
}

func (e *execution) start() error {
	if err := e.setIO(); err != nil {
		return err
	}
	pid, err := e.backend.start()
	if setErr := e.setPID(pid); err == nil {
		err = setErr
	}
	if err != nil {
		return err
	}
	return e.io.started()
}

// setPID stores the process, an unreaped child of this one, unless pid is 0.
func (e *execution) setPID(pid int) (err error) {
	if pid == 0 {
		return nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.pid = pid
	e.pidfd, err = pidfd.Open(pid)
	return err
}

func (e *execution) setCgroup(dir string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.cgroup = dir
}

// libcontainerExec is an exec with libcontainer.
type libcontainerExec struct {
	*execution
	*loaded
	process *libcontainer.Process
}

func (e *libcontainerExec) start() (pid int, err error) {
	if err := e.load(); err != nil {
		return 0, err
	}
	if e.process, err = newProcess(e.Process); err != nil {
		return 0, err
	}
	if err := e.ownPipes(); err != nil {
		return 0, err
	}
	e.io.passTo(e.process)
	e.makeCgroup()
	if err := e.l.passFilter(e.process, &e.config); err != nil {
		return 0, err
	}
	if err := e.run(); err != nil {
		return 0, explainByEnd(err, e.checkRunning)
	}
	if pid, err = e.process.Pid(); err != nil {
		return 0, err
	}
	if e.io.socket != nil {
		err = e.io.receiveConsole()
	}
	return pid, err
}

func (e *libcontainerExec) wait() (*os.ProcessState, error) { return e.process.Wait() }

func (e *libcontainerExec) kill() error { return e.killProcesses() }

func (e *libcontainerExec) load() (err error) {
	e.loaded, err = e.l.load(e.l.settings.StateRoot, e.ID)
	if errors.Is(err, libcontainer.ErrNotExist) {
		return proto.Errorf(proto.FailedPrecondition, "it is not running")
	}
	if err != nil {
		return fmt.Errorf("load its state: %w", err)
	}
	return e.checkRunning()
}

// run starts the process. It prepares the process's move to the cgroups in parallel. Doing so
// earlier would delay the creation of the exec's own cgroup, because the kernel holds cgroup_mutex
// meanwhile.
func (e *libcontainerExec) run() error {
	var preparing sync.WaitGroup
	defer preparing.Wait()
	preparing.Go(prepareMove)
	failpoint.Reach("launcher.exec-run")
	if err := e.container.Run(e.process); err != nil {
		return err
	}
	failpoint.Reach("launcher.exec-runs")
	return nil
}

// ownPipes makes the container's root the owner of the daemon's pipes, as it owns the container's
// own pipes. Otherwise no process in a user namespace could open /dev/stdout.
func (e *libcontainerExec) ownPipes() error {
	uid, gid, err := hostRootOf(&e.config)
	if err != nil {
		return fmt.Errorf("owner of stdio: %w", err)
	}
	return e.io.theirs.pipes().chown(uid, gid)
}

// checkRunning checks whether the container's init still runs. For libcontainer it runs until it is
// a zombie, but the kernel kills the other processes of its PID namespace before.
func (e *libcontainerExec) checkRunning() error {
	exiting, err := pidfd.Exiting(e.initPID)
	if exiting || errors.Is(err, os.ErrProcessDone) {
		return proto.Errorf(proto.FailedPrecondition, "it is not running")
	}
	if err != nil {
		return err
	}
	status, err := e.container.Status()
	if err != nil {
		return fmt.Errorf("read its state: %w", err)
	}
	if status == libcontainer.Stopped {
		return proto.Errorf(proto.FailedPrecondition, "it is not running")
	}
	return nil
}

// endTime is how long an exec that could not start waits for its container's end, in case it was
// killed with the container.
const endTime = time.Second

// explainByEnd returns the error of checkRunning if the container ends, because it explains best
// why an exec could not start. A kill of the whole container may reach the exec before init.
func explainByEnd(err error, checkRunning func() error) error {
	for deadline := time.Now().Add(endTime); ; time.Sleep(time.Millisecond) {
		if endErr := checkRunning(); endErr != nil {
			return endErr
		}
		if toReply(err).Code != proto.Internal || time.Now().After(deadline) {
			return err
		}
	}
}

// setIO sets the process's streams: the request's files or a terminal, otherwise a null device.
func (e *execution) setIO() error {
	if err := e.TakeFiles(e.files); err != nil {
		return err
	}
	if e.Process.Terminal {
		if err := e.io.makeTerminal(e.Runtime == nil); err != nil {
			return err
		}
	} else {
		e.io.theirs.stdin, e.io.theirs.stdout, e.io.theirs.stderr = e.Stdin, e.Stdout, e.Stderr
	}
	return e.io.theirs.fill()
}

// makeCgroup creates the exec's own cgroup. libcontainer moves the process there.
func (e *libcontainerExec) makeCgroup() {
	dir, hierarchy := makeExecCgroup(e.cgroups, e.ExecID)
	if dir != "" {
		e.setCgroup(dir)
		e.process.SubCgroupPaths = map[string]string{hierarchy: filepath.Base(dir)}
	}
}

// makeExecCgroup creates an exec's own cgroup below the container's, so that kill finds all of its
// processes. On a failure (a threaded cgroup, no freezer) dir is empty, and the exec runs in the
// container's cgroup.
func makeExecCgroup(paths map[string]string, execID string) (dir, hierarchy string) {
	unified := cgroups.IsCgroup2UnifiedMode()
	for _, hierarchy := range proto.ExecHierarchies {
		dir := paths[hierarchy]
		// In hybrid mode paths has a key "", too, but libcontainer uses that key for all
		// hierarchies.
		if dir == "" || unified != (hierarchy == "") {
			continue
		}
		removeEmptyExecs(dir)
		dir = filepath.Join(dir, proto.ExecName(execID))
		failpoint.Reach("launcher.make-exec-cgroup")
		if os.Mkdir(dir, 0o755) != nil {
			continue
		}
		failpoint.Reach("launcher.exec-cgroup-made")
		if !isDomain(dir) {
			_ = unix.Rmdir(dir)
			continue
		}
		return dir, hierarchy
	}
	return "", ""
}

// staleExec is an age. If an exec's cgroup is older and empty, it stays empty. A younger cgroup may
// be waiting for its process.
const staleExec = time.Minute

// removeEmptyExecs removes cgroups of earlier execs whose last process ended after the exec itself.
// The kernel refuses to remove cgroups with processes.
func removeEmptyExecs(dir string) {
	old, _ := filepath.Glob(filepath.Join(dir, "exec-*")) // it fails only for bad patterns
	for _, d := range old {
		if info, err := os.Stat(d); err == nil && time.Since(info.ModTime()) > staleExec {
			_ = unix.Rmdir(d)
		}
	}
}

// isDomain returns whether a cgroup can have processes. A v2 cgroup below a threaded domain cannot.
func isDomain(dir string) bool {
	kind, err := os.ReadFile(filepath.Join(dir, "cgroup.type"))
	return err != nil || strings.TrimSpace(string(kind)) == "domain"
}

// abandon removes everything of an exec that could not be started.
func (e *execution) abandon() {
	failpoint.Reach("launcher.abandon-exec")
	if e.pid > 0 {
		if e.pidfd != nil {
			_ = e.backend.kill()
			_ = e.pidfd.Close()
		} else {
			_ = unix.Kill(e.pid, unix.SIGKILL) // it is a child that was not reaped, so the pid is its own
		}
		_, _ = e.backend.wait() // the result only says that it was killed
	}
	e.io.abandon()
	e.l.endChildren(killTimeout) // left by a start that failed or was killed
	failpoint.Reach("launcher.exec-abandoned")
	e.removeCgroup()
}

// removeCgroup removes the exec's cgroup unless it has processes. Children of an exec that has
// ended may live on with the container.
func (e *execution) removeCgroup() {
	if e.cgroup == "" {
		return
	}
	for deadline := time.Now().Add(busyTime); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		if unix.Rmdir(e.cgroup) != unix.EBUSY {
			failpoint.Reach("launcher.exec-cgroup-removed")
			return
		}
		if pids, err := cgroup.ProcsIn(e.cgroup); err != nil || len(pids) > 0 {
			return
		}
	}
}

// busyTime is how long the kernel may return EBUSY for a cgroup without processes.
const busyTime = time.Second

// listen reads the daemon's messages. It begins before the start, because a container that is
// frozen or short of memory delays the start. stop ends it. If the connection has ended, it has
// killed the exec and returns an error.
func (e *execution) listen() (stop func() error) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- e.obey(ctx) }()
	return func() error {
		cancel()
		if err := e.l.conn.SetDeadline(time.Unix(1, 0)); err != nil {
			return err
		}
		if gone := <-ended; gone != nil {
			return gone
		}
		return e.l.conn.SetDeadline(time.Time{})
	}
}

func (e *execution) obey(ctx context.Context) error {
	for {
		var r proto.Request
		_, err := e.l.conn.Receive(&r)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded) && ctx.Err() != nil:
			return nil
		case err != nil:
			if killErr := e.killStarting(); killErr != nil {
				return fmt.Errorf("exec %s in %s: %w, %w", e.ExecID, e.ID, err, killErr)
			}
			return err
		case r.Kill == e.ExecID: // a Kill of an earlier exec is ignored
			if err := e.killStarting(); err != nil {
				e.l.warnings.add(fmt.Sprintf("kill exec %s in %s: %v", e.ExecID, e.ID, err))
			}
		}
	}
}

// killStarting kills the exec. While the process is being started it kills repeatedly, since the
// process enters its cgroup at some point meanwhile.
func (e *execution) killStarting() error {
	for {
		select {
		case <-e.starting:
			return e.backend.kill()
		case <-time.After(killInterval):
			_ = e.backend.kill() // the kill after the start is decisive
		}
	}
}

// killTimeout bounds the wait for the death of an exec's processes. The removal of the container
// ends the rest.
const killTimeout = 10 * time.Second

// killProcesses kills all of the exec's processes on the host, including descendants that init has
// adopted.
func (e *execution) killProcesses() error {
	failpoint.Reach("launcher.kill-exec")
	e.mu.Lock()
	dir, pid, proc := e.cgroup, e.pid, e.pidfd
	e.mu.Unlock()
	switch {
	case dir != "":
		err := cgroup.KillDir(dir, killTimeout)
		if proc != nil { // it may have moved to a cgroup that the container has made
			err = errors.Join(err, ignore(pidfd.Signal(proc, unix.SIGKILL), os.ErrProcessDone))
		}
		return err
	case proc != nil:
		return pidfd.KillTree(pid, proc) // processes that the container's init has adopted end with the container
	}
	return nil // nothing runs
}

func exitCode(state *os.ProcessState, _ error) int32 {
	if state == nil {
		return 255
	}
	if status, ok := state.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return 128 + int32(status.Signal())
	}
	return int32(state.ExitCode())
}
