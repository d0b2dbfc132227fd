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

// Limits of the interval between two checks whether init has executed the command. That takes init
// less than a millisecond, except with startContainer hooks or without a free processor.
const (
	firstCheck   = 50 * time.Microsecond
	longestCheck = 10 * time.Millisecond
)

// errNotExecuted means that init has ended without executing the container's command.
var errNotExecuted = errors.New("init ended before it executed the command")

// patience returns whether to continue waiting. waited is the time since the start of init, and
// runnable whether init is running or waits for a processor.
type patience func(waited time.Duration, runnable bool) bool

// awaitCommand waits until init has executed the container's command. Otherwise the daemon would
// report success while init is still the launcher's program. An exec would find that program as
// process 1, and could not write to /proc/1/fd/1. awaitCommand returns errNotExecuted if init ends,
// and nil if the patience ends.
func (c *launch) awaitCommand(mayWait patience) error {
	begin := time.Now()
	for pause := firstCheck; ; pause = min(2*pause, longestCheck) {
		ended, err := pidfd.Ended(c.init) // the monitor reaps it
		if err != nil {
			return err
		}
		// Init is our child and not yet reaped, so the pid cannot have been reused.
		executed, runnable, err := pidfd.Executed(c.started.InitPID)
		if err != nil {
			return err
		}
		switch {
		case executed:
			c.awaitCredentials()
			return nil
		case ended:
			return errNotExecuted
		case c.ctx.Err() != nil:
			return errCancelled
		case !mayWait(time.Since(begin), runnable):
			return nil
		}
		interval := unix.NsecToTimespec(int64(pause))
		_ = unix.Nanosleep(&interval, nil) // an interruption shortens the sleep
	}
}

// awaitCredentials waits until execve has set the process's name and credentials, some microseconds
// after the process counts as executed. The open of auxv waits in the kernel for the end of execve
// (exec_update_lock).
func (c *launch) awaitCredentials() {
	if f, err := os.Open(fmt.Sprintf("/proc/%d/auxv", c.started.InitPID)); err == nil { // otherwise it has ended
		_ = f.Close() // nothing was written
	}
}

// waitForever is the patience with libcontainer's init, which executes the command or ends.
func waitForever(time.Duration, bool) bool { return true }

// Limits of the wait for an OCI runtime's init. It may never execute a command: crun runs
// WebAssembly in init.
const (
	maxWaitAsleep   = 20 * time.Millisecond // init sleeps
	maxWaitRunnable = time.Second           // init waits for a processor
)

// ociPatience returns the patience with an OCI runtime's init. crun's init runs startContainer
// hooks as its children and sleeps meanwhile. So the time with children does not count.
func (c *launch) ociPatience() patience {
	hooks := c.Spec.Hooks != nil && len(c.Spec.Hooks.StartContainer) > 0
	var idleSince time.Duration
	return func(waited time.Duration, runnable bool) bool {
		if hooks && hasChild(c.started.InitPID) {
			idleSince = waited
		}
		waited -= idleSince
		return waited < maxWaitAsleep || runnable && waited < maxWaitRunnable
	}
}

// hasChild returns whether a process with one thread has a child.
func hasChild(pid int) bool {
	f, err := os.Open(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid)) // needs CONFIG_PROC_CHILDREN
	if err != nil {
		return false
	}
	defer f.Close()
	n, _ := f.Read(make([]byte, 1)) // on an error the process has no children or has ended
	return n > 0
}

// explainNotExecuted adds init's own message to errNotExecuted. libcontainer and crun write it to
// standard error, because they have closed all other files by then.
func (c *launch) explainNotExecuted(err error) error {
	if !errors.Is(err, errNotExecuted) {
		return err
	}
	message := c.lastOutput()
	code := proto.Internal
	if strings.Contains(strings.ToLower(message), "exec ") {
		code = proto.InvalidArgument
	}
	if message == "" {
		return proto.Errorf(code, "command %q: %v", c.Spec.Process.Args[0], err)
	}
	return proto.Errorf(code, "command %q: %s", c.Spec.Process.Args[0], message)
}

// maxLastOutput bounds the part of init's output that goes into an error, in bytes.
const maxLastOutput = 1 << 10

// lastOutput returns the content of the container's standard error or terminal.
func (c *launch) lastOutput() string {
	for _, f := range []*os.File{c.io.stderr, c.io.console} {
		if f == nil || unix.SetNonblock(int(f.Fd()), true) != nil { // the launch has failed, so no other process reads them
			continue
		}
		text := make([]byte, maxLastOutput)
		n, err := unix.Read(int(f.Fd()), text)
		if err == nil && n > 0 {
			return strings.TrimSpace(strings.ToValidUTF8(string(text[:n]), "?"))
		}
	}
	return ""
}
