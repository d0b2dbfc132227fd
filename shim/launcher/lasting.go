package launcher

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
	"berth/internal/pidfd"
	"berth/shim/proto"
)

// A launcher that outlives its launch (proto.Launch.Lasts, ADR 039) is the parent of the
// container's init and of the monitor, and reaps both. The monitor gets init's status through its
// pidfd. If the launcher ends first, process 1 adopts and reaps them.

// runApart is run on a thread of its own, in a copy of the host's mount namespace. The thread ends
// with it. So the container's mounts are gone from this process, and the next launch sees the
// host's current mounts.
func (c *launch) runApart() error {
	return onOwnThread(func() error {
		if err := restoreSlack(); err != nil {
			return err
		}
		if err := c.l.enterHost(); err != nil {
			return err
		}
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return os.NewSyscallError("unshare(CLONE_NEWNS)", err)
		}
		var err error
		if c.ownMounts, err = os.Open("/proc/thread-self/ns/mnt"); err != nil {
			return err
		}
		return errors.Join(c.run(), c.ownMounts.Close())
	})
}

// onOwnThread runs do on a thread that ends with it. The thread is not the process's first, which
// cannot end, and whose namespaces /proc/self shows.
func onOwnThread(do func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // Go ends the thread of a goroutine that returns locked
		if unix.Gettid() == unix.Getpid() {
			defer runtime.UnlockOSThread()
			done <- onOwnThread(do)
			return
		}
		done <- do()
	}()
	return <-done
}

// startMonitor starts the monitor. The monitor waits for handOver, and exits if this process ends
// before.
func (c *launch) startMonitor() error {
	gate, theirs, err := pipe("gate")
	if err != nil {
		return err
	}
	defer theirs.Close()
	c.gate = gate
	c.monitor.Gate = fd(theirs)
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer null.Close()

	files := append(c.monitorFiles(), c.init, theirs)
	pid, proc, err := spawn(c.l.settings.MonitorPath, c.monitor.Args(), null, files)
	if err != nil {
		return fmt.Errorf("start the monitor: %w", err)
	}
	c.undo.Add("end the monitor", func() error {
		failpoint.Reach("launcher.end-monitor")
		err := ignore(pidfd.Signal(proc, unix.SIGKILL), os.ErrProcessDone)
		if err == nil {
			_, err = unix.Wait4(pid, nil, 0, nil)
		}
		return errors.Join(err, proc.Close())
	})
	c.monitorFD, c.monitored.MonitorPID = proc, pid
	// It is a child that was not reaped, so the pid is its own.
	c.monitored.MonitorStartTime, err = pidfd.StartTime(pid)
	if c.io.stdin != nil { // it must end when the monitor closes it
		err = errors.Join(err, c.io.stdin.Close())
		c.io.stdin = nil
	}
	return err
}

// monitorFiles returns the files that only the monitor needs.
func (c *launch) monitorFiles() []*os.File {
	s := c.io
	files := append([]*os.File{s.listener, s.log, s.stdin, s.stdout, s.stderr, s.console, s.oom, s.oomNotify,
		s.oomParent}, c.kept...)
	var inherited []*os.File
	for _, f := range files {
		if f != nil {
			inherited = append(inherited, f)
		}
	}
	return inherited
}

// spawn starts a program in a session of its own. The standard streams are null, and each file
// keeps the number that it has here.
func spawn(path string, args []string, null *os.File, files []*os.File) (pid int, proc *os.File, err error) {
	inherited := []*os.File{null, null, null}
	for _, f := range files {
		n := fd(f)
		for len(inherited) <= n {
			inherited = append(inherited, nil)
		}
		inherited[n] = f
	}
	handle := -1
	attr := &os.ProcAttr{
		Dir:   "/",
		Env:   failpoint.Env(),
		Files: inherited,
		Sys:   &syscall.SysProcAttr{Setsid: true, PidFD: &handle},
	}
	failpoint.Reach("launcher.start-monitor")
	p, err := os.StartProcess(path, append([]string{filepath.Base(path)}, args...), attr)
	if err != nil {
		return 0, nil, err
	}
	failpoint.Reach("launcher.monitor-started")
	pid = p.Pid
	if err := p.Release(); err != nil {
		return 0, nil, err
	}
	proc, err = pidfd.FromFD(handle)
	return pid, proc, err
}

// handOver records the monitor in place of the launcher and lets it begin.
func (c *launch) handOver() error {
	c.started.MonitorPID, c.started.MonitorStartTime = c.monitored.MonitorPID, c.monitored.MonitorStartTime
	failpoint.Reach("launcher.record-monitor")
	if err := proto.WriteFile(c.Dir, proto.ShimFile, c.started.Encode()); err != nil {
		return err
	}
	failpoint.Reach("launcher.monitor-recorded")
	if _, err := c.gate.Write([]byte{0}); err != nil {
		return fmt.Errorf("let the monitor begin: %w", err)
	}
	failpoint.Reach("launcher.monitor-begins")
	return nil
}

// leave closes the files of the launch, and reaps its processes later.
func (c *launch) leave() error {
	c.l.children.add(c.started.InitPID, c.started.MonitorPID)
	err := errors.Join(c.gate.Close(), c.monitorFD.Close(), c.init.Close())
	for _, f := range c.monitorFiles() {
		err = errors.Join(err, f.Close())
	}
	return err
}

// children are processes that this one reaps when they end. It is safe for concurrent use.
type children struct {
	begin sync.Once

	mu sync.Mutex
	// +checklocks:mu
	pids []int
}

// add adds processes. They are children of this process.
func (c *children) add(pids ...int) {
	c.begin.Do(func() {
		ended := make(chan os.Signal, 1)
		signal.Notify(ended, unix.SIGCHLD)
		go func() { // until the process ends
			for range ended {
				c.reap()
			}
		}()
	})
	c.mu.Lock()
	c.pids = append(c.pids, pids...)
	c.mu.Unlock()
	c.reap() // some may have ended before
}

func (c *children) list() []int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.pids)
}

// reap reaps the processes that have ended. It waits for no other process, because libcontainer and
// package os wait for theirs.
func (c *children) reap() {
	c.mu.Lock()
	defer c.mu.Unlock()
	left := c.pids[:0]
	for _, pid := range c.pids {
		if got, err := unix.Wait4(pid, nil, unix.WNOHANG, nil); got == 0 && err == nil || err == unix.EINTR {
			left = append(left, pid)
		}
	}
	c.pids = left
}
