package links

import (
	"context"
	"errors"
	"fmt"
	"time"

	"berth/internal/lockfile"
)

// lockPath is the node's lock of bridges' owners. The networks of all daemons and runtimes share
// the lock. A process first locks turnPath and holds it until it has lockPath. So shared holders
// cannot starve a process that waits for exclusive access.
const (
	lockPath = "/run/berth-net.lock"
	turnPath = "/run/berth-net.turn"
)

// lockTimeout bounds Lock. A holder needs only a few system calls. After this time, waiting
// processes report an error, so that they release their other locks.
const lockTimeout = 10 * time.Second

// Lock prevents changes of bridges' owners. Callers that create a port use Shared until the port
// exists, because the port shows the owner. Callers of MakeBridge use Exclusive. After lockTimeout,
// or when ctx ends, Lock returns context.DeadlineExceeded. Lock order: the lock of a network's
// addresses comes first. The kernel releases the lock when the process exits.
func Lock(ctx context.Context, mode lockfile.Mode) (unlock func(), err error) {
	return lockWithin(ctx, mode, lockTimeout)
}

func lockWithin(ctx context.Context, mode lockfile.Mode, timeout time.Duration) (unlock func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	next, err := lockfile.Wait(ctx, turnPath, mode)
	if err != nil {
		return nil, fmt.Errorf("lock bridges by %s: %w", lockPath, err)
	}
	defer next()
	if unlock, err = lockfile.Wait(ctx, lockPath, mode); err != nil {
		return nil, fmt.Errorf("lock bridges: %w", err)
	}
	return unlock, nil
}

// checkTimeout bounds CheckLock. A process that creates a bridge holds the lock exclusively while
// it reads all routes and waits for other network changes.
const checkTimeout = 4 * time.Second

// CheckLock returns the error that Lock would return, or nil. It also fails if another process
// holds the lock exclusively for longer than checkTimeout, or until ctx ends. It takes no lock and
// creates no file.
func CheckLock(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	if err := errors.Join(lockfile.CheckShared(ctx, turnPath), lockfile.CheckShared(ctx, lockPath)); err != nil {
		return fmt.Errorf("lock bridges: %w", err)
	}
	return nil
}
