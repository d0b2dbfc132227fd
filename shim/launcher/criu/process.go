package criu

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/checkpoint-restore/go-criu/v8/rpc"
	"golang.org/x/sys/unix"

	"berth/internal/cgroup"
	program "berth/internal/criu"
	"berth/internal/failpoint"
	"berth/shim/proto"
)

// Process is a CRIU that the launcher controls (criu swrk). Start runs it in a separate cgroup, so
// that it can be killed with everything it has started.
type Process struct {
	cmd   *exec.Cmd
	conn  *net.UnixConn
	dir   string        // the cgroup
	ended chan struct{} // closed when CRIU has ended and was reaped
}

// maxMessage is the maximum length of CRIU's messages, in bytes.
const maxMessage = 64 << 10

// Start starts CRIU for a container.
func Start(path, containerID string) (_ *Process, err error) {
	children, err := cgroup.FindChildren()
	if err != nil {
		return nil, err
	}
	p := &Process{dir: children.Dir(proto.CRIUGroup(containerID)), ended: make(chan struct{})}
	failpoint.Reach("launcher.make-criu-cgroup")
	if err := os.Mkdir(p.dir, 0o755); err != nil {
		return nil, fmt.Errorf("make cgroup of CRIU: %w", err)
	}
	failpoint.Reach("launcher.criu-cgroup-made")
	conn, theirs, err := newSocket()
	if err != nil {
		return nil, errors.Join(err, cgroup.RemoveChild(p.dir))
	}
	p.conn = conn
	p.cmd = exec.Command(path, "swrk", "3")
	p.cmd.ExtraFiles = []*os.File{theirs}
	program.Abortable()
	failpoint.Reach("launcher.start-criu")
	err = children.Start(p.cmd, p.dir)
	failpoint.Reach("launcher.criu-started")
	if err != nil {
		return nil, fmt.Errorf("start CRIU: %w", errors.Join(err, theirs.Close(), conn.Close(), cgroup.RemoveChild(p.dir)))
	}
	go p.reap()
	if err := theirs.Close(); err != nil {
		return nil, fmt.Errorf("start CRIU: %w", errors.Join(err, p.End(0)))
	}
	return p, nil
}

// StartCommand starts a command that becomes CRIU (swrk 3), with more files from descriptor 4 on.
// The caller chooses its cgroups, and ends it with Hangup instead of End.
func StartCommand(cmd *exec.Cmd, more ...*os.File) (*Process, error) {
	conn, theirs, err := newSocket()
	if err != nil {
		return nil, err
	}
	defer theirs.Close() // CRIU has its own copy
	cmd.ExtraFiles = append([]*os.File{theirs}, more...)
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start CRIU: %w", errors.Join(err, conn.Close()))
	}
	return &Process{cmd: cmd, conn: conn}, nil
}

// PID returns the process ID of CRIU.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Hangup ends the connection, and waits until CRIU of StartCommand has ended.
func (p *Process) Hangup() {
	_ = p.conn.Close() // CRIU ends
	_ = p.cmd.Wait()   // its answer has told the result
}

// reap waits for CRIU's end, and then ends the wait for CRIU's answer. A child of a killed CRIU may
// still hold the other end of the socket.
func (p *Process) reap() {
	_ = p.cmd.Wait()       // its answer has told the result
	_ = p.conn.CloseRead() // it fails only on a closed connection; an answer that has arrived can still be read
	close(p.ended)
}

// newSocket returns both ends of the socket on which CRIU serves requests.
func newSocket() (*net.UnixConn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "criu"), os.NewFile(uintptr(fds[1]), "criu")
	conn, err := net.FileConn(ours)
	if err := errors.Join(err, ours.Close()); err != nil {
		return nil, nil, errors.Join(err, theirs.Close())
	}
	return conn.(*net.UnixConn), theirs, nil
}

// Version asks CRIU for its version. CRIU then waits for the next request.
func (p *Process) Version() (program.Version, error) {
	resp, err := p.request(&rpc.CriuReq{Type: ptr(rpc.CriuReqType_VERSION), KeepOpen: ptr(true)})
	if err != nil {
		return program.Version{}, err
	}
	v := resp.GetVersion()
	return program.Version{Major: int(v.GetMajorNumber()), Minor: int(v.GetMinorNumber()), Sub: int(v.GetSublevel())}, nil
}

// Dump dumps a container. CRIU asks before some of its steps, and all steps are allowed.
func (p *Process) Dump(opts *rpc.CriuOpts) error {
	failpoint.Reach("launcher.criu-dump")
	resp, err := p.request(&rpc.CriuReq{Type: ptr(rpc.CriuReqType_DUMP), Opts: opts})
	for err == nil && resp.GetType() == rpc.CriuReqType_NOTIFY {
		failpoint.Reach("launcher.criu-notified")
		resp, err = p.request(&rpc.CriuReq{Type: ptr(rpc.CriuReqType_NOTIFY), NotifySuccess: ptr(true)})
	}
	if err == nil && resp.GetType() != rpc.CriuReqType_DUMP {
		err = fmt.Errorf("unexpected answer of type %v", resp.GetType())
	}
	failpoint.Reach("launcher.criu-dumped")
	return err
}

// Restore restores processes. CRIU calls answer before some of its steps, and stops at its error.
func (p *Process) Restore(opts *rpc.CriuOpts, answer func(*rpc.CriuNotify) error) error {
	resp, err := p.request(&rpc.CriuReq{Type: ptr(rpc.CriuReqType_RESTORE), Opts: opts})
	for err == nil && resp.GetType() == rpc.CriuReqType_NOTIFY {
		if err := answer(resp.GetNotify()); err != nil {
			return err
		}
		resp, err = p.request(&rpc.CriuReq{Type: ptr(rpc.CriuReqType_NOTIFY), NotifySuccess: ptr(true)})
	}
	if err == nil && resp.GetType() != rpc.CriuReqType_RESTORE {
		err = fmt.Errorf("unexpected answer of type %v", resp.GetType())
	}
	return err
}

// request sends a message and returns the next one.
func (p *Process) request(req *rpc.CriuReq) (*rpc.CriuResp, error) {
	data, err := req.MarshalVT()
	if err != nil {
		return nil, fmt.Errorf("ask CRIU: %w", err)
	}
	if _, err := p.conn.Write(data); err != nil {
		return nil, fmt.Errorf("ask CRIU: %w", err)
	}
	buf := make([]byte, maxMessage)
	n, err := p.conn.Read(buf)
	if err != nil {
		return nil, fmt.Errorf("CRIU has ended: %w", err)
	}
	resp := new(rpc.CriuResp)
	if err := resp.UnmarshalVT(buf[:n]); err != nil {
		return nil, fmt.Errorf("answer of CRIU: %w", err)
	}
	if !resp.GetSuccess() {
		return nil, fmt.Errorf("%w: %s", ErrRefused, explain(resp))
	}
	return resp, nil
}

// ErrRefused means that CRIU has answered that it cannot carry out a request.
var ErrRefused = errors.New("CRIU failed")

func explain(resp *rpc.CriuResp) string {
	if text := resp.GetCrErrmsg(); text != "" {
		return strings.TrimSpace(text)
	}
	if errno := resp.GetCrErrno(); errno > 0 {
		return unix.Errno(errno).Error()
	}
	return "unknown error"
}

// EndTimeout bounds the death of a killed CRIU. A killed CRIU that takes longer hangs in the
// kernel.
const EndTimeout = 10 * time.Second

// End lets CRIU end by itself for a grace time, kills the remaining processes, and removes the
// cgroup.
func (p *Process) End(grace time.Duration) error {
	err := p.conn.Close()
	select {
	case <-p.ended:
	case <-time.After(grace):
	}
	failpoint.Reach("launcher.end-criu")
	err = errors.Join(err, cgroup.KillChild(p.dir, EndTimeout))
	select {
	case <-p.ended:
	case <-time.After(EndTimeout):
		return errors.Join(err, errors.New("CRIU does not end"))
	}
	err = errors.Join(err, cgroup.RemoveChild(p.dir))
	failpoint.Reach("launcher.criu-ended")
	return err
}

// Abort makes CRIU undo its steps and end. If that takes too long, Kill follows.
func (p *Process) Abort() error { return program.Abort(p.dir) }

// Kill kills CRIU with everything it has started. End reports processes that survive.
func (p *Process) Kill() error { return cgroup.KillChild(p.dir, EndTimeout) }

func ptr[T any](v T) *T { return &v }
