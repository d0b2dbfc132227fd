package links

import (
	"context"
	"errors"
	"fmt"
	"time"

	"berth/internal/lockfile"
)

// lockPath is the lock of whose bridges are, on the node: networks of all daemons and runtimes have it in common, wherever their addresses are kept. Who wants
// it has that of turnPath first, until he has it: so one that wants it for himself is not passed by any number of others, who would share it for ever.
const (
	lockPath = "/run/berth-net.lock"
	turnPath = "/run/berth-net.turn"
)

// lockPatience is how long Lock waits: of a network's that has it and is stuck, others shall say so instead of waiting with locks of their own. Who has
// it calls the kernel a few times.
const lockPatience = 10 * time.Second

// Lock keeps bridges from changing hands, or fails when ctx ends, or after lockPatience, with context.DeadlineExceeded: Shared for who relies on whose they are,
// as long as the port that says so is being made; Exclusive for who calls MakeBridge. It is waited for after the lock of a network's addresses, never before.
// It is free when its owner has died, too.
func Lock(ctx context.Context, mode lockfile.Mode) (unlock func(), err error) {
	return lockWithin(ctx, mode, lockPatience)
}

func lockWithin(ctx context.Context, mode lockfile.Mode, patience time.Duration) (unlock func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
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

// checkPatience is how long CheckLock waits. Who makes a bridge has the lock for himself while he reads all routes and while the kernel is busy with other
// changes of the network; who waits for it has the turn.
const checkPatience = 4 * time.Second

// CheckLock tells why Lock would fail, or nil; also if somebody has the lock for himself for longer than checkPatience, or until ctx ends. It takes and makes nothing.
func CheckLock(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, checkPatience)
	defer cancel()
	if err := errors.Join(lockfile.CheckShared(ctx, turnPath), lockfile.CheckShared(ctx, lockPath)); err != nil {
		return fmt.Errorf("lock bridges: %w", err)
	}
	return nil
}
