package shim

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/internal/cgroup"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/pidfd"
	"berth/internal/trace"
	"berth/shim/ociruntime"
	"berth/shim/proto"
)

const (
	// undoTime bounds the undo of a cancelled launch.
	undoTime = 20 * time.Second
	// cleanupTime bounds the removal of a lost launcher's remains.
	cleanupTime = 10 * time.Second
)

// Launch creates and starts a container or a pause. On an error it leaves no process, cgroup,
// libcontainer state or socket. The end of ctx cancels the launch. If the container is already
// running, Launch succeeds.
//
// Errors do not name the container. Codes: InvalidArgument if the spec cannot be carried out, for
// example if the command does not exist; Canceled or DeadlineExceeded with ctx; otherwise Internal.
func (l *Launchers) Launch(ctx context.Context, req *proto.Launch) (*proto.Started, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	plainPause := req.Pause == proto.PlainPause // its launcher will serve again
	switch {
	case plainPause && cgroup.MovesItself(req.SystemdCgroup):
		defer l.Expect() // the pod's containers will follow
	case req.Pause != "":
		l.Expect() // for this launch and the containers that follow
	default:
		defer l.expect()()
	}
	if plainPause {
		l.lend(1)
		defer l.wantMore() // starts another launcher if this one is lost
		defer l.lend(-1)
	}
	p, err := l.takeTraced(ctx, req)
	if err != nil {
		return nil, err
	}
	started, again, err := l.launchWith(ctx, p, req)
	if errors.Is(err, errUnresponsive) {
		l.retire(p)
		l.retireStopped()
		if ctx.Err() != nil { // the pod of a cancelled request may be gone: no other launcher gets it
			return nil, fmt.Errorf("%w: %w", err, ctx.Err())
		}
		l.cfg.Log.Warn("launcher does not read its request, sending it to another", "container", req.ID, "pid", p.pid,
			"error", err)
		if p, err = l.start(); err != nil {
			return nil, err
		}
		started, again, err = l.launchWith(ctx, p, req)
	}
	switch {
	case again && err == nil:
		l.put(p)
	case req.Pause != "" || err != nil:
		l.retire(p)
	}
	return started, err
}

// takeTraced is takeFor with a span, because takeFor may have to start a launcher.
func (l *Launchers) takeTraced(ctx context.Context, req *proto.Launch) (*launcher, error) {
	defer trace.Begin(ctx, "get launcher").End()
	return l.takeFor(req.Spec)
}

// launchWith sends the request to p and waits for the reply. It returns whether p waits for its
// next request.
func (l *Launchers) launchWith(
	ctx context.Context, p *launcher, req *proto.Launch,
) (_ *proto.Started, again bool, err error) {
	if err := recordLauncher(ctx, p, req.Dir); err != nil {
		return nil, false, errdefs.Internal("launch %s: %w", req.ID, err)
	}
	ctx, span := trace.Nest(ctx, "launcher")
	defer span.End()
	var reply proto.Reply
	sent := trace.Now()
	failpoint.Reach("launch.send")
	request, mounts := req.PassFiles()
	watch := p.watchRequest(requestTimeout)
	err = watch.sent(p.conn.Send(proto.Request{Launch: request}, mounts...))
	failpoint.Reach("launch.sent")
	var files []*os.File
	if err == nil {
		files, err = l.receive(ctx, p, &reply)
		err = watch.result(err)
	}
	switch {
	case errors.Is(err, errUnresponsive):
		if cleanupErr := l.cleanUpUnresponsive(p, req); cleanupErr != nil { // the launcher may be reading now
			err = errdefs.Internal("%v: %w", err, cleanupErr)
		}
	case err != nil:
		l.losses.Add(1)
		err = errors.Join(errdefs.Internal("the launcher is lost: %w", err), l.cleanUp(p, req))
	case reply.Error != nil:
		err = failure(ctx, reply.Error)
	case reply.Started == nil || len(files) != 1:
		err = errors.Join(errdefs.Internal("unexpected reply from the launcher"), l.cleanUp(p, req))
	}
	failpoint.Reach("launch.answered")
	l.logWarnings(req.ID, reply.Warnings)
	if err != nil {
		return nil, false, errors.Join(err, closeFiles(files))
	}
	trace.Add(ctx, withTransfer(reply.Started.Steps, sent))
	started, err := l.started(p, req, reply.Started, files[0])
	return started, reply.Started.Again, err
}

// withTransfer returns the launcher's steps with two more: the transfer of the request, which was
// sent at the time sent, and the transfer of the answer.
func withTransfer(steps []trace.Step, sent int64) []trace.Step {
	if len(steps) == 0 {
		return nil
	}
	last := steps[len(steps)-1].Ended
	request := trace.Step{Name: "send request", Began: sent, Ended: steps[0].Began}
	answer := trace.Step{Name: "receive answer", Began: last, Ended: trace.Now()}
	return slices.Concat([]trace.Step{request}, steps, []trace.Step{answer})
}

// recordLauncher writes the launcher's identity to Dir/shim before the request. The launcher
// removes the record as the last step of an undo. So a later daemon, too, treats a launch without a
// record as ended.
func recordLauncher(ctx context.Context, p *launcher, dir string) error {
	defer trace.Begin(ctx, "record").End()
	start, err := pidfd.StartTime(p.pid)
	if err != nil {
		return fmt.Errorf("the launcher is lost: %w", err)
	}
	failpoint.Reach("launch.record")
	processes := proto.Processes{ShimPID: p.pid, ShimStartTime: start}
	if err := proto.WriteFile(dir, proto.ShimFile, processes.Encode()); err != nil {
		return fmt.Errorf("record its launcher: %w", err)
	}
	failpoint.Reach("launch.recorded")
	return nil
}

// receive waits for the reply to a launch. When ctx ends it closes its direction of the connection,
// which cancels the launch. The launcher may still report success.
func (l *Launchers) receive(ctx context.Context, p *launcher, reply *proto.Reply) ([]*os.File, error) {
	stop := context.AfterFunc(ctx, func() {
		// Both fail only if the launcher has exited. Receive returns then, too.
		_ = p.conn.SetDeadline(time.Now().Add(undoTime))
		_ = p.conn.CloseWrite()
	})
	files, err := p.conn.Receive(reply)
	if !stop() && reply.Started != nil {
		reply.Started.Again = false // the launcher reads the end of the connection and exits
	}
	return files, err
}

// started adds the files to the result. The caller owns them.
func (l *Launchers) started(
	p *launcher, req *proto.Launch, s *proto.Started, init *os.File,
) (_ *proto.Started, err error) {
	if s.Init, err = asPidfd(init); err != nil {
		return nil, errors.Join(err, l.cleanUp(p, req))
	}
	if req.Pause != "" {
		return s, nil
	}
	s.Shim = p.proc
	// The launcher has become the monitor, which does not use the connection.
	if err := p.conn.Close(); err != nil {
		l.cfg.Log.Warn("close connection to launcher", "pid", p.pid, "error", err)
	}
	return s, nil
}

// asPidfd converts a received pidfd to a file that package pidfd can wait for.
func asPidfd(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("take over pidfd: %w", err)
	}
	return pidfd.FromFD(fd)
}

// cleanUp kills a launcher that failed to finish, and removes the remains of its launch.
func (l *Launchers) cleanUp(p *launcher, req *proto.Launch) error {
	if err := kill(p.proc); err != nil {
		return fmt.Errorf("kill the launcher: %w", err)
	}
	return l.removeLaunch(req)
}

// cleanUpUnresponsive is cleanUp for a launcher that has not read its request.
func (l *Launchers) cleanUpUnresponsive(p *launcher, req *proto.Launch) error {
	if err := p.killUnresponsive(); err != nil {
		return fmt.Errorf("kill the launcher: %w", err)
	}
	failpoint.Reach("launch.remove-record")
	err := remove(filepath.Join(req.Dir, proto.ShimFile)) // the launcher may exit much later, so remove its record here
	failpoint.Reach("launch.record-removed")
	if err != nil {
		return err
	}
	return l.removeLaunch(req)
}

// removeLaunch removes the processes, cgroup and files that a killed launcher may have left.
func (l *Launchers) removeLaunch(req *proto.Launch) error {
	if req.Spec == nil || req.Spec.Linux == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), cleanupTime)
	defer cancel()
	group, err := cgroup.Open(req.Spec.Linux.CgroupsPath, req.SystemdCgroup)
	if err != nil {
		return err
	}
	if err := KillAndDestroy(ctx, req.ID, req.Dir, group); err != nil {
		return err // the next attempt needs the runtime's record
	}
	failpoint.Reach("launch.processes-removed")
	for _, v := range req.Volumes { // the mount has disappeared with the launcher's mount namespace
		err = errors.Join(err, remove(v.Path))
	}
	return errors.Join(
		err,
		os.RemoveAll(filepath.Join(l.cfg.StateRoot, req.ID)),
		remove(filepath.Join(req.Dir, proto.RuntimeFile)),
		remove(filepath.Join(req.Dir, ociruntime.ConfigFile)),
		remove(filepath.Join(req.Dir, proto.ShimFile)),
		proto.UnreserveFile(req.Dir, proto.ExitFile),
		remove(filepath.Join(req.Dir, proto.SocketFile)),
		remove(filepath.Join(req.Dir, "rootfs")),
	)
}

func remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// failure converts a launcher's error to a gRPC error. A launch that failed after ctx ended returns
// ctx's error.
func failure(ctx context.Context, e *proto.Error) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%s: %w", e.Message, err)
	}
	return errdefs.Reported(codes.Code(e.Code), e.Message)
}

func (l *Launchers) logWarnings(id string, warnings []string) {
	for _, w := range warnings {
		l.cfg.Log.Warn("launcher: "+w, "container", id)
	}
}

func closeFiles(files []*os.File) error {
	var err error
	for _, f := range files {
		err = errors.Join(err, f.Close())
	}
	return err
}
