// Package fdquota reserves file descriptors of the daemon, so that clients' sessions cannot use up
// all of them.
//
// # Contract
//
// The kernel assigns the lowest free number. The reserve consists of the highest numbers, and a
// session that checks its Quota never keeps a descriptor from it. Everything else may use the
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

// Quota is the range of descriptors that sessions may use.
type Quota struct{ limit, reserve int }

// ForSessions returns the quota for this process's limit of open files, which Go has raised to the
// hard limit.
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

// Allows reports whether a session may keep this descriptor.
func (q Quota) Allows(fd int) bool { return fd < q.limit-q.reserve }

// Check returns nil if a session may open descriptors now, else an error with code
// ResourceExhausted.
func (q Quota) Check() error {
	fd, err := unix.FcntlInt(os.Stderr.Fd(), unix.F_DUPFD_CLOEXEC, 0) // only the number matters
	if err != nil {
		return errdefs.New(codes.ResourceExhausted, "open a file descriptor: %w", err)
	}
	if err := unix.Close(fd); err != nil {
		return fmt.Errorf("close a file descriptor: %w", err)
	}
	if !q.Allows(fd) {
		return errdefs.New(codes.ResourceExhausted, "%d of %d file descriptors are in use, the others are reserved",
			fd, q.limit)
	}
	return nil
}
