package pidfd

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ErrNotKnown means that the exit status of a process is not available.
var ErrNotKnown = errors.New("exit status unknown")

// EndStatus returns the wait status of a process that has ended, which need not be a child of the
// caller. The process counts as exited once all its threads have exited. If a tracer holds a
// thread, the pidfd does not report the exit before the tracer releases the thread.
//
// The error wraps ErrNotKnown if the process runs, if it was reaped by a kernel that does not keep
// the status (KeepsStatus), or if the caller may not trace it, because the kernel then shows 0.
func EndStatus(f *os.File) (unix.WaitStatus, error) {
	pid, err := pidOf(f)
	if err != nil {
		return 0, err
	}
	if pid <= 0 {
		return keptStatus(f)
	}
	status, err := zombieStatus(pid)
	// pid may belong to another process by now.
	if now, pidErr := pidOf(f); pidErr != nil || now != pid {
		return keptStatus(f)
	}
	if err != nil {
		return 0, fmt.Errorf("status of process %d: %w", pid, err)
	}
	return status, nil
}

// info is struct pidfd_info of linux/pidfd.h.
type info struct {
	mask, cgroup uint64
	ids          [11]uint32
	exitCode     int32
}

const (
	getInfo  = 0xc040ff0b // PIDFD_GET_INFO: _IOWR(0xff, 11, struct pidfd_info)
	infoExit = 8          // PIDFD_INFO_EXIT
)

// keptStatus returns the status that the kernel keeps of a reaped process.
func keptStatus(f *os.File) (unix.WaitStatus, error) {
	i := info{mask: infoExit}
	conn, err := f.SyscallConn()
	if err != nil {
		return 0, err
	}
	var errno unix.Errno
	err = conn.Control(func(fd uintptr) {
		_, _, errno = unix.Syscall(unix.SYS_IOCTL, fd, getInfo, uintptr(unsafe.Pointer(&i)))
	})
	if err != nil {
		return 0, err
	}
	if errno != 0 || i.mask&infoExit == 0 {
		return 0, fmt.Errorf("process was reaped: %w", ErrNotKnown)
	}
	return unix.WaitStatus(i.exitCode), nil
}

func zombieStatus(pid int) (unix.WaitStatus, error) {
	proc := "/proc/" + strconv.Itoa(pid)
	if dead, err := threadsEnded(proc + "/task"); err != nil || !dead {
		return 0, errors.Join(fmt.Errorf("process is running: %w", ErrNotKnown), err)
	}
	// The kernel requires the same permission for this link as for the status.
	if _, err := os.Readlink(proc + "/ns/pid"); err != nil {
		return 0, fmt.Errorf("%w: %w", ErrNotKnown, err)
	}
	stat, err := readStat(pid)
	if err != nil {
		return 0, fmt.Errorf("%w: %w", ErrNotKnown, err)
	}
	return parseZombie(stat)
}

// parseZombie reads field 52, exit_code, of a zombie.
func parseZombie(stat []byte) (unix.WaitStatus, error) {
	const state, exitCode = 3 - 3, 52 - 3
	fields := fieldsAfterName(stat)
	if len(fields) <= exitCode || string(fields[state]) != "Z" {
		return 0, fmt.Errorf("stat line %q does not describe a zombie: %w", stat, ErrNotKnown)
	}
	status, err := strconv.ParseUint(string(fields[exitCode]), 10, 16)
	if err != nil {
		return 0, fmt.Errorf("exit code in stat line: %w: %w", ErrNotKnown, err)
	}
	return unix.WaitStatus(status), nil
}

// Thread is a thread of a process.
type Thread struct {
	ID    int
	State byte // field 3 of its stat: R, S, D, T, t, Z, X ...
}

// stopped reports whether a signal or a tracer has stopped the thread.
func (t Thread) stopped(pid int) bool {
	return t.State == 'T' || t.State == 't' || t.InFreezer(pid)
}

// InFreezer reports whether its cgroup has frozen the thread. In a stat file, a thread that is
// frozen on cgroup v1 has the state of a thread that waits for a disk. On v2 it has the state of a
// sleeping thread. Only the kernel function in which it sleeps shows the difference. Compilers
// inline v2's function into get_signal, which sleeps for no other reason.
func (t Thread) InFreezer(pid int) bool {
	if t.State != 'D' && t.State != 'S' {
		return false
	}
	wchan, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/task/" + strconv.Itoa(t.ID) + "/wchan")
	if err != nil {
		return false
	}
	name := string(wchan)
	return strings.Contains(name, "refrigerator") || name == "do_freezer_trap" || name == "get_signal"
}

// AnyStopped reports whether a signal or a tracer has stopped a thread of the process.
func AnyStopped(pid int) (bool, error) {
	threads, err := Threads(pid)
	return slices.ContainsFunc(threads, func(t Thread) bool { return t.stopped(pid) }), err
}

// Threads returns the threads of a process. Threads that exit meanwhile may be missing.
func Threads(pid int) (threads []Thread, err error) {
	err = eachThread("/proc/"+strconv.Itoa(pid)+"/task", func(t Thread) bool {
		threads = append(threads, t)
		return true
	})
	return threads, err
}

// threadsEnded reports whether every thread in a directory /proc/PID/task has exited. It stops at
// the first live thread.
func threadsEnded(dir string) (bool, error) {
	dead := true
	err := eachThread(dir, func(t Thread) bool {
		dead = t.State == 'Z' || t.State == 'X'
		return dead
	})
	return dead, err
}

// eachThread calls do for each thread in a directory /proc/PID/task until do returns false.
func eachThread(dir string, do func(Thread) bool) error {
	tasks, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer tasks.Close()
	for {
		names, err := tasks.Readdirnames(64)
		for _, name := range names {
			t, err := readThread(dir, name)
			if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) { // the thread has exited
				continue
			}
			if err != nil {
				return err
			}
			if !do(t) {
				return nil
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func readThread(dir, name string) (Thread, error) {
	stat, err := os.ReadFile(dir + "/" + name + "/stat")
	if err != nil {
		return Thread{}, err
	}
	id, err := strconv.Atoi(name)
	if err != nil {
		return Thread{}, err
	}
	fields := fieldsAfterName(stat)
	if len(fields) == 0 {
		return Thread{}, fmt.Errorf("malformed stat line %q", stat)
	}
	return Thread{id, fields[0][0]}, nil
}
