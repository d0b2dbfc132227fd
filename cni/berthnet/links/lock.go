package links

import (
	"context"
	"fmt"

	"berth/internal/lockfile"
)

// lockPath is the lock of whose bridges are, on the node: networks of all daemons and runtimes have it in common, wherever their addresses are kept. Who wants
// it has that of turnPath first, until he has it: so one that wants it for himself is not passed by any number of others, who would share it for ever.
const (
	lockPath = "/run/berth-net.lock"
	turnPath = "/run/berth-net.turn"
)

// Lock keeps bridges from changing hands, or ctx ends: Shared for who relies on whose they are, as long as the port that says so is being
// made; Exclusive for who calls MakeBridge. It is waited for after the lock of a network's addresses, never before. It is free when its owner has died, too.
func Lock(ctx context.Context, mode lockfile.Mode) (unlock func(), err error) {
	next, err := lockfile.Wait(ctx, turnPath, mode)
	if err != nil {
		return nil, fmt.Errorf("lock bridges: %w", err)
	}
	defer next()
	if unlock, err = lockfile.Wait(ctx, lockPath, mode); err != nil {
		return nil, fmt.Errorf("lock bridges: %w", err)
	}
	return unlock, nil
}
