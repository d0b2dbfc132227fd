package launcher

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/internal/cgroup"
	"berth/internal/cleanup"
	"berth/internal/failpoint"
	"berth/internal/pidfd"
	"berth/internal/trace"
	"berth/shim/proto"
)

// destroyTimeout bounds the destruction of a failed launch's container.
const destroyTimeout = 10 * time.Second

// launch is the state of one launch request.
type launch struct {
	*proto.Launch
	l      *launcher
	mounts []*os.File // that came with the request
	kept   []*os.File // at proto.FirstKeptFD and after it; see proto.Launch.Keep
	undo   *cleanup.List

	group   *cgroup.Group
	backend backend
	io      *stdio
	init    *os.File // pidfd
	verdict *os.File // pipe with the container's exit status, if it differs from init's; see backend.follow
	started proto.Started
	timedTo int64 // end of the last traced step, by trace.Now
	monitor proto.MonitorParams

	ctx     context.Context // ends when the daemon cancels the launch
	abort   context.CancelFunc
	unwatch func() // ends the watch over the daemon's connection

	// unrepeatable says that the daemon's end does not undo the launch, because a repetition would
	// fail.
	unrepeatable bool

	// Only for a launcher that lasts.
	ownMounts *os.File // the mount namespace with the container's mounts
	gate      *os.File // lets the monitor begin; see startMonitor
	monitored proto.PIDs
	monitorFD *os.File // the monitor's pidfd

	mu sync.Mutex
	// +checklocks:mu
	committed bool // the reply is being sent, so it is too late to cancel
	// +checklocks:mu
	cancelled bool
}

// serveLaunch carries out a launch request. It returns whether the launcher can take another
// request. If the launch does not last it does not return, but becomes the monitor.
func (l *launcher) serveLaunch(request *proto.Launch, mounts []*os.File) (again bool, err error) {
	c := &launch{Launch: request, l: l, mounts: mounts, undo: cleanup.New(), timedTo: trace.Now()}
	c.backend = c.newBackend()
	c.ctx, c.abort = context.WithCancel(context.Background())
	failpoint.Reach("launcher.launch-ordered")
	run := c.run
	if c.Lasts {
		run = c.runApart
	}
	if err := run(); err != nil {
		failpoint.Reach("launcher.launch-undone")
		return false, l.reply(proto.Reply{Error: toReply(err)})
	}
	failpoint.Reach("launcher.launch-answered")
	if c.Pause != "" { // the kernel makes it a child of the next subreaper or of process 1
		return c.started.Again, c.init.Close()
	}
	if c.Lasts {
		return true, c.leave()
	}
	err = l.becomeMonitor(l.settings.MonitorPath, &c.monitor, c)
	// The daemon already has the reply that the container runs. It finds that this process ended
	// without an exit record.
	return false, errors.Join(fmt.Errorf("execute the monitor: %w", err), c.backend.destroy())
}

// run starts the container and replies to the daemon. On an error it undoes all steps.
func (c *launch) run() (err error) {
	defer c.undo.Run(&err)
	// The daemon wrote the record before it sent the request. The launcher removes it last, because
	// a launch that has no record counts as ended.
	c.undo.Add("remove the shim record", func() error {
		failpoint.Reach("launcher.remove-shim-record")
		return ignore(unix.Unlink(filepath.Join(c.Dir, proto.ShimFile)), unix.ENOENT)
	})
	if err := c.check(); err != nil {
		return err
	}
	if err := c.TakeFiles(c.mounts); err != nil {
		return proto.Errorf(proto.Internal, "%v", err)
	}
	if err := c.keepFiles(); err != nil {
		return err
	}
	c.unwatch = c.watchDaemon()
	defer c.unwatch()
	if err := c.mountAll(); err != nil {
		return err
	}
	if err := c.prepare(); err != nil {
		return err
	}
	if err := c.create(); err != nil {
		return err
	}
	c.endStep("create") // not including libcontainer's parts, which have separate steps
	if err := c.prepareMonitor(); err != nil {
		return err
	}
	if c.Lasts {
		if err := c.startMonitor(); err != nil {
			return err
		}
	}
	c.endStep("prepare monitor")
	if err := c.recordInit(); err != nil {
		return err
	}
	c.endStep("record init")
	if err := c.execute(); err != nil {
		return err
	}
	c.endStep("execute")
	if err := c.commit(); err != nil {
		return err
	}
	c.undo.Release()
	return nil
}

// keepFiles holds the files open at the numbers where a later daemon looks for them, before
// anything is mounted. They stay close-on-exec until the monitor is executed.
func (c *launch) keepFiles() error {
	if len(c.Keep) > 0 && c.Pause != "" {
		return proto.Errorf(proto.Internal, "a pause has no monitor that could keep files open")
	}
	for i, f := range c.Keep {
		want := proto.FirstKeptFD + i
		got, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, want)
		if err != nil {
			return proto.Errorf(proto.Internal, "keep a file open: %v", err)
		}
		c.kept = append(c.kept, os.NewFile(uintptr(got), "kept"))
		if got != want {
			return proto.Errorf(proto.Internal, "keep a file open: descriptor %d is in use", want)
		}
	}
	return nil
}

// endStep adds a step to the trace. The step took the time since the previous step, or since the
// request arrived.
func (c *launch) endStep(name string) {
	now := trace.Now()
	c.started.Steps = append(c.started.Steps, trace.Step{Name: name, Began: c.timedTo, Ended: now})
	c.timedTo = now
}

// check refuses incomplete requests and opens the container's cgroup.
func (c *launch) check() (err error) {
	switch {
	case c.Spec == nil || c.Spec.Linux == nil || c.Spec.Process == nil:
		return proto.Errorf(proto.Internal, "the spec is incomplete")
	case c.Pause == "" && unix.Access(c.l.settings.MonitorPath, unix.X_OK) != nil:
		return proto.Errorf(proto.Internal, "monitor %s is not executable", c.l.settings.MonitorPath)
	}
	c.group, err = cgroup.Open(c.Spec.Linux.CgroupsPath, c.SystemdCgroup)
	return err
}

// killInterval is the time between two kills of a launch or exec that is still being started.
const killInterval = 10 * time.Millisecond

// watchDaemon cancels the launch when the daemon closes the connection. It then kills the
// container's processes until the launch fails. stop ends the watch, so that another reader can use
// the connection. It may be called more than once.
func (c *launch) watchDaemon() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var watching sync.WaitGroup
	watching.Go(func() {
		err := c.awaitClose()
		if errors.Is(err, os.ErrDeadlineExceeded) || !c.cancel() {
			return
		}
		c.abort()
		for ctx.Err() == nil {
			_ = c.group.Kill(ctx)
			select {
			case <-ctx.Done():
			case <-time.After(killInterval):
			}
		}
	})
	return sync.OnceFunc(func() {
		cancel()
		_ = c.l.conn.SetDeadline(time.Unix(1, 0)) // it fails only on a closed connection, which has no readers
		watching.Wait()
		_ = c.l.conn.SetDeadline(time.Time{})
	})
}

// awaitClose waits for the end of the connection, which cancels the launch, and returns its error.
// It skips a Kill of an exec that this launcher served before.
func (c *launch) awaitClose() error {
	for {
		var r proto.Request
		if _, err := c.l.conn.Receive(&r); err != nil || r.Kill == "" {
			return err
		}
	}
}

// cancel returns false if it is too late.
func (c *launch) cancel() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cancelled = !c.committed
	return c.cancelled
}

// create makes the container. Its init waits until execute.
func (c *launch) create() error {
	if c.inheritsOrphans() {
		if err := setSubreaper(true); err != nil {
			return err
		}
	}
	pid, err := c.backend.create()
	if err != nil {
		return err
	}
	if pid == 0 {
		return nil // it gets its streams in execute
	}
	if c.io.socket != nil {
		if err := c.io.receiveConsole(); err != nil {
			return err
		}
	}
	if err := c.io.started(); err != nil {
		return err
	}
	return c.identifyInit(pid)
}

// inheritsOrphans returns whether the container's orphans become this process's children. They do
// in the host's PID namespace. In any other PID namespace, process 1 of the namespace adopts them.
func (c *launch) inheritsOrphans() bool {
	return c.Pause == "" && !slices.ContainsFunc(c.Spec.Linux.Namespaces,
		func(ns specs.LinuxNamespace) bool { return ns.Type == specs.PIDNamespace })
}

// identifyInit stores the identity of the container's init, a child of this process.
func (c *launch) identifyInit(pid int) (err error) {
	c.started.InitPID = pid
	if c.started.InitStartTime, err = pidfd.StartTime(pid); err != nil {
		return err
	}
	c.init, err = pidfd.Open(pid) // only this process could reap the child, so the pid is still valid
	return err
}

// recordInit adds init to Dir/shim before init executes its command.
func (c *launch) recordInit() error {
	c.started.StartedAt = time.Now()
	if c.init == nil {
		return nil // follow or the restore records it
	}
	failpoint.Reach("launcher.record-init")
	if err := proto.WriteFile(c.Dir, proto.ShimFile, c.started.Encode()); err != nil {
		return err
	}
	failpoint.Reach("launcher.init-recorded")
	return nil
}

func (c *launch) execute() error {
	failpoint.Reach("launcher.execute")
	if err := c.backend.execute(); err != nil {
		return err
	}
	failpoint.Reach("launcher.executed")
	if c.monitor.InitPID == 0 && c.Pause == "" {
		return c.follow()
	}
	return nil
}

// follow gives the monitor a process that ends together with the container. It is for launches for
// which create has returned no process. Then the container was restored, or its processes run in a
// sandbox that the host does not see.
func (c *launch) follow() error {
	pid, verdict, err := c.backend.follow()
	if err != nil {
		return fmt.Errorf("follow the container: %w", err)
	}
	c.verdict = verdict
	recorded := c.init != nil
	if !recorded {
		err = c.identifyInit(pid)
	}
	if err := errors.Join(err, c.io.started()); err != nil {
		return err
	}
	if c.Runtime == nil {
		c.openOOM()
	}
	c.monitor.InitPID, c.monitor.Init, c.monitor.Verdict = pid, fd(c.init), fd(c.verdict)
	c.monitor.Console = fd(c.io.console)
	if c.Stdin && c.Terminal {
		c.monitor.Stdin = c.monitor.Console
	}
	if recorded {
		return nil
	}
	return c.recordInit()
}

// decide marks the launch, so that it can no longer be cancelled. It fails if the daemon has
// cancelled it.
func (c *launch) decide() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cancelled {
		return errCancelled
	}
	c.committed = true
	return nil
}

// commit sends the reply. It fails if the daemon has cancelled the launch or is gone. After an
// unrepeatable launch, or if the monitor has begun, the next daemon finds the container.
func (c *launch) commit() error {
	if err := c.decide(); err != nil {
		return err
	}
	files := []*os.File{c.init}
	if c.Lasts {
		if err := c.handOver(); err != nil {
			return err
		}
		files = append(files, c.monitorFD)
	}
	if _, ok := c.backend.(*pauseBackend); ok || c.Lasts {
		c.started.Again = true
		c.unwatch() // the next message is another request
	}
	err := c.l.reply(proto.Reply{Started: &c.started}, files...)
	if (c.unrepeatable || c.Lasts) && errors.Is(err, unix.EPIPE) {
		return nil
	}
	return err
}

var errCancelled = proto.Errorf(proto.Canceled, "the launch was cancelled")

// ignore returns err, or nil if err is except.
func ignore(err, except error) error {
	if errors.Is(err, except) {
		return nil
	}
	return err
}
