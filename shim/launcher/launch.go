package launcher

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runc/libcontainer/specconv"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/internal/cgroup"
	"berth/internal/cleanup"
	"berth/internal/pidfd"
	"berth/internal/rootfs"
	"berth/shim/control"
	"berth/shim/handoff"
	"berth/shim/record"
)

// destroyPatience is how long a failed launch tries to get rid of processes.
const destroyPatience = 10 * time.Second

// launch is one container on its way.
type launch struct {
	*control.Launch
	l    *launcher
	undo *cleanup.List

	group     *cgroup.Group
	config    *configs.Config
	io        *stdio
	container *libcontainer.Container
	process   *libcontainer.Process
	init      *os.File // pidfd
	started   control.Started
	monitor   handoff.Params

	mu        sync.Mutex // guards the two below
	committed bool       // the daemon has been told: too late to cancel
	cancelled bool       // the daemon does not want it any more
}

// serveLaunch carries out a launch order. For a container it does not return if it
// succeeds; otherwise this process has no further use.
func (l *launcher) serveLaunch(order *control.Launch) error {
	c := &launch{Launch: order, l: l, undo: cleanup.New()}
	err := c.run()
	if err != nil {
		return l.reply(control.Reply{Error: describe(err)})
	}
	if c.Pause {
		return nil // pause goes to init or the next subreaper
	}
	err = l.becomeMonitor(c.MonitorPath, &c.monitor, c)
	// The daemon believes that the container runs. It will see this process end
	// without an exit record.
	return errors.Join(fmt.Errorf("execute monitor of %s: %w", c.ID, err), c.destroy())
}

// run brings the container up and tells the daemon. If it returns an error,
// nothing is left of the container.
func (c *launch) run() (err error) {
	defer c.undo.Run(&err)
	if err := c.check(); err != nil {
		return err
	}
	stop := c.watchDaemon()
	defer stop()
	for _, step := range []func() error{
		c.mountRootfs,
		c.mountVolumes,
		c.makeConfig,
		c.openIO,
		c.recordLauncher,
		c.create,
		c.startInit,
		c.prepareMonitor,
		c.recordInit,
		c.execute,
		c.commit,
	} {
		if err := step(); err != nil {
			return err
		}
	}
	c.undo.Release()
	return nil
}

// check refuses orders that lead nowhere, and finds the container's cgroup.
func (c *launch) check() (err error) {
	switch {
	case c.Spec == nil || c.Spec.Linux == nil || c.Spec.Process == nil:
		return control.Errorf(control.Internal, "launch %s: the spec is incomplete", c.ID)
	case !c.Pause && unix.Access(c.MonitorPath, unix.X_OK) != nil:
		return control.Errorf(control.Internal, "launch %s: monitor %s is not executable", c.ID, c.MonitorPath)
	}
	c.group, err = cgroup.Open(c.Spec.Linux.CgroupsPath, c.SystemdCgroup)
	return err
}

// watchDaemon cancels the launch when the daemon closes its end: what the
// container has of processes is killed until the steps notice. The returned
// function ends that.
func (c *launch) watchDaemon() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var killing sync.WaitGroup
	killing.Add(1)
	go func() { // ends with the process at the latest: it waits for the daemon
		var r control.Request
		_, _ = c.l.conn.Receive(&r) // there is nothing to say during a launch but the end
		defer killing.Done()
		if !c.cancel() {
			return
		}
		for ctx.Err() == nil {
			_ = c.group.Kill(ctx)
			select {
			case <-ctx.Done():
			case <-time.After(10 * time.Millisecond):
			}
		}
	}()
	return func() {
		cancel()
		c.mu.Lock()
		cancelled := c.cancelled
		c.mu.Unlock()
		if cancelled {
			killing.Wait()
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

// mountAt mounts layers on dir, which it makes, here and nowhere else.
func (c *launch) mountAt(layers rootfs.Spec, dir string) error {
	if err := c.makeDir(dir); err != nil {
		return err
	}
	return c.mountOn(layers, dir)
}

func (c *launch) makeDir(dir string) error {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("mount point of %s: %w", c.ID, err)
	}
	c.undo.Add("remove "+dir, func() error { return ignore(unix.Rmdir(dir), unix.ENOENT) })
	return nil
}

func (c *launch) mountOn(layers rootfs.Spec, dir string) error {
	if err := layers.MountAt(dir); err != nil {
		return err
	}
	c.undo.Add("unmount "+dir, func() error { return ignore(unix.Unmount(dir, unix.MNT_DETACH), unix.EINVAL) })
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

func (c *launch) makeConfig() (err error) {
	clampOOMScore(c.Spec.Process)
	c.config, err = specconv.CreateLibcontainerConfig(&specconv.CreateOpts{
		CgroupName:       c.ID,
		UseSystemdCgroup: c.SystemdCgroup,
		Spec:             c.Spec,
	})
	if err != nil {
		return control.Errorf(control.InvalidArgument, "runtime spec of %s: %v", c.ID, err)
	}
	if c.Spec.Hooks != nil {
		if err := c.writeBundle(); err != nil {
			return err
		}
	}
	c.process, err = newProcess(c.Spec.Process)
	if err != nil {
		return err
	}
	c.process.Init = true
	return nil
}

// recordLauncher says in Dir/shim that a container is being made here.
func (c *launch) recordLauncher() (err error) {
	c.started.ShimPID = os.Getpid()
	if c.started.ShimStart, err = pidfd.StartTime(c.started.ShimPID); err != nil {
		return err
	}
	c.undo.Add("remove the shim record", func() error { return ignore(unix.Unlink(filepath.Join(c.Dir, record.ShimFile)), unix.ENOENT) })
	return record.Write(c.Dir, record.ShimFile, record.Shim{PID: c.started.ShimPID, Start: c.started.ShimStart}.Encode())
}

func (c *launch) create() (err error) {
	if c.inheritsOrphans() {
		if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
			return fmt.Errorf("become subreaper: %w", err)
		}
	}
	c.container, err = libcontainer.Create(c.StateRoot, c.ID, c.config)
	if err != nil {
		return fmt.Errorf("create container %s: %w", c.ID, err)
	}
	c.undo.Add("destroy container "+c.ID, c.destroy)
	return nil
}

// inheritsOrphans tells whether orphans of the container's processes shall come to
// us: in a PID namespace other than the host's there is a process 1 that they go to.
func (c *launch) inheritsOrphans() bool {
	return !c.Pause && !c.config.Namespaces.Contains(configs.NEWPID)
}

// startInit runs libcontainer's part: when it returns, the container's init waits
// in its namespaces for the word to execute the command.
func (c *launch) startInit() error {
	if err := c.container.Start(c.process); err != nil {
		return fmt.Errorf("start container %s: %w", c.ID, err)
	}
	if err := c.io.started(); err != nil {
		return err
	}
	pid, err := c.process.Pid()
	if err != nil {
		return fmt.Errorf("start container %s: %w", c.ID, err)
	}
	c.started.InitPID = pid
	if c.started.InitStart, err = pidfd.StartTime(pid); err != nil {
		return err
	}
	c.init, err = pidfd.Open(pid) // our child, not reaped: it is this one
	return err
}

// recordInit says in Dir/shim who the container is, before it runs.
func (c *launch) recordInit() error {
	c.started.StartedAt = time.Now().UnixNano()
	s := record.Shim{
		PID:       c.started.ShimPID,
		Start:     c.started.ShimStart,
		InitPID:   c.started.InitPID,
		InitStart: c.started.InitStart,
		StartedAt: c.started.StartedAt,
	}
	if c.Pause {
		s.PID, s.Start = 0, 0
	}
	return record.Write(c.Dir, record.ShimFile, s.Encode())
}

func (c *launch) execute() error {
	if err := c.container.Exec(); err != nil {
		return fmt.Errorf("start container %s: %w", c.ID, err)
	}
	return nil
}

// commit tells the daemon. If the daemon has given up, or is not there to hear it,
// the container shall not be.
func (c *launch) commit() error {
	c.mu.Lock()
	cancelled := c.cancelled
	c.committed = !cancelled
	c.mu.Unlock()
	if cancelled {
		return control.Errorf(control.Canceled, "launch of %s was cancelled", c.ID)
	}
	return c.l.reply(control.Reply{Started: &c.started}, c.init)
}

// destroy removes everything that create and startInit have made.
func (c *launch) destroy() error {
	if c.process.Signal(unix.SIGKILL) == nil {
		_, _ = c.process.Wait() // it was killed: how it ended is of no interest
	}
	ctx, cancel := context.WithTimeout(context.Background(), destroyPatience)
	defer cancel()
	return errors.Join(
		c.group.Kill(ctx),
		c.container.Destroy(),
		c.group.Destroy(ctx),
		os.RemoveAll(filepath.Join(c.StateRoot, c.ID)),
	)
}

// ignore returns err unless it is the given one.
func ignore(err, except error) error {
	if errors.Is(err, except) {
		return nil
	}
	return err
}
