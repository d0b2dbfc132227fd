package shim

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/pidfd"
	"berth/internal/trace"
	"berth/shim/proto"
)

const (
	// requestTimeout is the time until the first check whether a launcher has read its request. A
	// running launcher needs a millisecond. A launcher is given up at the second check at the
	// earliest, after 500 ms.
	requestTimeout = 400 * time.Millisecond
	// orderCheckInterval is the interval of later checks.
	orderCheckInterval = 100 * time.Millisecond
	// slowOrderTimeout bounds the wait for a launcher that is not frozen, but waits for a processor
	// or a disk. On a loaded machine, replacing it costs more than waiting.
	slowOrderTimeout = 10 * time.Second
)

// errUnresponsive means that a launcher did not read its request, because it is frozen, slow or
// dead. Another launcher can get the request.
var errUnresponsive = errdefs.Internal("the launcher does not read its request")

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
	case reply.Started == nil || len(files) != 1 && !req.Lasts || len(files) != 2 && req.Lasts:
		err = errors.Join(errdefs.Internal("unexpected reply from the launcher"), l.cleanUp(p, req))
	}
	failpoint.Reach("launch.answered")
	l.logWarnings(req.ID, reply.Warnings)
	if err != nil {
		return nil, false, errors.Join(err, closeFiles(files))
	}
	trace.Add(ctx, withTransfer(reply.Started.Steps, sent))
	started, err := l.started(p, req, reply.Started, files)
	return started, reply.Started.Again, err
}

// withTransfer returns the launcher's steps with two more steps: the transfer of the request and
// the transfer of the answer. sent is the time at which the request was sent.
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
	processes := proto.PIDs{MonitorPID: p.pid, MonitorStartTime: start}
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
		_ = p.conn.SetDeadline(time.Now().Add(launchUndoTimeout))
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
	p *launcher, req *proto.Launch, s *proto.Started, files []*os.File,
) (_ *proto.Started, err error) {
	s.Init, err = pidfd.FromFile(files[0])
	if err == nil && req.Lasts {
		s.Shim, err = pidfd.FromFile(files[1])
	}
	if err != nil {
		if s.Init != nil {
			err = errors.Join(err, s.Init.Close())
		}
		return nil, errors.Join(err, l.cleanUp(p, req))
	}
	if req.Pause != "" || req.Lasts {
		return s, nil
	}
	s.Shim = p.proc
	// The launcher becomes the monitor, which does not use the connection.
	if err := p.conn.Close(); err != nil {
		l.cfg.Log.Warn("close connection to launcher", "pid", p.pid, "error", err)
	}
	return s, nil
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

// requestWatch watches whether a launcher reads its request.
type requestWatch struct {
	p     *launcher
	timer *time.Timer
	begun time.Time

	mu sync.Mutex
	// +checklocks:mu
	isSent bool
	// +checklocks:mu
	over bool
	// +checklocks:mu
	unresponsive bool
	// +checklocks:mu
	wasFrozen bool // at the previous check, with the request unread
}

// watchRequest starts the watch; the request is sent afterwards. If the launcher does not read it,
// Send and Receive fail. They fail after timeout if the launcher is frozen, and after
// slowOrderTimeout if it is slow.
func (p *launcher) watchRequest(timeout time.Duration) *requestWatch {
	w := &requestWatch{p: p, begun: time.Now()}
	w.mu.Lock() // check waits until timer is set
	defer w.mu.Unlock()
	w.timer = time.AfterFunc(timeout, w.check)
	return w
}

func (w *requestWatch) check() {
	frozen := w.p.isFrozen() // this is checked first, because the launcher may just have read everything and sleep
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.over {
		return
	}
	unread, err := w.p.conn.Unread()
	if err != nil || unread == 0 && w.isSent { // the connection has ended, or the request was read
		return
	}
	// This process may have sent the request only after that check, for lack of a processor. A
	// healthy launcher slept until then. So one check is not enough.
	frozen = frozen && unread > 0
	if frozen && w.wasFrozen || unread > 0 && time.Since(w.begun) > slowOrderTimeout {
		w.unresponsive = true
		_ = w.p.conn.Interrupt() // it fails only on a closed connection, where no read waits
	}
	w.wasFrozen = frozen
	w.timer.Reset(orderCheckInterval) // check again, because a send that starts now removes the deadline
}

// result ends the watch and returns errUnresponsive if that is the cause of err, otherwise err.
func (w *requestWatch) result(err error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.timer.Stop()
	w.over = true
	if errors.Is(err, proto.ErrUnread) {
		return fmt.Errorf("the launcher is lost: %w: %w", errUnresponsive, err)
	}
	if !w.unresponsive || errors.Is(err, errUnresponsive) {
		return err
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return errUnresponsive
	}
	// The launcher has just replied. Remove the deadline for the next reply.
	return errors.Join(err, w.p.conn.SetDeadline(time.Time{}))
}

// sent notes the result of sending the request. It returns nil, or ends the watch and returns its
// result.
func (w *requestWatch) sent(err error) error {
	if err == nil {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.isSent = true
		return nil
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = errUnresponsive
	}
	return w.result(err)
}

// isFrozen returns whether no thread of the launcher runs, is runnable or waits for a disk,
// although there is a request to read. Then a signal, a tracer or the cgroup's freezer has stopped
// it.
func (p *launcher) isFrozen() bool {
	threads, err := pidfd.Threads(p.pid)
	if err != nil || len(threads) == 0 {
		return false
	}
	return !slices.ContainsFunc(threads, func(t pidfd.Thread) bool {
		return t.State == 'R' || t.State == 'D' && !t.InFreezer(p.pid)
	})
}

// frozenEnd bounds the wait for the end of a killed launcher that may be frozen.
const frozenEnd = 500 * time.Millisecond

// killUnresponsive kills a launcher that has not read its request. It does not wait for a launcher
// in a frozen cgroup v1. Such a launcher executes no instruction until it is thawed, and then
// exits.
func (p *launcher) killUnresponsive() error {
	err := killUpTo(p.proc, frozenEnd)
	if !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	if p.isFrozen() {
		return nil
	}
	return kill(p.proc)
}

// retireStopped also ends the idle launchers that are stopped or frozen, because each call that
// took such a launcher would wait for it.
func (l *Launchers) retireStopped() {
	for _, p := range l.takeStopped() {
		l.cfg.Log.Warn("idle launcher is stopped, killing it", "pid", p.pid)
		if err := pidfd.Signal(p.proc, unix.SIGKILL); err != nil && !errors.Is(err, os.ErrProcessDone) {
			l.cfg.Log.Error("kill launcher", "pid", p.pid, "error", err)
		}
		l.retire(p) // it waits in the background
	}
	l.wantMore()
}

// takeStopped removes the stopped launchers from the pool.
func (l *Launchers) takeStopped() (stopped []*launcher) {
	l.mu.Lock()
	idle := slices.Clone(l.idle)
	l.mu.Unlock()
	for _, p := range idle {
		isStopped, err := pidfd.AnyStopped(p.pid) // drop notices if it was taken meanwhile
		if err == nil && isStopped && l.drop(p.launcher) {
			stopped = append(stopped, p.launcher)
		}
	}
	return stopped
}
