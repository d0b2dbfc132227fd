package links

import (
	"context"
	"fmt"

	"berth/internal/lockfile"
)

// lockPath is the lock of whose bridges are, on the node: networks of all daemons and runtimes have it in common, wherever their addresses are kept.
const lockPath = "/run/berth-net.lock"

// Lock keeps bridges from changing hands, or ctx ends: Shared for who relies on whose they are, as long as the port that says so is being
// made; MakeBridge has it for itself. It is waited for after the lock of a network's addresses, never before. It is free when its owner has died, too.
func Lock(ctx context.Context, mode lockfile.Mode) (unlock func(), err error) {
	unlock, err = lockfile.Wait(ctx, lockPath, mode)
	if err != nil {
		return nil, fmt.Errorf("lock bridges: %w", err)
	}
	return unlock, nil
}
