package sandbox

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// writablePeriod is the time between two probes.
	writablePeriod = 10 * time.Second
	// writableTimeout is how long a disk may take to respond.
	writableTimeout = time.Minute
)

// writableWatch checks whether directories are writable. It periodically changes their modification
// times. This needs no free space. It fails if the filesystem is read-only, if the kernel has made
// it read-only after an error, or if it was shut down. Err answers from memory, even while a probe
// hangs on a disk that does not respond. The zero value is ready for use and reports no error.
type writableWatch struct {
	failure atomic.Pointer[error]     // nil: the last probe succeeded
	trying  atomic.Pointer[time.Time] // start of the running probe; nil: no probe runs
}

// Try probes the directories once.
func (w *writableWatch) Try(dirs ...string) {
	now := time.Now()
	w.trying.Store(&now)
	var errs []error
	for _, dir := range dirs {
		errs = append(errs, tryWrite(dir))
	}
	w.trying.Store(nil)
	if err := errors.Join(errs...); err != nil {
		w.failure.Store(&err)
		return
	}
	w.failure.Store(nil)
}

// Run probes periodically until ctx ends.
func (w *writableWatch) Run(ctx context.Context, dirs ...string) {
	tick := time.NewTicker(writablePeriod)
	defer tick.Stop()
	for {
		w.Try(dirs...)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// Err returns the error of the last probe, which names the directory, or nil.
func (w *writableWatch) Err() error {
	if since := w.trying.Load(); since != nil && time.Since(*since) > writableTimeout {
		return fmt.Errorf("a filesystem has not responded for %v", time.Since(*since).Round(time.Second))
	}
	if err := w.failure.Load(); err != nil {
		return *err
	}
	return nil
}

// tryWrite changes dir's modification time. It ignores a lack of space, because space can be freed.
// Some filesystems need space even for this change.
func tryWrite(dir string) error {
	now := unix.Timespec{Nsec: unix.UTIME_NOW}
	err := unix.UtimesNanoAt(unix.AT_FDCWD, dir, []unix.Timespec{now, now}, 0)
	for _, passing := range []error{unix.ENOSPC, unix.EDQUOT, unix.ENOMEM, unix.EINTR} {
		if errors.Is(err, passing) {
			return nil
		}
	}
	if err != nil {
		return fmt.Errorf("%s is not writable: %w", dir, err)
	}
	return nil
}
