// Package writable monitors whether directories are writable.
//
// # Contract
//
// A Watch periodically changes a directory's modification time. This needs no free space, but fails
// on a filesystem that is read-only, that the kernel made read-only after an error, or that was
// shut down. Err answers from memory, also while a probe hangs on a disk that does not respond.
package writable

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// period is the time between two probes.
	period = 10 * time.Second
	// patience is how long a disk may take to respond.
	patience = time.Minute
)

// Watch monitors directories. The zero value is ready for use and reports no error.
type Watch struct {
	trouble atomic.Pointer[error]     // nil: none
	trying  atomic.Pointer[time.Time] // start of the running probe; nil: none
}

// Try probes once.
func (w *Watch) Try(dirs ...string) {
	now := time.Now()
	w.trying.Store(&now)
	var errs []error
	for _, dir := range dirs {
		errs = append(errs, try(dir))
	}
	w.trying.Store(nil)
	if err := errors.Join(errs...); err != nil {
		w.trouble.Store(&err)
		return
	}
	w.trouble.Store(nil)
}

// Run probes periodically until ctx ends.
func (w *Watch) Run(ctx context.Context, dirs ...string) {
	tick := time.NewTicker(period)
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
func (w *Watch) Err() error {
	if since := w.trying.Load(); since != nil && time.Since(*since) > patience {
		return fmt.Errorf("a filesystem has not responded for %v", time.Since(*since).Round(time.Second))
	}
	if err := w.trouble.Load(); err != nil {
		return *err
	}
	return nil
}

// try changes dir's modification time. It ignores a lack of space, which some filesystems report
// even for that, because space can be freed.
func try(dir string) error {
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
