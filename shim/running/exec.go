package running

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/coded"
	"berth/internal/pidfd"
	"berth/shim/proto"
)

// Exec is a process that a launcher has started in a container. It is safe for concurrent use.
type Exec struct {
	Record

	conn    *proto.Conn // to the launcher
	proc    *os.File    // pidfd
	console *os.File
	log     *slog.Logger

	waiting sync.Mutex // held by the caller of Wait that reads the connection
	mu      sync.Mutex
	// +checklocks:mu
	ended bool
	// +checklocks:mu
	code int32
	// +checklocks:mu
	err error
}

// New returns the exec of a launcher's reply. files are the pidfd of the process and, with a
// terminal, its master. New takes over the files. The caller still owns conn.
func New(r Record, conn *proto.Conn, files []*os.File, log *slog.Logger) (*Exec, error) {
	if len(files) < 1 || len(files) > 2 {
		return nil, errors.Join(coded.Errorf(coded.Internal, "exec with %d files", len(files)), closeFiles(files))
	}
	e := &Exec{Record: r, conn: conn, log: log}
	var err error
	if e.proc, err = pidfd.FromFile(files[0]); err != nil {
		return nil, errors.Join(err, closeFiles(files[1:]))
	}
	if len(files) == 2 {
		if e.console, err = NonBlocking(files[1]); err != nil {
			return nil, errors.Join(err, e.proc.Close())
		}
	}
	return e, nil
}

// NonBlocking converts a received pipe or terminal to a file with deadlines. It takes over f.
func NonBlocking(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("take over %s: %w", f.Name(), err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, errors.Join(fmt.Errorf("take over %s: %w", f.Name(), err), unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

// PID returns the process's ID on the host.
func (e *Exec) PID() int { return e.Process }

// Console returns the master of the process's terminal, or nil if it has no terminal. CloseFiles
// closes it.
func (e *Exec) Console() *os.File { return e.console }

// Resize changes the terminal's size, in characters.
func (e *Exec) Resize(width, height uint16) error {
	if e.console == nil {
		return errors.New("resize terminal: the process has none")
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
	if ended, _, _ := e.Result(); ended {
		return nil
	}
	if err := e.conn.Send(proto.Request{Kill: e.ExecID}); err != nil {
		return errors.Join(fmt.Errorf("kill exec: %w", err), pidfd.Signal(e.proc, unix.SIGKILL))
	}
	return nil
}

// Wait waits for the end of the process, not of its children, and returns the exit code or
// 128+signal. It may be called again after ctx has ended.
func (e *Exec) Wait(ctx context.Context) (int32, error) {
	e.waiting.Lock()
	defer e.waiting.Unlock()
	if ended, code, err := e.Result(); ended {
		return code, err
	}
	var reply proto.Reply
	_, err := Receive(ctx, e.conn, &reply)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return 0, context.Cause(ctx)
	}
	for _, w := range reply.Warnings {
		e.log.Warn("launcher: "+w, "container", e.Container)
	}
	return e.finish(&reply, err)
}

// Receive is Conn.Receive with a context. The connection stays usable after ctx has ended.
func Receive(ctx context.Context, conn *proto.Conn, message any) ([]*os.File, error) {
	interrupted := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(interrupted)
		_ = conn.SetDeadline(time.Unix(1, 0)) // it fails only on a closed connection
	})
	files, err := conn.Receive(message)
	if !stop() {
		<-interrupted // otherwise the deadline would hit the connection's next user
		if resetErr := conn.SetDeadline(time.Time{}); resetErr != nil {
			return nil, errors.Join(resetErr, closeFiles(files))
		}
	}
	return files, err
}

// Result returns the result that a Wait has received.
func (e *Exec) Result() (ended bool, code int32, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.ended, e.code, e.err
}

func (e *Exec) finish(reply *proto.Reply, err error) (int32, error) {
	switch {
	case err != nil:
		err = coded.Errorf(coded.Internal, "the launcher is lost: %w", err)
	case reply.Exited == nil:
		err = coded.Errorf(coded.Internal, "unexpected reply from the launcher")
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ended, e.err = true, err
	if err != nil { // the end of the connection kills its descendants
		_ = pidfd.Signal(e.proc, unix.SIGKILL) // it may have ended
		return 0, err
	}
	e.code = reply.Exited.Code
	return e.code, nil
}

// CloseFiles closes the pidfd and the terminal, but not the connection to the launcher.
func (e *Exec) CloseFiles() error {
	err := e.proc.Close()
	if e.console != nil {
		err = errors.Join(err, e.console.Close())
	}
	return err
}

func closeFiles(files []*os.File) error {
	var err error
	for _, f := range files {
		err = errors.Join(err, f.Close())
	}
	return err
}
