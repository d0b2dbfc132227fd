package shim

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/cgroup"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/pidfd"
	"berth/shim/proto"
)

// Exec is a process started in a running container. It is safe for concurrent use. Close must be
// called once.
type Exec struct {
	l       *Launchers
	p       *launcher
	req     *proto.Exec
	pid     int
	proc    *os.File // pidfd
	console *os.File

	waiting sync.Mutex // held by the caller of Wait that reads the connection
	mu      sync.Mutex
	// +checklocks:mu
	ended bool
	// +checklocks:mu
	code int32
	// +checklocks:mu
	err error
}

// Exec starts a process in a running container. It duplicates the files of req, which the caller
// still owns. If ctx ends before the process runs, Exec kills it. Later, ctx has no effect.
//
// Errors do not name the container. The error is FailedPrecondition if the container is not
// running. It is InvalidArgument if the process cannot be started, for example if the command does
// not exist.
func (l *Launchers) Exec(ctx context.Context, req *proto.Exec) (*Exec, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	e, err := l.execWith(ctx, req, func() (*launcher, error) { return l.take(true, req.ID) })
	if errors.Is(err, errUnresponsive) {
		if ctx.Err() != nil { // the command must not run after its client's deadline
			return nil, context.Cause(ctx)
		}
		l.cfg.Log.Warn("launcher does not read its request, sending it to another", "container", req.ID, "error", err)
		e, err = l.execWith(ctx, req, l.start)
	}
	return e, err
}

// execWith sends the request to the launcher that take returns.
func (l *Launchers) execWith(ctx context.Context, req *proto.Exec, take func() (*launcher, error)) (*Exec, error) {
	l.lend(1)
	p, err := take()
	if err != nil {
		l.lend(-1)
		return nil, err
	}
	if err := l.oom.lend(p.pid); err != nil { // a dead launcher fails the request below
		l.cfg.Log.Warn("raise oom_score_adj of the launcher of an exec", "container", req.ID, "error", err)
	}
	p.loaded = req.ID
	e := &Exec{l: l, p: p, req: req}
	again, err := e.start(ctx, req)
	switch {
	case err == nil:
		return e, nil
	case again:
		l.giveBack(p)
		return nil, err
	}
	if errors.Is(err, errUnresponsive) {
		l.giveUpUnresponsive(p, req)
	} else {
		l.giveUp(p, req)
	}
	return nil, err
}

// start sends the request and waits until the process runs. On an error, again says whether the
// launcher can serve again.
func (e *Exec) start(ctx context.Context, req *proto.Exec) (again bool, err error) {
	request, files := req.PassFiles()
	watch := e.p.watchRequest(requestTimeout)
	if err := watch.sent(e.p.conn.Send(proto.Request{Exec: request}, files...)); err != nil {
		return false, errdefs.Internal("ask the launcher: %w", err)
	}
	var reply proto.Reply
	got, err := e.receive(ctx, &reply)
	err = watch.result(err)
	e.l.logWarnings(req.ID, reply.Warnings)
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded): // do not wait, because the launcher kills the process when it is retired
		return false, context.Cause(ctx)
	case err != nil:
		return false, errdefs.Internal("the launcher is lost: %w", err)
	case reply.Error != nil:
		return true, failure(ctx, reply.Error)
	case reply.Exec == nil || len(got) < 1 || len(got) > 2:
		return false, errors.Join(errdefs.Internal("unexpected reply from the launcher"), closeFiles(got))
	}
	e.pid = reply.Exec.PID
	if e.proc, err = asPidfd(got[0]); err != nil {
		return false, errors.Join(err, closeFiles(got[1:]))
	}
	if len(got) == 2 {
		if e.console, err = asConsole(got[1]); err != nil {
			return false, errors.Join(err, e.proc.Close())
		}
	}
	return true, nil
}

// asConsole converts a received terminal to a file with deadlines.
func asConsole(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("take over terminal: %w", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, errors.Join(fmt.Errorf("take over terminal: %w", err), unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), "terminal"), nil
}

// PID returns the process's ID on the host.
func (e *Exec) PID() int { return e.pid }

// Console returns the master of the process's terminal, or nil if it has no terminal. Close closes
// it.
func (e *Exec) Console() *os.File { return e.console }

// Resize changes the terminal's size, in characters.
func (e *Exec) Resize(width, height uint16) error {
	if e.console == nil {
		return errdefs.FailedPrecondition("resize terminal: the process has none")
	}
	conn, err := e.console.SyscallConn()
	if err != nil {
		return fmt.Errorf("resize terminal: %w", err)
	}
	var sizeErr error
	err = conn.Control(func(fd uintptr) {
		sizeErr = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: height, Col: width})
	})
	if err := errors.Join(err, sizeErr); err != nil {
		return fmt.Errorf("resize terminal: %w", err)
	}
	return nil
}

// Kill kills the process and all its descendants, including those that the container's init has
// adopted. It does not wait for their end, but Wait does.
func (e *Exec) Kill() error {
	e.mu.Lock()
	ended := e.ended
	e.mu.Unlock()
	if ended {
		return nil
	}
	if err := e.p.conn.Send(proto.Request{Kill: e.req.ExecID}); err != nil {
		return errors.Join(fmt.Errorf("kill exec: %w", err), pidfd.Signal(e.proc, unix.SIGKILL))
	}
	return nil
}

// Wait waits for the end of the process, not of its children, and returns the exit code or
// 128+signal. It may be called again after ctx has ended.
func (e *Exec) Wait(ctx context.Context) (int32, error) {
	e.waiting.Lock()
	defer e.waiting.Unlock()
	if ended, code, err := e.result(); ended {
		return code, err
	}
	var reply proto.Reply
	_, err := e.receive(ctx, &reply)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return 0, context.Cause(ctx)
	}
	e.l.logWarnings(e.req.ID, reply.Warnings)
	return e.finish(&reply, err)
}

// receive is Conn.Receive with a context. The connection stays usable after ctx has ended.
func (e *Exec) receive(ctx context.Context, reply *proto.Reply) ([]*os.File, error) {
	interrupted := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(interrupted)
		_ = e.p.conn.SetDeadline(time.Unix(1, 0)) // it fails only on a closed connection
	})
	files, err := e.p.conn.Receive(reply)
	if !stop() {
		<-interrupted // otherwise the deadline would hit the connection's next user
		if resetErr := e.p.conn.SetDeadline(time.Time{}); resetErr != nil {
			return nil, errors.Join(resetErr, closeFiles(files))
		}
	}
	return files, err
}

func (e *Exec) result() (ended bool, code int32, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.ended, e.code, e.err
}

func (e *Exec) finish(reply *proto.Reply, err error) (int32, error) {
	switch {
	case err != nil:
		err = errdefs.Internal("the launcher is lost: %w", err)
	case reply.Exited == nil:
		err = errdefs.Internal("unexpected reply from the launcher")
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ended, e.err = true, err
	if err != nil { // Close kills its descendants
		_ = pidfd.Signal(e.proc, unix.SIGKILL) // it may have ended
		return 0, err
	}
	e.code = reply.Exited.Code
	return e.code, nil
}

// Close releases the exec. It kills a process that still runs, with its descendants. After a
// complete exec the launcher serves again.
func (e *Exec) Close() error {
	if ended, _, err := e.result(); ended && err == nil {
		e.l.giveBack(e.p)
	} else {
		e.l.giveUp(e.p, e.req)
	}
	return e.closeFiles()
}

// removeExecTimeout bounds the wait for the processes of an exec that has lost its launcher.
// Survivors end with their container.
const removeExecTimeout = 10 * time.Second

// removeExec kills the processes of an exec that lost its launcher and removes its cgroup. If the
// exec has no cgroup, the caller kills only the announced process.
func removeExec(req *proto.Exec) error {
	var err error
	if req.Runtime != nil {
		failpoint.Reach("exec.remove-directory")
		err = os.RemoveAll(filepath.Join(req.Dir, proto.ExecName(req.ExecID)))
		failpoint.Reach("exec.directory-removed")
	}
	if req.CgroupsPath == "" {
		return err
	}
	group, openErr := cgroup.Open(req.CgroupsPath, req.SystemdCgroup)
	if openErr != nil {
		return errors.Join(err, openErr)
	}
	for _, hierarchy := range proto.ExecHierarchies {
		dir := group.Paths()[hierarchy]
		if dir == "" {
			continue
		}
		dir = filepath.Join(dir, proto.ExecName(req.ExecID))
		failpoint.Reach("exec.kill-left")
		err = errors.Join(err, cgroup.KillDir(dir, removeExecTimeout), removeGroup(dir))
		failpoint.Reach("exec.left-killed")
	}
	return err
}

// removeGroup removes a cgroup that has no processes, if it exists. The kernel may return EBUSY for
// a moment.
func removeGroup(dir string) error {
	for deadline := time.Now().Add(removeExecTimeout); ; time.Sleep(time.Millisecond) {
		err := unix.Rmdir(dir)
		if err == nil || err == unix.ENOENT {
			return nil
		}
		if err != unix.EBUSY || time.Now().After(deadline) {
			return &os.PathError{Op: "remove cgroup", Path: dir, Err: err}
		}
	}
}

func (e *Exec) closeFiles() error {
	err := e.proc.Close()
	if e.console != nil {
		err = errors.Join(err, e.console.Close())
	}
	return err
}
