package taskapi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	task "github.com/containerd/containerd/api/runtime/task/v3"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
)

// startTask starts the task of a sandbox, which nobody attends.
func (c *command) startTask(ctx context.Context, id string) (err error) {
	shim, _, err := c.connect(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, shim.close()) }()
	_, err = shim.start(ctx, id, "")
	return err
}

// runTask starts a task, copies its streams, and writes its exit to verdictFD.
func (c *command) runTask(ctx context.Context, id string) error {
	t, err := c.readTask(id)
	if err != nil {
		return err
	}
	a := &attendant{streams: t.streams, id: id, started: os.NewFile(startedFD, "started")}
	if err := c.attendStart(ctx, a, nil); err != nil {
		return err
	}
	code := c.awaitExit(ctx, a)
	a.finish()
	_, err = fmt.Fprintf(os.NewFile(verdictFD, "verdict"), `{"id": %q, "exitStatus": %d, "oomKilled": %t}`+"\n",
		id, code, c.oomKilled(id, code))
	return err
}

// attendStart starts a process and the copying of its streams, and reports that. process is nil for
// a task.
func (c *command) attendStart(ctx context.Context, a *attendant, process *specs.Process) (err error) {
	shim, _, err := c.connect(ctx)
	if err != nil {
		return err
	}
	a.client.Store(shim)
	release, err := a.hold()
	if err != nil {
		return err
	}
	defer release()
	if a.Terminal {
		if a.slave, err = makeTerminal(c.consoleSocket); err != nil {
			return err
		}
	}
	if process != nil {
		err = shim.addProcess(ctx, &task.ExecProcessRequest{ID: a.id, ExecID: a.exec,
			Terminal: a.Terminal, Stdin: a.Stdin, Stdout: a.Stdout, Stderr: a.Stderr}, process)
	}
	if err != nil {
		return err
	}
	failpoint.Reach("task.start")
	pid, err := shim.start(ctx, a.id, a.exec)
	if err != nil {
		return err
	}
	failpoint.Reach("task.started")
	if c.visible && process != nil {
		if err := writeJSON(c.execPIDPath(a.id, a.exec), pid); err != nil {
			return err
		}
	}
	if err := a.begin(); err != nil {
		return err
	}
	if a.Terminal {
		signal.Ignore(unix.SIGHUP) // the end of the terminal's master; the process has a terminal of its own
	}
	_, err = a.started.WriteString("ok")
	return errors.Join(err, a.started.Close())
}

// awaitExit returns the exit code of a process. If the shim is lost, its pod is ended. If the shim
// cannot tell the exit, the container is removed first.
func (c *command) awaitExit(ctx context.Context, a *attendant) (code int) {
	for ; ; time.Sleep(reconnectPause) {
		shim := a.client.Load()
		code, err := shim.wait(ctx, a.id, a.exec)
		switch {
		case err == nil:
			return code
		case isGone(err): // somebody has deleted it
			return killed
		case !errors.Is(err, errUnanswered):
			c.endUnknown(ctx, a)
			return killed
		}
		next, _, err := c.connect(ctx)
		if err != nil {
			_ = c.endLost(ctx, a.id) // the daemon repeats it
			return killed
		}
		_ = shim.close() // it is broken
		a.client.Store(next)
	}
}

// reconnectPause is the time between two connections to a shim that closes them.
const reconnectPause = 100 * time.Millisecond

// endUnknown ends a process whose exit the shim cannot tell.
func (c *command) endUnknown(ctx context.Context, a *attendant) {
	if a.exec == "" {
		_ = c.delete(ctx, a.id) // the daemon repeats it
		return
	}
	_ = a.client.Load().kill(ctx, a.id, a.exec, uint32(unix.SIGKILL), false) // it ends with its container
}

// endLost ends the pod of a lost shim. Its pause then ends, and so the daemon learns that the pod
// cannot run containers any more. id is one of its tasks. A shim that lives is left alone.
func (c *command) endLost(ctx context.Context, id string) error {
	r, err := c.readRecord()
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil || r.Sandbox == id {
		return err
	}
	for limit := time.Now().Add(lostTimeout); !c.isLost(r); time.Sleep(reconnectPause) {
		if time.Now().After(limit) {
			return nil
		}
	}
	return c.delete(ctx, r.Sandbox)
}

// lostTimeout is how long the end of a shim may take after its socket has closed.
const lostTimeout = 2 * time.Second

const execPrefix = "exec-"

func execName(pid int) string { return execPrefix + strconv.Itoa(pid) }

// startProcess starts a copy of this program that attends the process. The copy's PID identifies
// the process.
func (c *command) startProcess(ctx context.Context, id string) (err error) {
	process, err := readJSON[specs.Process](c.process)
	if err != nil {
		return err
	}
	if err := c.removeUnattended(ctx, id); err != nil {
		return err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	args := append(slices.Clone(c.global), "attend", "--process", c.process, "--console-socket", c.consoleSocket, id)
	cmd := exec.CommandContext(ctx, "/proc/self/exe", args...)
	cmd.Args[0] = os.Args[0]
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.ExtraFiles = []*os.File{w}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: process.Terminal}
	failpoint.Reach("task.start-attendant")
	err = cmd.Start()
	failpoint.Reach("task.attendant-started")
	if err := errors.Join(err, w.Close()); err != nil {
		return err
	}
	answer, err := io.ReadAll(r)
	if err == nil && string(answer) != "ok" {
		_ = cmd.Wait() // its answer says why it ends
		err = errors.New(cmp.Or(string(answer), "the process's attendant ended early"))
	}
	if err != nil {
		return err
	}
	pid := []byte(strconv.Itoa(cmd.Process.Pid))
	return errors.Join(os.WriteFile(c.internalPIDFile, pid, 0o600), os.WriteFile(c.pidFile, pid, 0o600))
}

// removeUnattended removes what killed attendants have left of their processes.
func (c *command) removeUnattended(ctx context.Context, id string) error {
	dirs, err := filepath.Glob(filepath.Join(c.taskDir(id), execPrefix+"*"))
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		name := filepath.Base(dir)
		if _, err := os.Stat("/proc/" + strings.TrimPrefix(name, execPrefix)); err == nil {
			continue
		}
		if shim, _, err := c.connect(ctx); err == nil {
			_ = shim.kill(ctx, id, name, uint32(unix.SIGKILL), false) // it may have ended
			_ = shim.delete(ctx, id, name)                            // it may not exist
			_ = shim.close()                                          // nothing is left to send
		}
		failpoint.Reach("task.remove-unattended")
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
		failpoint.Reach("task.unattended-removed")
	}
	return nil
}

// attend starts a process of a task and attends it. Its exit code is that of the process.
func (c *command) attend(ctx context.Context, id string) (code int, err error) {
	a := &attendant{id: id, exec: execName(os.Getpid()), started: os.NewFile(attendFD, "started")}
	defer func() {
		if err != nil {
			_, _ = a.started.WriteString(err.Error()) // if it is open
		}
	}()
	process, err := readJSON[specs.Process](c.process)
	if err != nil {
		return 0, err
	}
	dir := filepath.Join(c.taskDir(id), a.exec)
	failpoint.Reach("task.make-exec-directory")
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) { // of a killed attendant
		return 0, err
	}
	failpoint.Reach("task.exec-directory-made")
	defer func() {
		failpoint.Reach("task.remove-exec-directory")
		err = errors.Join(err, os.RemoveAll(dir))
		failpoint.Reach("task.exec-directory-removed")
	}()
	if a.streams, err = makeStreams(dir, process.Terminal); err != nil {
		return 0, err
	}
	if err = c.attendStart(ctx, a, &process); err == nil {
		code = c.awaitExit(ctx, a)
		a.finish()
	}
	if shim := a.client.Load(); shim != nil {
		// A shim keeps a process that did not start, too. A lost shim has no process to delete.
		if err != nil {
			_ = shim.kill(ctx, id, a.exec, uint32(unix.SIGKILL), false)
		}
		_ = shim.delete(ctx, id, a.exec)
	}
	return code, err
}
