package launcher

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
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
	"berth/internal/rootfs"
	"berth/internal/trace"
	"berth/shim/launcher/complaint"
	"berth/shim/proto"
)

// destroyPatience is how long a failed launch tries to get rid of processes.
const destroyPatience = 10 * time.Second

// launch is one container on its way.
type launch struct {
	*proto.Launch
	l      *launcher
	mounts []*os.File // that came with it
	undo   *cleanup.List

	group   *cgroup.Group
	maker   maker
	io      *stdio
	init    *os.File // pidfd
	verdict *os.File // how the container ends, where init's end does not tell
	started proto.Started
	timedTo int64 // by trace.Now
	monitor proto.MonitorParams

	ctx     context.Context // ends when the daemon does not want the container any more
	abort   context.CancelFunc
	unwatch func() // ends the watch over the daemon

	mu        sync.Mutex // guards the two below
	committed bool       // the daemon is told: too late to cancel
	cancelled bool       // the daemon does not want it any more
}

// serveLaunch carries out a launch order. For a container it does not return if it
// succeeds; otherwise this process has no further use, unless it was told that it has.
func (l *launcher) serveLaunch(order *proto.Launch, mounts []*os.File) (again bool, err error) {
	c := &launch{Launch: order, l: l, mounts: mounts, undo: cleanup.New(), timedTo: trace.Now()}
	c.maker = c.newMaker()
	c.ctx, c.abort = context.WithCancel(context.Background())
	failpoint.Reach("launcher.launch-ordered")
	if err := c.run(); err != nil {
		failpoint.Reach("launcher.launch-undone")
		return false, l.reply(proto.Reply{Error: complaint.Describe(err)})
	}
	failpoint.Reach("launcher.launch-answered")
	if c.Pause { // it goes to init or the next subreaper
		return c.started.Again, c.init.Close()
	}
	err = l.becomeMonitor(l.settings.MonitorPath, &c.monitor, c)
	// The daemon believes that the container runs. It will see this process end
	// without an exit record.
	return false, errors.Join(fmt.Errorf("execute the monitor: %w", err), c.maker.destroy())
}

// run brings the container up and tells the daemon. If it returns an error,
// nothing is left of the container.
func (c *launch) run() (err error) {
	defer c.undo.Run(&err)
	// The daemon has written it: that there is no record says that nothing is made here any more.
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
	c.unwatch = c.watchDaemon()
	defer c.unwatch()
	for _, step := range []struct {
		name string // of a step worth telling how long it took
		do   func() error
	}{
		{"mount root filesystem", c.mountRootfs},
		{"mount volumes", c.mountVolumes},
		{"", c.closeMounts},
		{"", c.prepare},
		{"", c.openIO},
		{"", c.noteLauncher},
		{"prepare", c.reserveExit},
		{"create", c.create}, // of libcontainer's it is the rest
		{"prepare monitor", c.prepareMonitor},
		{"record init", c.recordInit},
		{"execute", c.execute},
		{"", c.commit},
	} {
		if err := step.do(); err != nil {
			return err
		}
		if step.name != "" {
			c.timed(step.name)
		}
	}
	c.undo.Release()
	return nil
}

// timed says what was done since the last call, or since the order was there.
func (c *launch) timed(name string) {
	now := trace.Now()
	c.started.Steps = append(c.started.Steps, trace.Step{Name: name, Began: c.timedTo, Ended: now})
	c.timedTo = now
}

// check refuses orders that lead nowhere, and finds the container's cgroup.
func (c *launch) check() (err error) {
	switch {
	case c.Spec == nil || c.Spec.Linux == nil || c.Spec.Process == nil:
		return proto.Errorf(proto.Internal, "the spec is incomplete")
	case !c.Pause && unix.Access(c.l.settings.MonitorPath, unix.X_OK) != nil:
		return proto.Errorf(proto.Internal, "monitor %s is not executable", c.l.settings.MonitorPath)
	}
	c.group, err = cgroup.Open(c.Spec.Linux.CgroupsPath, c.SystemdCgroup)
	return err
}

// watchDaemon cancels the launch when the daemon closes its end: what the
// container has of processes is killed until the steps notice. The returned
// function ends that, and leaves the connection to who reads it next; more than
// once is harmless.
func (c *launch) watchDaemon() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var watching sync.WaitGroup
	watching.Go(func() {
		err := c.awaitWord()
		if errors.Is(err, os.ErrDeadlineExceeded) || !c.cancel() {
			return
		}
		c.abort()
		for ctx.Err() == nil {
			_ = c.group.Kill(ctx)
			select {
			case <-ctx.Done():
			case <-time.After(10 * time.Millisecond):
			}
		}
	})
	return sync.OnceFunc(func() {
		cancel()
		_ = c.l.conn.SetDeadline(time.Unix(1, 0)) // it fails on a closed connection only, of which nobody reads
		watching.Wait()
		_ = c.l.conn.SetDeadline(time.Time{})
	})
}

// awaitWord returns when the daemon says something, which can only be the end: an error. A Kill is for an exec that this
// process served before, and ended while it was sent.
func (c *launch) awaitWord() error {
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

func (c *launch) mountRootfs() error {
	if _, ok := c.maker.(*pauseMaker); ok {
		return nil // pause does that, in its own mount namespace
	}
	dir, err := c.rootPlace()
	if err != nil {
		return err
	}
	if err := c.mountOn(c.Rootfs, dir); err != nil {
		return err
	}
	c.Spec.Root = &specs.Root{Path: dir, Readonly: c.Rootfs.Upper == "" || c.Spec.Root != nil && c.Spec.Root.Readonly}
	return nil
}

// closeMounts closes the mounts that came with the order: the container's mounts have what they need of them.
func (c *launch) closeMounts() (failed error) {
	for _, f := range c.mounts {
		failed = errors.Join(failed, f.Close())
	}
	return failed
}

// mountAt mounts layers on dir, which it makes, here and nowhere else.
func (c *launch) mountAt(layers rootfs.Spec, dir string) error {
	if err := c.makeDir(dir); err != nil {
		return err
	}
	return c.mountOn(layers, dir)
}

func (c *launch) makeDir(dir string) error {
	failpoint.Reach("launcher.make-mount-point")
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("mount point: %w", err)
	}
	failpoint.Reach("launcher.mount-point-made")
	c.undo.Add("remove "+dir, func() error {
		failpoint.Reach("launcher.remove-mount-point")
		return ignore(unix.Rmdir(dir), unix.ENOENT)
	})
	return nil
}

func (c *launch) mountOn(layers rootfs.Spec, dir string) error {
	failpoint.Reach("launcher.mount")
	if err := layers.MountAt(dir); err != nil {
		return err
	}
	failpoint.Reach("launcher.mounted")
	c.undo.Add("unmount "+dir, func() error {
		failpoint.Reach("launcher.unmount")
		return ignore(unix.Unmount(dir, unix.MNT_DETACH), unix.EINVAL)
	})
	return nil
}

// rootPlace is the directory that the root filesystem is mounted on: one of its own,
// unless the order names one that any user can reach. All containers may have the same
// there, each launcher in its own mount namespace.
func (c *launch) rootPlace() (string, error) {
	if c.RootPlace != "" {
		return c.RootPlace, nil
	}
	dir := filepath.Join(c.Dir, "rootfs")
	return dir, c.makeDir(dir)
}

func (c *launch) prepare() error {
	clampOOMScore(c.Spec.Process)
	return c.maker.prepare()
}

// noteLauncher notes the identity of this process, the container's monitor to be. A pause has none.
func (c *launch) noteLauncher() (err error) {
	if c.Pause {
		return nil
	}
	c.started.ShimPID = os.Getpid()
	c.started.ShimStartTime, err = pidfd.StartTime(c.started.ShimPID)
	return err
}

// reserveExit takes the room that the exit record will need: by then the filesystem may be full, and
// without the record the container would count as lost.
func (c *launch) reserveExit() error {
	if c.Pause {
		return nil
	}
	c.undo.Add("give up the exit record's room", func() error {
		failpoint.Reach("launcher.unreserve-exit")
		return proto.UnreserveFile(c.Dir, proto.ExitFile)
	})
	failpoint.Reach("launcher.reserve-exit")
	if err := proto.ReserveFile(c.Dir, proto.ExitFile); err != nil {
		return err
	}
	failpoint.Reach("launcher.exit-reserved")
	return nil
}

// create makes the container. Its init waits for the word to execute the command.
func (c *launch) create() error {
	if c.inheritsOrphans() {
		if err := becomeSubreaper(true); err != nil {
			return err
		}
	}
	pid, err := c.maker.create()
	if err != nil {
		return err
	}
	if pid == 0 {
		return nil // it gets its streams when it is executed
	}
	if c.io.socket != nil {
		if err := c.io.receiveConsole(); err != nil {
			return err
		}
	}
	if err := c.io.started(); err != nil {
		return err
	}
	return c.noteInit(pid)
}

// inheritsOrphans tells whether orphans of the container's processes shall come to
// us: in a PID namespace other than the host's there is a process 1 that they go to.
func (c *launch) inheritsOrphans() bool {
	return !c.Pause && !slices.ContainsFunc(c.Spec.Linux.Namespaces, func(ns specs.LinuxNamespace) bool { return ns.Type == specs.PIDNamespace })
}

// noteInit takes a child of ours for the container's init.
func (c *launch) noteInit(pid int) (err error) {
	c.started.InitPID = pid
	if c.started.InitStartTime, err = pidfd.StartTime(pid); err != nil {
		return err
	}
	c.init, err = pidfd.Open(pid) // our child, not reaped: it is this one
	return err
}

// recordInit says in Dir/shim who the container is, before it runs.
func (c *launch) recordInit() error {
	c.started.StartedAt = time.Now()
	if c.init == nil {
		return nil // there is nobody yet
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
	if err := c.maker.execute(); err != nil {
		return err
	}
	failpoint.Reach("launcher.executed")
	if c.init != nil {
		return nil
	}
	return c.follow()
}

// follow finds, for a container that now runs and is no process of the host, one that
// ends with it.
func (c *launch) follow() error {
	pid, verdict, err := c.maker.follow()
	if err != nil {
		return fmt.Errorf("follow it: %w", err)
	}
	c.verdict = verdict
	if err := errors.Join(c.noteInit(pid), c.io.started()); err != nil {
		return err
	}
	c.monitor.InitPID, c.monitor.Init, c.monitor.Verdict = pid, fd(c.init), fd(c.verdict)
	c.monitor.Console = fd(c.io.console)
	if c.Stdin && c.Terminal {
		c.monitor.Stdin = c.monitor.Console
	}
	return c.recordInit()
}

// commit tells the daemon. If the daemon has given up, or is not there to hear it,
// the container shall not be.
func (c *launch) commit() error {
	c.mu.Lock()
	cancelled := c.cancelled
	c.committed = !cancelled
	c.mu.Unlock()
	if cancelled {
		return proto.Errorf(proto.Canceled, "the launch was cancelled")
	}
	if _, ok := c.maker.(*pauseMaker); ok {
		c.started.Again = true
		c.unwatch() // what comes after the reply is the next order
	}
	return c.l.reply(proto.Reply{Started: &c.started}, c.init)
}

// ignore returns err unless it is the given one.
func ignore(err, except error) error {
	if errors.Is(err, except) {
		return nil
	}
	return err
}
