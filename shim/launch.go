package shim

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"berth/internal/cgroup"
	"berth/internal/failpoint"
	"berth/internal/pidfd"
	"berth/shim/ociruntime"
	"berth/shim/proto"
)

const (
	// launchUndoTimeout bounds the undo of a cancelled launch.
	launchUndoTimeout = 20 * time.Second
	// cleanupTimeout bounds the removal of a lost launcher's remains.
	cleanupTimeout = 10 * time.Second
)

// Launch creates and starts a container or a pause. On an error it leaves no process, cgroup,
// libcontainer state or socket. The end of ctx cancels the launch. If the container is already
// running, Launch succeeds.
//
// Errors do not name the container. The error is InvalidArgument if the spec cannot be carried out,
// for example if the command does not exist. It is Canceled or DeadlineExceeded if ctx ends, and
// otherwise Internal.
func (l *Launchers) Launch(ctx context.Context, req *proto.Launch) (*proto.Started, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	plainPause := req.Pause == proto.PlainPause
	req.Lasts = l.lasts(req)
	switch {
	case plainPause && cgroup.StartsInside(l.cfg.SystemdCgroup):
		defer l.Expect() // the pod's containers will follow
	case req.Pause != "":
		l.Expect() // for this launch and the containers that follow
	default:
		defer l.expect()()
	}
	if plainPause || req.Lasts { // the launcher will serve again
		l.lend(1)
		defer l.wantMore() // starts another launcher if this one is lost
		defer l.lend(-1)
	}
	p, err := l.takeFor(ctx, req)
	if err != nil {
		return nil, err
	}
	started, again, err := l.launchWith(ctx, p, req)
	if errors.Is(err, errUnresponsive) {
		l.retire(p)
		l.retireStopped()
		if ctx.Err() != nil { // the pod of a cancelled request may not exist any more, so no other launcher gets the request
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
		p.parent = p.parent || req.Lasts
		l.put(p)
	case req.Pause != "" || req.Lasts || err != nil:
		l.retire(p)
	}
	return started, err
}

// lasts returns whether the launcher can serve again after the launch (proto.Launch.Lasts). In the
// host's PID namespace the monitor must be an ancestor of the container. CRIU and OCI runtimes
// expect to be children of the monitor.
func (l *Launchers) lasts(req *proto.Launch) bool {
	isPID := func(ns specs.LinuxNamespace) bool { return ns.Type == specs.PIDNamespace }
	return l.keepsStatus && req.Pause == "" && req.Runtime == nil && req.Restore == nil &&
		req.Spec != nil && req.Spec.Linux != nil && slices.ContainsFunc(req.Spec.Linux.Namespaces, isPID)
}

// cleanUp kills a launcher that failed to finish, and removes the remains of its launch.
func (l *Launchers) cleanUp(p *launcher, req *proto.Launch) error {
	if err := kill(p.proc); err != nil {
		return fmt.Errorf("kill the launcher: %w", err)
	}
	if err := p.killMonitor(req.Dir); err != nil {
		return err
	}
	return l.removeLaunch(req)
}

// killMonitor kills the monitor that a lost launcher has started, and waits for its end. The
// monitor would write an exit record.
func (p *launcher) killMonitor(dir string) error {
	ids, err := ReadShim(dir)
	if unread := (*fs.PathError)(nil); errors.As(err, &unread) && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err != nil || ids.MonitorPID == p.pid {
		return nil // the launch was undone, or no monitor has begun
	}
	proc, err := pidfd.OpenVerified(ids.MonitorPID, ids.MonitorStartTime)
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("find the monitor: %w", err)
	}
	defer proc.Close()
	return kill(proc)
}

// cleanUpUnresponsive is cleanUp for a launcher that has not read its request.
func (l *Launchers) cleanUpUnresponsive(p *launcher, req *proto.Launch) error {
	if err := p.killUnresponsive(); err != nil {
		return fmt.Errorf("kill the launcher: %w", err)
	}
	// The launcher may have read the request at the end.
	if err := p.killMonitor(req.Dir); err != nil {
		return err
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
	ctx, cancel := context.WithTimeout(context.Background(), cleanupTimeout)
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
