package taskapi

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
	"berth/internal/pidfd"
)

// kill sends a signal. A shim that hangs is killed itself, and its pod with it.
func (c *command) kill(ctx context.Context, id string) (err error) {
	if len(c.args) < 2 {
		return errors.New("kill: no signal")
	}
	number, err := strconv.ParseUint(c.args[1], 10, 32)
	if err != nil {
		return fmt.Errorf("kill: %w", err)
	}
	process := ""
	if c.processID != 0 {
		process = execName(c.processID)
	}
	shim, r, err := c.connect(ctx)
	if err == nil {
		defer func() { err = errors.Join(err, shim.close()) }()
		err = c.killTree(r, id, process)
		err = errors.Join(err, shim.kill(ctx, id, process, uint32(number), false))
	}
	switch {
	case err == nil:
		return c.answered()
	case isGone(err):
		return nil
	case errors.Is(err, errUnanswered) && unix.Signal(number) == unix.SIGKILL && process == "" && c.isHung(r):
		// The attendants of its containers notice that, and end the pod.
		return errors.Join(c.killShim(ctx, r), c.deleteByProgram(ctx, id))
	}
	return err
}

// execPIDPath is a file with the PID of the process of an exec, if the node sees it.
func (p *pod) execPIDPath(id, exec string) string { return filepath.Join(p.taskDir(id), exec, "pid") }

// killTree kills the process of an exec and its descendants, if the node sees them. A shim kills
// the process only.
func (p *pod) killTree(r record, id, exec string) error {
	pid, err := readJSON[int](p.execPIDPath(id, exec))
	if err != nil || exec == "" {
		return nil // the node does not see it
	}
	process, err := pidfd.Open(pid)
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	if err != nil {
		return err
	}
	defer process.Close()
	if !pidfd.IsChild(pid, r.PID) { // the PID was used again
		return nil
	}
	return pidfd.KillTree(pid, process)
}

// maxDeletes is how often the shim's command delete is called for a task. After a half-done delete
// Kata's has nothing to read, and fails forever. Containerd ignores its errors, too.
const maxDeletes = 2

// deleteByProgram calls the shim's program to remove a task that no shim serves.
func (c *command) deleteByProgram(ctx context.Context, id string) error {
	t, err := c.readTask(id)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil || t.Deletes == maxDeletes {
		return err
	}
	t.Deletes++ // before the call, which may be killed
	if err := c.saveTask(id, t); err != nil {
		return err
	}
	return c.program.delete(ctx, id, t.Bundle)
}

// delete kills and removes a task. With the task of a sandbox it removes all tasks, and ends the
// shim.
func (c *command) delete(ctx context.Context, id string) (err error) {
	if !c.exists(id) {
		return nil
	}
	unlock, err := c.lock()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.removeIdle(), unlock()) }()
	shim, r, err := c.connect(ctx)
	if err != nil && !errors.Is(err, errUnanswered) && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if shim != nil {
		defer func() { err = errors.Join(err, shim.close()) }()
	}
	if r.Sandbox != id {
		return c.deleteTask(ctx, shim, r, id)
	}
	tasks, err := c.tasks()
	if err != nil {
		return err
	}
	for _, other := range append(slices.DeleteFunc(tasks, func(t string) bool { return t == id }), id) {
		err = errors.Join(err, c.deleteTask(ctx, shim, r, other))
	}
	if err != nil {
		return err
	}
	if shim != nil {
		_ = shim.shutdown(ctx, id) // it is killed next
	}
	return c.endShim(ctx, r)
}

// exists returns whether the pod has a shim, or the task a directory.
func (c *command) exists(id string) bool {
	return exists(c.recordPath()) || exists(c.taskDir(id))
}

// exists returns whether a file certainly or possibly exists.
func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

// removeIdle removes the lock of a pod that has no shim any more.
func (c *command) removeIdle() error {
	if _, err := os.Lstat(c.recordPath()); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	failpoint.Reach("task.remove-lock")
	err := os.Remove(c.lockPath())
	failpoint.Reach("task.lock-removed")
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// tasks returns the IDs of the pod's tasks.
func (p *pod) tasks() (ids []string, err error) {
	found, err := filepath.Glob(filepath.Join(p.dir, "*", "task.json"))
	for _, path := range found {
		ids = append(ids, filepath.Base(filepath.Dir(path)))
	}
	return ids, err
}

// deleteTask kills and removes a task. shim is nil if the shim is lost.
func (c *command) deleteTask(ctx context.Context, shim *client, r record, id string) error {
	t, err := c.readTask(id)
	if errors.Is(err, fs.ErrNotExist) {
		return c.removeTaskDir(id)
	}
	if err != nil {
		return err
	}
	err = errUnanswered
	if shim != nil {
		err = endTask(ctx, shim, id, &t.streams)
	}
	if errors.Is(err, errUnanswered) {
		if !c.isHung(r) {
			return err
		}
		// Its children stay zombies while it hangs.
		if err := c.killShim(ctx, r); err != nil {
			return err
		}
	}
	if (err != nil || !t.Created) && r.Address != "" { // a shim that was not started has no task
		if byProgram := c.deleteByProgram(ctx, id); byProgram != nil {
			return errors.Join(err, byProgram)
		}
	}
	if shim != nil && err == nil && len(t.Mounts) > 0 && r.PID != 0 {
		if err := unmountIn(r.PID, t.Mounts); err != nil {
			return err
		}
	}
	return c.removeTaskDir(id)
}

func (c *command) removeTaskDir(id string) error {
	failpoint.Reach("task.remove-directory")
	err := os.RemoveAll(c.taskDir(id))
	failpoint.Reach("task.directory-removed")
	return err
}

// endTask kills a task, waits for its end and deletes it.
func endTask(ctx context.Context, shim *client, id string, s *streams) error {
	if err := shim.kill(ctx, id, "", uint32(unix.SIGKILL), true); err != nil && !isGone(err) {
		return err
	}
	waiting, cancel := context.WithTimeout(ctx, endTimeout)
	defer cancel()
	if _, err := shim.wait(waiting, id, ""); err != nil && !isGone(err) {
		return err
	}
	// A shim deletes a task after the end of its output, which nobody may read any more.
	stop, err := s.discard()
	if err != nil {
		return err
	}
	defer stop()
	for begin := time.Now(); ; time.Sleep(deletePause) {
		err := shim.delete(ctx, id, "")
		switch {
		case err == nil || isGone(err):
			return nil
		case errors.Is(err, errUnanswered) || time.Since(begin) >= endTimeout:
			return err
		}
	}
}

// deletePause is the time between two deletes. Kata's shim refuses a delete for a moment after it
// has told the exit.
const deletePause = 20 * time.Millisecond
