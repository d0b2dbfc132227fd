// Package descriptors keeps file descriptors of the daemon free of what its clients' sessions open.
//
// # Contract
//
// The kernel gives out the lowest number that is free. So nothing that asks Quota opens a
// descriptor of the reserve, whose numbers are the highest, and what does not ask it has the
// reserve: CRI connections, the watchdog, the daemon's own files.
package fdquota

import (
	"fmt"
	"math"
	"os"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
)

const (
	minReserve = 64
	maxReserve = 4096
)

// Quota is which descriptors sessions may have.
type Quota struct{ limit, reserve int }

// ForSessions returns the quota of a process with this one's limit of open files. Go has raised
// that to the hard limit.
func ForSessions() (Quota, error) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return Quota{}, os.NewSyscallError("getrlimit RLIMIT_NOFILE", err)
	}
	return forLimit(int(min(limit.Cur, math.MaxInt32))), nil
}

func forLimit(limit int) Quota {
	return Quota{limit: limit, reserve: min(max(limit/4, minReserve), maxReserve)}
}

// Limit returns how many descriptors the process may have.
func (q Quota) Limit() int { return q.limit }

// Allows reports whether a session may have this descriptor, which has been opened for it.
func (q Quota) Allows(fd int) bool { return fd < q.limit-q.reserve }

// Check returns nil if a session may open descriptors now, else ResourceExhausted.
func (q Quota) Check() error {
	fd, err := unix.FcntlInt(os.Stderr.Fd(), unix.F_DUPFD_CLOEXEC, 0) // the number is what is looked at
	if err != nil {
		return errdefs.New(codes.ResourceExhausted, "open a file descriptor: %w", err)
	}
	if err := unix.Close(fd); err != nil {
		return fmt.Errorf("close a file descriptor: %w", err)
	}
	if !q.Allows(fd) {
		return errdefs.New(codes.ResourceExhausted, "%d of %d file descriptors are in use, the others are reserved", fd, q.limit)
	}
	return nil
}
