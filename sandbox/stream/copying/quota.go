package copying

import (
	"fmt"
	"math"
	"os"

	"golang.org/x/sys/unix"

	"berth/internal/coded"
)

const (
	minReserve = 64
	maxReserve = 4096
)

// FDQuota is the range of file descriptors that clients' sessions may use. It prevents them from
// using up all of the daemon's descriptors.
//
// The kernel assigns the lowest free number. The highest numbers are reserved for CRI connections,
// the watchdog and the daemon's files. A session that checks its FDQuota never keeps a reserved
// descriptor.
type FDQuota struct{ limit, reserve int }

// NewFDQuota returns the quota for this process's limit of open files. The Go runtime raises that
// limit to the hard limit at start.
func NewFDQuota() (FDQuota, error) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return FDQuota{}, os.NewSyscallError("getrlimit RLIMIT_NOFILE", err)
	}
	return quotaFor(int(min(limit.Cur, math.MaxInt32))), nil
}

func quotaFor(limit int) FDQuota {
	return FDQuota{limit: limit, reserve: min(max(limit/4, minReserve), maxReserve)}
}

// Limit returns the maximum number of descriptors of the process.
func (q FDQuota) Limit() int { return q.limit }

// Allows reports whether a session may keep this descriptor.
func (q FDQuota) Allows(fd int) bool { return fd < q.limit-q.reserve }

// Check returns nil if a session may open descriptors now. Otherwise the error is
// ResourceExhausted.
func (q FDQuota) Check() error {
	fd, err := unix.FcntlInt(os.Stderr.Fd(), unix.F_DUPFD_CLOEXEC, 0) // only the number matters
	if err != nil {
		return coded.Errorf(coded.ResourceExhausted, "open a file descriptor: %w", err)
	}
	if err := unix.Close(fd); err != nil {
		return fmt.Errorf("close a file descriptor: %w", err)
	}
	if !q.Allows(fd) {
		return coded.Errorf(coded.ResourceExhausted, "%d of %d file descriptors are in use, the others are reserved",
			fd, q.limit)
	}
	return nil
}
