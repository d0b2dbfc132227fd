package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/opencontainers/cgroups"
	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
)

// Children are cgroups below the daemon's, for programs that the daemon runs. With its cgroup a
// program can be killed with all its descendants. Children uses cgroup v2 if it is mounted, even if
// v1 is mounted too. Otherwise it uses v1's freezer. Both can kill a group that forks. No
// controller is enabled, so the daemon may stay in the parent group, and usage is accounted to the
// daemon.
type Children struct {
	parent string // directory of the daemon's cgroup
	v1     bool
}

// FindChildren returns the children of this process's cgroup.
func FindChildren() (*Children, error) {
	own, err := cgroups.ParseCgroupFile("/proc/self/cgroup")
	if err != nil {
		return nil, fmt.Errorf("find the daemon's cgroup: %w", err)
	}
	return childrenIn(root, own)
}

// childrenIn implements FindChildren. mounts is the directory below which hierarchies are mounted;
// own has the daemon's cgroups by controller (v2's under "").
func childrenIn(mounts string, own map[string]string) (*Children, error) {
	for _, hierarchy := range []struct {
		dir, controller string
		v1              bool
	}{
		{mounts, "", false},
		{filepath.Join(mounts, "unified"), "", false},
		{filepath.Join(mounts, "freezer"), "freezer", true},
	} {
		path, known := own[hierarchy.controller]
		if !known || !isHierarchy(hierarchy.dir, hierarchy.v1) {
			continue
		}
		parent := filepath.Join(hierarchy.dir, path)
		if strings.HasPrefix(path, "/..") || unix.Access(parent, unix.W_OK) != nil {
			parent = hierarchy.dir // the daemon's cgroup is outside the mounted subtree
		}
		return &Children{parent: parent, v1: hierarchy.v1}, nil
	}
	return nil, errors.New("neither cgroup v2 nor the freezer of v1 is mounted in " + mounts)
}

// isHierarchy reports whether a cgroup hierarchy of that version is mounted at dir.
func isHierarchy(dir string, v1 bool) bool {
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return false
	}
	if v1 {
		return s.Type == unix.CGROUP_SUPER_MAGIC
	}
	return s.Type == unix.CGROUP2_SUPER_MAGIC
}

// Dir returns the directory of a child.
func (c *Children) Dir(name string) string { return filepath.Join(c.parent, name) }

// Start starts a command in a child's directory, which must exist. The command is in the cgroup
// from its first instruction.
func (c *Children) Start(cmd *exec.Cmd, dir string) error {
	if c.v1 {
		return c.startByThread(cmd, dir)
	}
	group, err := os.OpenFile(dir, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return fmt.Errorf("open cgroup: %w", err)
	}
	defer group.Close()
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(group.Fd())
	return cmd.Start()
}

// startByThread moves a thread of the daemon into the cgroup, starts the command from it, and moves
// the thread back. On v1 each thread has a cgroup, and a process starts in the cgroup of its
// creator. A thread that moves itself through the list of threads waits for no RCU grace period
// (see Anchor). If the thread cannot move back, startByThread ends the thread with its goroutine,
// because commands that it starts later would also be in the cgroup. It then kills the command,
// because the caller does not wait for a process whose start failed.
func (c *Children) startByThread(cmd *exec.Cmd, dir string) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == os.Getpid() { // the process's first thread cannot end, so use another one
			done <- c.startByThread(cmd, dir)
			runtime.UnlockOSThread()
			return
		}
		if err := writeFile(filepath.Join(dir, "tasks"), "0"); err != nil {
			runtime.UnlockOSThread()
			done <- fmt.Errorf("enter cgroup: %w", err)
			return
		}
		err := cmd.Start()
		if left := writeFile(filepath.Join(c.parent, "tasks"), "0"); left != nil {
			if err == nil {
				err = discard(cmd)
			}
			done <- errors.Join(fmt.Errorf("leave cgroup %s: %w", dir, left), err)
			return // the thread is locked, so it ends
		}
		runtime.UnlockOSThread()
		done <- err
	}()
	return <-done
}

// discard kills a started command and reaps it. It ignores the exit status.
func discard(cmd *exec.Cmd) error {
	if err := cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill %s: %w", cmd.Path, err)
	}
	_ = cmd.Wait()
	return nil
}

// HasProcesses reports whether a process is in a cgroup's directory or below it. It returns false
// for a cgroup that does not exist.
func HasProcesses(dir string) (bool, error) {
	pids, err := ProcsIn(dir)
	return len(pids) > 0, err
}

// KillChild kills all processes in a child's directory and below it. It fails if they still exist
// after timeout.
func KillChild(dir string, timeout time.Duration) error {
	pids, err := ProcsIn(dir)
	if err != nil {
		return err
	}
	for _, pid := range pids {
		if pid == os.Getpid() { // a thread of startByThread could not leave
			return fmt.Errorf("kill cgroup %s: it contains the daemon", dir)
		}
	}
	return KillDir(dir, timeout)
}

// RemoveChild removes a child's directory and its descendants. The error is EBUSY if processes
// remain, nil if the directory does not exist.
func RemoveChild(dir string) error {
	failpoint.Reach("cgroup.remove-child")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return ignoreGone(err)
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := RemoveChild(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	err = unix.Rmdir(dir)
	failpoint.Reach("cgroup.child-removed")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return &fs.PathError{Op: "rmdir", Path: dir, Err: err}
	}
	return nil
}
