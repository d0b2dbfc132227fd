package launcher

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/runc/libcontainer"
	"golang.org/x/sys/unix"

	"berth/internal/pidfd"
	"berth/shim/control"
	"berth/shim/killtree"
)

// execution is one exec on its way.
type execution struct {
	*control.Exec
	l     *launcher
	files []*os.File // stdin, stdout, stderr, as far as there are any

	container *libcontainer.Container
	process   *libcontainer.Process
	io        *stdio
	starting  chan struct{} // closed when start has returned

	mu     sync.Mutex // guards what follows, which start sets and the listener needs to kill
	cgroup string     // its own cgroup's directory; empty: it has none
	pid    int
	pidfd  *os.File
}

// serveExec carries out an exec order. An error means that the daemon is gone.
func (l *launcher) serveExec(order *control.Exec, files []*os.File) error {
	e := &execution{Exec: order, l: l, files: files, io: &stdio{}, starting: make(chan struct{})}
	stopListening := e.listen()
	err := e.start()
	closeErr := e.closeFiles() // the process has its own by now
	if err == nil {
		err = closeErr
	}
	close(e.starting)
	if err != nil {
		gone := stopListening()
		e.abandon()
		if gone != nil {
			return gone
		}
		return l.reply(control.Reply{Error: describe(err)})
	}
	if err := e.announce(); err != nil {
		gone := stopListening()
		e.abandon()
		if gone != nil {
			return gone
		}
		return err
	}
	defer e.pidfd.Close()
	code := exitCode(e.process.Wait())
	// The daemon speaks next when it has the reply, so the listener is stopped
	// before: what it has read by then belongs to this exec.
	if err := stopListening(); err != nil {
		return err
	}
	e.removeCgroup()
	return l.reply(control.Reply{Exited: &control.Exited{Code: code}})
}

// announce tells the daemon that the process runs.
func (e *execution) announce() error {
	files := []*os.File{e.pidfd}
	if e.io.console != nil {
		files = append(files, e.io.console)
	}
	err := e.l.reply(control.Reply{Exec: &control.ExecStarted{PID: e.pid}}, files...)
	if e.io.console != nil {
		err = errors.Join(err, e.io.console.Close())
	}
	return err
}

func (e *execution) start() (err error) {
	if err := e.load(); err != nil {
		return err
	}
	if e.process, err = newProcess(e.Process); err != nil {
		return err
	}
	if err := e.setIO(); err != nil {
		return err
	}
	if err := e.makeCgroup(); err != nil {
		return err
	}
	if err := e.container.Run(e.process); err != nil {
		if endErr := e.checkRunning(); endErr != nil { // that is why
			return endErr
		}
		return fmt.Errorf("exec in container %s: %w", e.ID, err)
	}
	if err := e.setPID(); err != nil {
		return err
	}
	return e.io.started()
}

func (e *execution) setPID() (err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.pid, err = e.process.Pid(); err != nil {
		return fmt.Errorf("exec in container %s: %w", e.ID, err)
	}
	e.pidfd, err = pidfd.Open(e.pid)
	return err
}

func (e *execution) load() (err error) {
	e.container, err = libcontainer.Load(e.StateRoot, e.ID)
	if errors.Is(err, libcontainer.ErrNotExist) {
		return control.Errorf(control.FailedPrecondition, "container %s is not running", e.ID)
	}
	if err != nil {
		return fmt.Errorf("load container %s: %w", e.ID, err)
	}
	return e.checkRunning()
}

// checkRunning looks anew whether the container's init is there.
func (e *execution) checkRunning() error {
	status, err := e.container.Status()
	if err != nil {
		return fmt.Errorf("status of container %s: %w", e.ID, err)
	}
	if status == libcontainer.Stopped {
		return control.Errorf(control.FailedPrecondition, "container %s is not running", e.ID)
	}
	return nil
}

func (e *execution) setIO() (err error) {
	if e.Process.Terminal {
		e.io.socket, e.process.ConsoleSocket, err = socketPair("console")
		e.io.children = []*os.File{e.process.ConsoleSocket}
		return err
	}
	rest := e.files
	take := func(there bool) *os.File {
		if !there || len(rest) == 0 {
			return nil
		}
		f := rest[0]
		rest = rest[1:]
		return f
	}
	// A nil *os.File in the interface would not be nil.
	if f := take(e.Stdin); f != nil {
		e.process.Stdin = f
	}
	if f := take(e.Stdout); f != nil {
		e.process.Stdout = f
	}
	if f := take(e.Stderr); f != nil {
		e.process.Stderr = f
	}
	return nil
}

func (e *execution) closeFiles() error {
	var err error
	for _, f := range e.files {
		err = errors.Join(err, f.Close())
	}
	return err
}

// makeCgroup makes the exec's own cgroup, below the container's, so that all of
// its processes can be found. Where that cannot be (a threaded cgroup, no freezer)
// the exec runs in the container's.
func (e *execution) makeCgroup() error {
	state, err := e.container.State()
	if err != nil {
		return fmt.Errorf("state of %s: %w", e.ID, err)
	}
	name := "exec-" + e.ExecID
	hierarchies := []string{""}
	if !cgroups.IsCgroup2UnifiedMode() {
		// In hybrid mode there is a path for "" too, but libcontainer takes that
		// key for "below the container's cgroup in all hierarchies".
		hierarchies = []string{"freezer", "pids"}
	}
	for _, hierarchy := range hierarchies {
		dir := state.CgroupPaths[hierarchy]
		if dir == "" {
			continue
		}
		removeEmptyExecs(dir)
		dir = filepath.Join(dir, name)
		if os.Mkdir(dir, 0o755) != nil {
			continue
		}
		if !isDomain(dir) {
			_ = unix.Rmdir(dir)
			continue
		}
		e.mu.Lock()
		e.cgroup = dir
		e.mu.Unlock()
		e.process.SubCgroupPaths = map[string]string{hierarchy: name}
		return nil
	}
	return nil
}

// staleExec is the age from which an exec's cgroup that is empty will stay so: a
// younger one may be waiting for its process.
const staleExec = time.Minute

// removeEmptyExecs removes the cgroups of earlier execs whose last process ended
// after the exec itself. The kernel keeps those that have processes.
func removeEmptyExecs(dir string) {
	old, _ := filepath.Glob(filepath.Join(dir, "exec-*")) // fails only for bad patterns
	for _, d := range old {
		if info, err := os.Stat(d); err == nil && time.Since(info.ModTime()) > staleExec {
			_ = unix.Rmdir(d)
		}
	}
}

// isDomain is false for a cgroup below a threaded domain (v2): it takes no process.
func isDomain(dir string) bool {
	kind, err := os.ReadFile(filepath.Join(dir, "cgroup.type"))
	return err != nil || strings.TrimSpace(string(kind)) == "domain"
}

// abandon leaves nothing of an exec that could not be started.
func (e *execution) abandon() {
	if e.pid > 0 {
		if e.pidfd != nil {
			_ = e.kill()
			_ = e.pidfd.Close()
		} else {
			_ = e.process.Signal(unix.SIGKILL)
		}
		_, _ = e.process.Wait() // it was killed: how it ended is of no interest
	}
	e.io.abandon()
	e.removeCgroup()
}

// removeCgroup removes the exec's cgroup unless there are processes in it: those
// of an exec that has ended well may live on, with the container.
func (e *execution) removeCgroup() {
	if e.cgroup != "" {
		_ = unix.Rmdir(e.cgroup)
	}
}

// listen begins to take the daemon's orders, before the exec starts: that may take
// long in a container that is frozen or short of memory. stop ends it; its error is
// that the daemon is gone, upon which the exec was killed.
func (e *execution) listen() (stop func() error) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- e.obey(ctx) }()
	return func() error {
		cancel()
		if err := e.l.conn.SetDeadline(time.Unix(1, 0)); err != nil {
			return err
		}
		if gone := <-ended; gone != nil {
			return gone
		}
		return e.l.conn.SetDeadline(time.Time{})
	}
}

func (e *execution) obey(ctx context.Context) error {
	for {
		var r control.Request
		_, err := e.l.conn.Receive(&r)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded) && ctx.Err() != nil:
			return nil
		case err != nil:
			if killErr := e.killStarting(); killErr != nil {
				return fmt.Errorf("exec %s in %s: %w, %w", e.ExecID, e.ID, err, killErr)
			}
			return err
		case r.Kill == e.ExecID: // else it was for one that has ended
			if err := e.killStarting(); err != nil {
				e.l.warnings.add(fmt.Sprintf("kill exec %s in %s: %v", e.ExecID, e.ID, err))
			}
		}
	}
}

// killInterval is how often an exec is killed that is being started.
const killInterval = 10 * time.Millisecond

// killStarting is kill, also while the process is being started: again and again
// then, for there is a moment before it is in its cgroup.
func (e *execution) killStarting() error {
	for {
		select {
		case <-e.starting:
			return e.kill()
		case <-time.After(killInterval):
			_ = e.kill() // what counts is the one after the start
		}
	}
}

// killTime is how long an exec's processes may take to die before they are left
// to whoever removes the container.
const killTime = 10 * time.Second

// kill ends the exec's processes, all of them, also those that init has adopted.
func (e *execution) kill() error {
	e.mu.Lock()
	cgroup, pid, proc := e.cgroup, e.pid, e.pidfd
	e.mu.Unlock()
	switch {
	case cgroup != "":
		return killtree.Kill(cgroup, killTime)
	case proc != nil:
		return killDescendants(pid, proc)
	}
	return nil // nothing runs
}

func exitCode(state *os.ProcessState, _ error) int32 {
	if state == nil {
		return 255
	}
	if status, ok := state.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return 128 + int32(status.Signal())
	}
	return int32(state.ExitCode())
}
