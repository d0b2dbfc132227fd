package shim

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"berth/internal/cgroup"
	"berth/internal/criu"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/pidfd"
	"berth/shim/proto"
)

// Dump is a dump of a running container by CRIU. The caller prepares it, freezes the container,
// calls Run, thaws the container, and calls Close. It is not safe for concurrent use.
type Dump struct {
	l   *Launchers
	p   *launcher
	req *proto.Dump
	dir string // CRIU's cgroup

	dumped proto.Dumped // facts that the launcher found out
}

// Info returns the facts that the launcher found out about the container and CRIU.
func (d *Dump) Info() proto.Dumped { return d.dumped }

// PrepareDump starts CRIU for a dump, and checks whether the container can be dumped. CRIU waits
// until Run. The caller still owns req.Dir, and must call Close.
//
// Errors do not name the container. The error is FailedPrecondition if the container does not run,
// cannot be dumped, or CRIU is too old. It is ResourceExhausted if the filesystem of req.Dir is
// full.
func (l *Launchers) PrepareDump(ctx context.Context, req *proto.Dump) (_ *Dump, err error) {
	children, err := cgroup.FindChildren()
	if err != nil {
		return nil, err
	}
	p, err := l.take(l.cfg.Warm, "", false)
	if err != nil {
		return nil, err
	}
	if err := l.oom.lend(p.pid); err != nil { // a dead launcher fails the request below
		l.cfg.Log.Warn("raise oom_score_adj of the launcher of a dump", "container", req.ID, "error", err)
	}
	d := &Dump{l: l, p: p, req: req, dir: children.Dir(proto.CRIUGroup(req.ID))}
	watch := p.watchRequest(requestTimeout)
	err = watch.sent(p.conn.Send(proto.Request{Dump: req}, req.PassFiles()...))
	if err == nil {
		err = d.receive(ctx)
	}
	if err = watch.result(err); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

// Run dumps the container, which must be frozen. If ctx ends first, the launcher aborts the dump,
// and Close waits for CRIU's end. The error has the codes of PrepareDump, or Canceled or
// DeadlineExceeded if ctx ends.
func (d *Dump) Run(ctx context.Context) error {
	failpoint.Reach("dump.run")
	err := d.p.conn.Send(proto.Request{DumpNow: true})
	if err == nil {
		err = d.receive(ctx)
	} else {
		err = errdefs.Internal("the launcher is lost: %w", err)
	}
	failpoint.Reach("dump.ran")
	return err
}

// receive receives the launcher's answer.
func (d *Dump) receive(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { _ = d.p.conn.Interrupt() })
	defer stop()
	var reply proto.Reply
	files, err := d.p.conn.Receive(&reply)
	err = errors.Join(err, closeFiles(files))
	d.l.logWarnings(d.req.ID, reply.Warnings)
	switch {
	case ctx.Err() != nil && err != nil:
		return context.Cause(ctx)
	case errors.Is(err, errUnresponsive):
		return err
	case err != nil:
		return errdefs.Internal("the launcher is lost: %w", err)
	case reply.Error != nil:
		return failure(ctx, reply.Error)
	case reply.Dump == nil:
		return errdefs.Internal("unexpected reply from the launcher")
	}
	d.dumped = *reply.Dump
	return nil
}

const (
	// dumpEndTimeout bounds the wait for a launcher that ends its CRIU.
	dumpEndTimeout = 15 * time.Second
	// criuGrace is how long a CRIU may take to end after an abort if its launcher has ended. In
	// this time it is not killed, because it may be changing a process of the container.
	criuGrace = 5 * time.Second
)

// Close ends CRIU, if it still runs, and waits for its end. After Close, CRIU no longer writes. An
// error means that CRIU hangs in the kernel and does not end.
func (d *Dump) Close() error {
	failpoint.Reach("dump.close")
	err := d.p.conn.Close()
	ctx, cancel := context.WithTimeout(context.Background(), dumpEndTimeout)
	defer cancel()
	if pidfd.Wait(ctx, d.p.proc) != nil {
		err = errors.Join(err, kill(d.p.proc))
	}
	err = errors.Join(err, d.p.proc.Close(), endCRIU(d.dir))
	d.l.wantMore()
	failpoint.Reach("dump.closed")
	if err != nil {
		return fmt.Errorf("end the dump of container %s: %w", d.req.ID, err)
	}
	return nil
}

// criuKillTimeout bounds the death of a killed CRIU.
const criuKillTimeout = 10 * time.Second

// endCRIU aborts the dump in a cgroup of CRIU, kills the remaining processes after criuGrace, and
// removes the cgroup. A cgroup that does not exist is no error.
func endCRIU(dir string) error {
	failpoint.Reach("dump.abort-criu")
	err := criu.Abort(dir) // if that fails, CRIU is killed
	failpoint.Reach("dump.criu-aborted")
	for deadline := time.Now().Add(criuGrace); err == nil && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		if busy, err := cgroup.HasProcesses(dir); err == nil && !busy {
			break
		}
	}
	failpoint.Reach("dump.kill-criu")
	err = cgroup.KillChild(dir, criuKillTimeout)
	failpoint.Reach("dump.criu-killed")
	if err != nil {
		return err
	}
	return cgroup.RemoveChild(dir)
}

// LeftDumps returns the containers for which an earlier daemon's CRIU may still run. EndLeftDump
// ends it.
func LeftDumps() (containers []string, err error) {
	children, err := cgroup.FindChildren()
	if err != nil {
		return nil, err
	}
	prefix := children.Dir(proto.CRIUGroupPrefix)
	dirs, err := filepath.Glob(prefix + "*")
	for _, dir := range dirs {
		containers = append(containers, strings.TrimPrefix(dir, prefix))
	}
	return containers, err
}

// EndLeftDump ends the CRIU that an earlier daemon has left for a container. The caller then thaws
// the container, because CRIU may have frozen it again.
func EndLeftDump(container string) error {
	children, err := cgroup.FindChildren()
	if err != nil {
		return err
	}
	return endCRIU(children.Dir(proto.CRIUGroup(container)))
}
