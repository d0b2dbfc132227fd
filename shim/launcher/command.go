package launcher

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/pidfd"
	"berth/shim/proto"
)

// How often init is looked at until it has executed the command. That takes it less than a
// millisecond, but for hooks of the kind startContainer, and where it gets no processor.
const (
	firstLook = 50 * time.Microsecond
	lastLook  = 10 * time.Millisecond
)

// errNotExecuted is that init has ended without executing the container's command.
var errNotExecuted = errors.New("it ended before it executed its command")

// awaitCommand waits until init, which was let go, has executed the container's command. Without it
// the daemon would answer while init is still the launcher's program: an exec sees that as process
// 1, and what it writes to /proc/1/fd/1 is refused. errNotExecuted if init ends instead. patience
// ends the wait without an error.
func (c *launch) awaitCommand(patience func(waited time.Duration, runnable bool) bool) error {
	begin := time.Now()
	for pause := firstLook; ; pause = min(2*pause, lastLook) {
		ended, err := pidfd.Ended(c.init) // the monitor reaps it
		if err != nil {
			return err
		}
		executed, runnable, err := pidfd.Executed(c.started.InitPID) // our child, not reaped: it is this one
		if err != nil {
			return err
		}
		switch {
		case executed:
			c.awaitIdentity()
			return nil
		case ended:
			return errNotExecuted
		case c.ctx.Err() != nil:
			return proto.Errorf(proto.Canceled, "the launch was cancelled")
		case !patience(time.Since(begin), runnable):
			return nil
		}
		interval := unix.NsecToTimespec(int64(pause))
		_ = unix.Nanosleep(&interval, nil) // an interrupted one is a shorter one
	}
}

// awaitIdentity waits until execve has given the process the command's name and rights, which it
// does some microseconds after it counts as executed. To look at a process's memory the kernel
// waits for the end of its execve (exec_update_lock).
func (c *launch) awaitIdentity() {
	if f, err := os.Open(fmt.Sprintf("/proc/%d/auxv", c.started.InitPID)); err == nil { // else it has ended
		_ = f.Close() // nothing was written
	}
}

// always is the patience with libcontainer's init, which executes the command or ends.
func always(time.Duration, bool) bool { return true }

// How long the init of an OCI runtime's program is waited for. It may never execute a command: crun
// runs WebAssembly in its init.
const (
	programSleeps  = 20 * time.Millisecond // while it sleeps
	programRunning = time.Second           // while it wants a processor
)

// programPatience returns the patience with a program's init. The init of crun runs the hooks of
// the kind startContainer as its children and sleeps meanwhile, so a time with children does not
// count.
func (c *launch) programPatience() func(waited time.Duration, runnable bool) bool {
	hooks := c.Spec.Hooks != nil && len(c.Spec.Hooks.StartContainer) > 0
	var idleSince time.Duration
	return func(waited time.Duration, runnable bool) bool {
		if hooks && hasChild(c.started.InitPID) {
			idleSince = waited
		}
		return isPatient(waited-idleSince, runnable)
	}
}

func isPatient(waited time.Duration, runnable bool) bool {
	return waited < programSleeps || runnable && waited < programRunning
}

// hasChild tells whether a process, which has one thread, has a child.
func hasChild(pid int) bool {
	f, err := os.Open(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid)) // needs CONFIG_PROC_CHILDREN
	if err != nil {
		return false
	}
	defer f.Close()
	n, _ := f.Read(make([]byte, 1)) // an error is the end of the list or of the process
	return n > 0
}

// explainNotExecuted adds to errNotExecuted what init has written about it: libcontainer and crun
// have closed all but the container's streams by then.
func (c *launch) explainNotExecuted(err error) error {
	if !errors.Is(err, errNotExecuted) {
		return err
	}
	said := c.lastWords()
	code := proto.Internal
	if strings.Contains(strings.ToLower(said), "exec ") {
		code = proto.InvalidArgument
	}
	if said == "" {
		return proto.Errorf(code, "command %q: %v", c.Spec.Process.Args[0], err)
	}
	return proto.Errorf(code, "command %q: %s", c.Spec.Process.Args[0], said)
}

// maxWords bounds what is read of it, in bytes.
const maxWords = 1 << 10

// lastWords returns what is in the container's standard error, or on its terminal.
func (c *launch) lastWords() string {
	for _, f := range []*os.File{c.io.stderr, c.io.console} {
		if f == nil || unix.SetNonblock(int(f.Fd()), true) != nil { // this process ends with the failure
			continue
		}
		text := make([]byte, maxWords)
		n, err := unix.Read(int(f.Fd()), text)
		if err == nil && n > 0 {
			return strings.TrimSpace(strings.ToValidUTF8(string(text[:n]), "?"))
		}
	}
	return ""
}
