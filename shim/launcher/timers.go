package launcher

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
)

// rearmTimers arms again those periodic timerfds of a restored process that had expired while the
// process was frozen. For such a timer the kernel reports 0 as the time until its next expiry, so
// CRIU 4.2.1 restores it disarmed.
func rearmTimers(pid int) error {
	infos, err := filepath.Glob(fmt.Sprintf("/proc/%d/fdinfo/*", pid))
	if err != nil {
		return err
	}
	for _, path := range infos {
		data, err := os.ReadFile(path)
		if errors.Is(err, os.ErrNotExist) {
			continue // the descriptor was closed, which a process that CRIU holds cannot do
		}
		if err != nil {
			return err
		}
		t, ok := parseTimer(string(data))
		if !ok || !t.stalled() {
			continue
		}
		fd, err := strconv.Atoi(filepath.Base(path))
		if err != nil {
			return err
		}
		if err := t.rearm(pid, fd); err != nil {
			return fmt.Errorf("arm timer %d of process %d: %w", fd, pid, err)
		}
	}
	return nil
}

// timer is the state of a timerfd.
type timer struct {
	ticks           uint64        // expirations that were not read
	value, interval time.Duration // time until the next expiration, and between two expirations; 0: none
}

// stalled returns whether a periodic timer has expired and does not run. A timer that its process
// has disarmed has no ticks.
func (t timer) stalled() bool { return t.ticks > 0 && t.value == 0 && t.interval > 0 }

// parseTimer parses /proc/PID/fdinfo/FD. It returns false for other files than timerfds.
func parseTimer(fdinfo string) (t timer, ok bool) {
	found := 0
	for line := range strings.Lines(fdinfo) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
		var seconds, nanoseconds int64
		switch name {
		case "ticks":
			ticks, err := strconv.ParseUint(value, 10, 64)
			if err != nil {
				return t, false
			}
			t.ticks = ticks
		case "it_value", "it_interval":
			if _, err := fmt.Sscanf(value, "(%d, %d)", &seconds, &nanoseconds); err != nil {
				return t, false
			}
			at := &t.value
			if name == "it_interval" {
				at = &t.interval
			}
			*at = time.Duration(seconds)*time.Second + time.Duration(nanoseconds)
		default:
			continue
		}
		found++
	}
	return t, found == 3
}

// setTicks is the ioctl that sets the expirations that were not read (TFD_IOC_SET_TICKS).
const setTicks = 0x40085400

// rearm lets the timer expire after an interval, and keeps its ticks.
func (t timer) rearm(pid, fd int) (err error) {
	process, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return os.NewSyscallError("pidfd_open", err)
	}
	defer unix.Close(process)
	file, err := unix.PidfdGetfd(process, fd, 0)
	if err != nil {
		return os.NewSyscallError("pidfd_getfd", err)
	}
	defer unix.Close(file)
	interval := unix.NsecToTimespec(int64(t.interval))
	next := &unix.ItimerSpec{Interval: interval, Value: interval}
	failpoint.Reach("launcher.rearm-timer")
	err = errors.Join(
		os.NewSyscallError("timerfd_settime", unix.TimerfdSettime(file, 0, next, nil)),
		os.NewSyscallError("ioctl(TFD_IOC_SET_TICKS)", setTimerTicks(file, t.ticks)))
	failpoint.Reach("launcher.timer-rearmed")
	return err
}

func setTimerTicks(file int, ticks uint64) error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(file), setTicks, uintptr(unsafe.Pointer(&ticks)))
	if errno != 0 {
		return errno
	}
	return nil
}
