package shim

import (
	"context"
	"errors"
	"os"

	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/shim/proto"
	"berth/shim/running"
)

// Exec is a process started in a running container. It is safe for concurrent use. Close or
// HandOver must be called once.
type Exec struct {
	*running.Exec
	l   *Launchers
	p   *launcher
	req *proto.Exec
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
	e, err := l.execWith(ctx, req, func() (*launcher, error) { return l.take(true, req.ID, req.Runtime != nil) })
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
	got, err := running.Receive(ctx, e.p.conn, &reply)
	err = watch.result(err)
	e.l.logWarnings(req.ID, reply.Warnings)
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded): // do not wait, because the launcher kills the process when it is retired
		return false, context.Cause(ctx)
	case err != nil:
		return false, errdefs.Internal("the launcher is lost: %w", err)
	case reply.Error != nil:
		return true, failure(ctx, reply.Error)
	case reply.Exec == nil:
		return false, errors.Join(errdefs.Internal("unexpected reply from the launcher"), closeFiles(got))
	}
	record := running.RecordOf(req)
	record.Process = reply.Exec.PID
	e.Exec, err = running.New(record, e.p.conn, got, e.l.cfg.Log)
	return err == nil, err
}

// Close releases the exec. It kills a process that still runs, with its descendants. After a
// complete exec the launcher serves again.
func (e *Exec) Close() error {
	if ended, _, err := e.Result(); ended && err == nil {
		e.l.giveBack(e.p)
	} else {
		e.l.giveUp(e.p, e.req)
	}
	return e.CloseFiles()
}

// HandOver gives the exec and its launcher to another process, as running.Exec.HandOver does. The
// launcher does not return to the pool. After an error the exec is killed.
func (e *Exec) HandOver(send func(running.Record, []*os.File) error) error {
	failpoint.Reach("exec.hand-over")
	if err := e.Exec.HandOver(e.p.proc, send); err != nil {
		return errors.Join(err, e.Close())
	}
	failpoint.Reach("exec.handed-over")
	e.l.forget(e.p)
	return e.CloseFiles()
}
