package subject

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"
)

// event is a kind of event that the kernel counts (perf_event_open(2)).
type event struct {
	kind   uint32
	config uint64
}

var instructions = event{unix.PERF_TYPE_HARDWARE, unix.PERF_COUNT_HW_INSTRUCTIONS}

// counters count an event in the threads of some processes and in all threads and processes that
// these start later.
type counters struct {
	pid  int // the daemon
	open []*os.File
}

// Instructions returns the number of instructions that the runtime and its pods have executed since
// the first call, in user space and in the kernel. ok is false if the machine does not count them.
func (s *Subject) Instructions() (n uint64, ok bool, err error) {
	if s.counters == nil || s.counters.pid != s.Pid {
		if err := s.counters.close(); err != nil {
			return 0, false, err
		}
		all, err := processes()
		if err != nil {
			return 0, false, err
		}
		var pids []int
		for pid := range all {
			if descends(all, pid, s.Pid) {
				pids = append(pids, pid)
			}
		}
		s.counters, err = count(instructions, pids...)
		if err != nil {
			return 0, false, err
		}
		s.counters.pid = s.Pid
	}
	if len(s.counters.open) == 0 {
		return 0, false, nil
	}
	n, err = s.counters.read()
	return n, true, err
}

// count begins to count. Without hardware for the event there are no counters.
func count(e event, pids ...int) (c *counters, err error) {
	c = &counters{}
	for _, pid := range pids {
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
		if err != nil {
			return nil, err
		}
		for _, path := range threads {
			tid, err := strconv.Atoi(filepath.Base(path))
			if err != nil {
				return nil, err
			}
			attr := unix.PerfEventAttr{Type: e.kind, Config: e.config, Bits: unix.PerfBitInherit}
			attr.Size = uint32(unsafe.Sizeof(attr))
			fd, err := unix.PerfEventOpen(&attr, tid, -1, -1, unix.PERF_FLAG_FD_CLOEXEC)
			switch {
			case errors.Is(err, unix.ESRCH): // it has ended
			case errors.Is(err, unix.ENOENT), errors.Is(err, unix.EOPNOTSUPP):
				return c, c.close()
			case err != nil:
				return nil, errors.Join(fmt.Errorf("count events of thread %d: %w", tid, err), c.close())
			default:
				c.open = append(c.open, os.NewFile(uintptr(fd), "counter"))
			}
		}
	}
	return c, nil
}

// read returns the sum.
func (c *counters) read() (sum uint64, err error) {
	for _, f := range c.open {
		var value [8]byte
		if _, err := f.Read(value[:]); err != nil {
			return 0, fmt.Errorf("read counter: %w", err)
		}
		sum += binary.NativeEndian.Uint64(value[:])
	}
	return sum, nil
}

func (c *counters) close() (err error) {
	if c == nil {
		return nil
	}
	for _, f := range c.open {
		err = errors.Join(err, f.Close())
	}
	c.open = nil
	return err
}
