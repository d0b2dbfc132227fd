// Package pidfd watches and signals processes through pidfds. Unlike a process ID, a pidfd never
// refers to another process.
//
// A pidfd is an *os.File that is registered with Go's poller, so waiting for the exit of a process
// costs a goroutine but no thread. The package needs Linux 5.4 (P_PIDFD).
package pidfd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// Open returns a pidfd of the process pid, which must lead its thread group and be visible in the
// caller's PID namespace. The error wraps os.ErrProcessDone if no such process exists, or if its ID
// now belongs to a thread of another process.
func Open(pid int) (*os.File, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.EINVAL) { // PIDFD_NONBLOCK is Linux 5.10
		fd, err = openBlocking(pid)
	}
	switch {
	case errors.Is(err, unix.ESRCH), errors.Is(err, unix.ENOENT) && pid > 0, errors.Is(err, unix.EINVAL) && pid > 0:
		// EINVAL and ENOENT mean a thread that does not lead its thread group: EINVAL before Linux
		// 6.15, and ENOENT since then.
		return nil, fmt.Errorf("open pidfd of %d: %w", pid, os.ErrProcessDone)
	case err != nil:
		return nil, fmt.Errorf("open pidfd of %d: %w", pid, err)
	}
	return os.NewFile(uintptr(fd), "pidfd:"+strconv.Itoa(pid)), nil
}

func openBlocking(pid int) (int, error) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return -1, err
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}

// FromFD prepares a pidfd that was received or created elsewhere for Wait: it sets the descriptor
// non-blocking and close-on-exec. The file owns fd, even after an error.
func FromFD(fd int) (*os.File, error) {
	unix.CloseOnExec(fd)
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, errors.Join(fmt.Errorf("set pidfd non-blocking: %w", err), unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), "pidfd"), nil
}

// FromFile is FromFD for a file that was received. It takes over f.
func FromFile(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("take over pidfd: %w", err)
	}
	return FromFD(fd)
}

// OpenVerified is Open for a process identified by pid and start time (see StartTime). The error
// wraps os.ErrProcessDone if the process has exited, or if its pid belongs to another process.
func OpenVerified(pid int, starttime uint64) (*os.File, error) {
	f, err := Open(pid)
	if err != nil {
		return nil, err
	}
	// While the pidfd is open the kernel does not reuse the pid. The start time shows whether the
	// kernel has reused the pid.
	got, err := StartTime(pid)
	if err == nil && got != starttime {
		err = fmt.Errorf("pid %d started at tick %d, not %d: %w", pid, got, starttime, os.ErrProcessDone)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// Wait returns nil when the process has exited, or ctx's error. It reaps a child of the caller.
// Several Waits may share one file.
func Wait(ctx context.Context, f *os.File) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	// A shared file has only one read lock and one deadline, so each Wait uses a duplicate.
	own, err := dup(f)
	if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) {
		return pollUntilExit(ctx, f)
	}
	if err != nil {
		return err
	}
	defer own.Close()
	stop := context.AfterFunc(ctx, func() {
		// It fails only if own is closed. Then no read waits.
		_ = own.SetReadDeadline(time.Unix(1, 0))
	})
	defer stop()

	conn, err := own.SyscallConn()
	if err != nil {
		return fmt.Errorf("wait on %s: %w", f.Name(), err)
	}
	var pollErr error
	err = conn.Read(func(fd uintptr) bool {
		var done bool
		done, pollErr = ended(int(fd))
		return done || pollErr != nil
	})
	switch {
	case pollErr != nil:
		return fmt.Errorf("wait on %s: %w", f.Name(), pollErr)
	case err != nil && ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		return fmt.Errorf("wait on %s: %w", f.Name(), err)
	}
	return reapUntil(ctx, own)
}

// pollPause is the polling interval for a process when no descriptor was free for waiting.
const pollPause = 100 * time.Millisecond

// pollUntilExit is Wait, but does not duplicate the descriptor. It polls the process, because an
// unreaped child would stay a zombie.
func pollUntilExit(ctx context.Context, f *os.File) error {
	for {
		done, err := Exited(f)
		if err != nil {
			return err
		}
		if done {
			return reapUntil(ctx, f)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pollPause):
		}
	}
}

// tracedPause is the polling interval for a dead child that another process traces.
const tracedPause = 50 * time.Millisecond

// reapUntil reaps a child that has exited. The kernel does not let a parent reap a traced child
// before its tracer.
func reapUntil(ctx context.Context, f *os.File) error {
	for {
		reaped, err := reap(f)
		if reaped || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(tracedPause):
		}
	}
}

// control calls Control on f. If f is closed, the error wraps os.ErrClosed. The poller's error does
// not.
func control(f *os.File, do func(fd uintptr)) error {
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	if err := conn.Control(do); err != nil { // the only possible failure
		return fmt.Errorf("%w: %w", os.ErrClosed, err)
	}
	return nil
}

// Exited reports whether the process has exited, and reaps a child. The error wraps os.ErrClosed if
// f is closed.
func Exited(f *os.File) (bool, error) {
	done, err := Ended(f)
	if err != nil || !done {
		return false, err
	}
	_, err = reap(f) // Wait reaps a traced child
	return true, err
}

// Ended is Exited for callers that must not reap the child.
func Ended(f *os.File) (bool, error) {
	var done bool
	var pollErr error
	if err := control(f, func(fd uintptr) { done, pollErr = ended(int(fd)) }); err != nil {
		return false, fmt.Errorf("poll %s: %w", f.Name(), err)
	}
	return done, pollErr
}

// Signal sends sig to the process. The error wraps os.ErrProcessDone if the process does not exist
// any more, and os.ErrClosed if f is closed.
func Signal(f *os.File, sig unix.Signal) error {
	var sendErr error
	if err := control(f, func(fd uintptr) { sendErr = unix.PidfdSendSignal(int(fd), sig, nil, 0) }); err != nil {
		return fmt.Errorf("signal %s: %w", f.Name(), err)
	}
	switch {
	case errors.Is(sendErr, unix.ESRCH):
		return fmt.Errorf("signal %s: %w", f.Name(), os.ErrProcessDone)
	case sendErr != nil:
		return fmt.Errorf("signal %s with %s: %w", f.Name(), unix.SignalName(sig), sendErr)
	}
	return nil
}

// Stopped reports whether a signal or a tracer has stopped the process. It returns false for a
// process that has exited. The error wraps os.ErrClosed if f is closed.
func Stopped(f *os.File) (bool, error) {
	pid, err := pidOf(f)
	if err != nil {
		return false, err
	}
	if pid <= 0 { // exited and reaped
		return false, nil
	}
	stat, err := readStat(pid)
	if errors.Is(err, os.ErrProcessDone) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read state of %d: %w", pid, err)
	}
	if done, err := Exited(f); done || err != nil { // pid may belong to another process by now
		return false, err
	}
	fields := fieldsAfterName(stat)
	return len(fields) > 0 && (fields[0][0] == 'T' || fields[0][0] == 't'), nil
}

// pidOf returns the process ID, or -1 if the process has exited and was reaped.
func pidOf(f *os.File) (int, error) {
	var info []byte
	var readErr error
	if err := control(f, func(fd uintptr) {
		info,
			readErr = os.ReadFile("/proc/self/fdinfo/" + strconv.Itoa(int(fd)))
	}); err != nil {
		return 0, fmt.Errorf("find the process of %s: %w", f.Name(), err)
	}
	if readErr != nil {
		return 0, fmt.Errorf("find the process of %s: %w", f.Name(), readErr)
	}
	_, rest, _ := bytes.Cut(info, []byte("\nPid:"))
	line, _, _ := bytes.Cut(rest, []byte("\n"))
	pid, err := strconv.Atoi(string(bytes.TrimSpace(line)))
	if err != nil {
		return 0, fmt.Errorf("find the process of %s: its fdinfo is %q: %w", f.Name(), info, err)
	}
	return pid, nil
}

// StartTime returns when the process started, in clock ticks since boot (field 22 of
// /proc/PID/stat). Pid and start time together identify a process until the next boot. The error
// wraps os.ErrProcessDone if no such process exists.
func StartTime(pid int) (uint64, error) {
	stat, err := readStat(pid)
	if err != nil {
		return 0, fmt.Errorf("read start time of %d: %w", pid, err)
	}
	ticks, err := parseStartTime(stat)
	if err != nil {
		return 0, fmt.Errorf("read start time of %d: %w", pid, err)
	}
	return ticks, nil
}

// Executed reports whether a process has executed a program since its fork. It also works for a
// zombie. runnable reports that the process runs, waits for a processor, or is in uninterruptible
// sleep. The error wraps os.ErrProcessDone if no such process exists.
func Executed(pid int) (executed, runnable bool, err error) {
	stat, err := readStat(pid)
	if err != nil {
		return false, false, fmt.Errorf("read flags of %d: %w", pid, err)
	}
	executed, runnable, err = parseExecuted(stat)
	if err != nil {
		return false, false, fmt.Errorf("read flags of %d: %w", pid, err)
	}
	return executed, runnable, nil
}

// Exiting reports whether a process has begun to exit or has exited. Its descriptors, mounts and
// namespaces may be gone although it is no zombie yet. The error wraps os.ErrProcessDone if no such
// process exists.
func Exiting(pid int) (bool, error) {
	stat, err := readStat(pid)
	if err != nil {
		return false, fmt.Errorf("read flags of %d: %w", pid, err)
	}
	_, set, err := parseFlags(stat)
	if err != nil {
		return false, fmt.Errorf("read flags of %d: %w", pid, err)
	}
	return set&exiting != 0, nil
}

const (
	// exiting is PF_EXITING. Zombies have it, too.
	exiting = 0x4
	// forkNoExec is PF_FORKNOEXEC: the process was forked and has not executed a program. The column
	// F of ps shows this flag.
	forkNoExec = 0x40
)

func parseExecuted(stat []byte) (executed, runnable bool, err error) {
	state, set, err := parseFlags(stat)
	return err == nil && set&forkNoExec == 0, err == nil && bytes.ContainsAny(state, "RD"), err
}

// parseFlags reads fields 3 and 9.
func parseFlags(stat []byte) (state []byte, set uint64, err error) {
	const afterName = 9 - 3
	fields := fieldsAfterName(stat)
	if len(fields) <= afterName {
		return nil, 0, fmt.Errorf("malformed stat line %q", stat)
	}
	set, err = strconv.ParseUint(string(fields[afterName]), 10, 32)
	return fields[0], set, err
}

// readStat returns the content of /proc/PID/stat.
func readStat(pid int) ([]byte, error) {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		err = os.ErrProcessDone
	}
	return stat, err
}

// parseStartTime reads field 22.
func parseStartTime(stat []byte) (uint64, error) {
	const afterName = 22 - 3
	fields := fieldsAfterName(stat)
	if len(fields) <= afterName {
		return 0, fmt.Errorf("malformed stat line %q", stat)
	}
	return strconv.ParseUint(string(fields[afterName]), 10, 64)
}

// fieldsAfterName returns the fields from the third on. Field 2, the name, is in parentheses and
// may contain spaces and parentheses, so fields are counted after the last ')'.
func fieldsAfterName(stat []byte) [][]byte {
	return bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
}

// dup duplicates f. The error wraps os.ErrClosed if f is closed.
func dup(f *os.File) (*os.File, error) {
	var fd int
	var dupErr error
	if err := control(f, func(old uintptr) { fd, dupErr = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 0) }); err != nil {
		return nil, fmt.Errorf("duplicate %s: %w", f.Name(), err)
	}
	if dupErr != nil {
		return nil, fmt.Errorf("duplicate %s: %w", f.Name(), dupErr)
	}
	return FromFD(fd)
}

// ended polls without waiting. A pidfd is readable once its process has exited.
func ended(fd int) (bool, error) {
	for {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(p, 0)
		if !errors.Is(err, unix.EINTR) {
			return n > 0, err
		}
	}
}

// reap reaps a child that has exited. done is false if a tracer still prevents that.
func reap(f *os.File) (done bool, err error) {
	conn, err := f.SyscallConn()
	if err != nil {
		return false, fmt.Errorf("reap %s: %w", f.Name(), err)
	}
	var info unix.Siginfo
	var waitErr error
	err = conn.Control(func(fd uintptr) {
		waitErr = unix.Waitid(unix.P_PIDFD, int(fd), &info, unix.WEXITED|unix.WNOHANG, nil)
	})
	switch {
	case err != nil:
		return false, fmt.Errorf("reap %s: %w", f.Name(), err)
	case errors.Is(waitErr, unix.ECHILD):
		return true, nil
	case waitErr != nil:
		return false, fmt.Errorf("reap %s: %w", f.Name(), waitErr)
	}
	return info.Signo != 0, nil
}

// GetFile returns a duplicate of a descriptor of the process (pidfd_getfd, Linux 5.6). It is
// close-on-exec. The caller needs the privilege to trace the process. The error wraps
// os.ErrProcessDone if the process has exited, and unix.EBADF if it has no such descriptor.
func GetFile(f *os.File, number int, name string) (*os.File, error) {
	var got int
	var err error
	conn, failed := f.SyscallConn()
	if failed == nil {
		failed = conn.Control(func(fd uintptr) { got, err = unix.PidfdGetfd(int(fd), number, 0) })
	}
	if errors.Is(err, unix.ESRCH) {
		err = os.ErrProcessDone
	}
	if err = errors.Join(failed, err); err != nil {
		return nil, fmt.Errorf("get descriptor %d of %s: %w", number, f.Name(), err)
	}
	return os.NewFile(uintptr(got), name), nil
}

// KeepsStatus returns whether the kernel keeps the exit status of a reaped process for its pidfds
// (PIDFD_INFO_EXIT, Linux 6.15). Older kernels since 6.13 accept the request, but have no status.
func KeepsStatus() bool {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return false
	}
	return keepsStatus(unix.ByteSliceToString(u.Release[:]))
}

// keepsStatus is KeepsStatus for the release of a kernel.
func keepsStatus(release string) bool {
	var major, minor int
	if n, _ := fmt.Sscanf(release, "%d.%d", &major, &minor); n != 2 { // another kernel
		return false
	}
	return major > 6 || major == 6 && minor >= 15
}
