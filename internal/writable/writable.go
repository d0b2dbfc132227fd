// Package writable watches whether directories can be written to.
//
// # Contract
//
// A Watch tries from time to time to change a directory's time of modification, which needs no room but
// fails on a filesystem that is read-only, was made so by the kernel after an error, or was shut down. Err answers
// from memory, also while a try hangs on a disk that does not answer.
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
	// period is the pause between two tries.
	period = 10 * time.Second
	// patience is how long a disk may take to answer.
	patience = time.Minute
)

// Watch watches directories. Its zero value knows of no trouble.
type Watch struct {
	trouble atomic.Pointer[error]     // nil: none
	trying  atomic.Pointer[time.Time] // since when; nil: at the moment it does not try
}

// Try looks now.
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

// Run tries until ctx ends.
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

// Err tells which directory cannot be written to, or nil.
func (w *Watch) Err() error {
	if since := w.trying.Load(); since != nil && time.Since(*since) > patience {
		return fmt.Errorf("a filesystem does not answer for %v", time.Since(*since).Round(time.Second))
	}
	if err := w.trouble.Load(); err != nil {
		return *err
	}
	return nil
}

// try changes dir's time of modification. A lack of room, which some filesystems have even for that, is none
// of our business: room can be made.
func try(dir string) error {
	now := unix.Timespec{Nsec: unix.UTIME_NOW}
	err := unix.UtimesNanoAt(unix.AT_FDCWD, dir, []unix.Timespec{now, now}, 0)
	for _, passing := range []error{unix.ENOSPC, unix.EDQUOT, unix.ENOMEM, unix.EINTR} {
		if errors.Is(err, passing) {
			return nil
		}
	}
	if err != nil {
		return fmt.Errorf("%s cannot be written to: %w", dir, err)
	}
	return nil
}
