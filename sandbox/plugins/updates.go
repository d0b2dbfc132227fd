package plugins

import (
	"context"
	"fmt"
	"time"

	"berth/internal/errdefs"
	"berth/internal/nri"
)

// evictionGrace is how long a container that a plugin evicts has to end by itself: what Kubernetes gives pods that say nothing.
const evictionGrace = 30 * time.Second

// updateLimit is how long an update that a plugin asked for waits for its container's turn.
const updateLimit = 10 * time.Second

// Start makes plugins known to the runtime, and it to them.
func (k Kit) Start(ctx context.Context) error { return k.Plugins.Start(ctx, requests{k}) }

// requests is what plugins may ask for of themselves.
type requests struct{ k Kit }

// Objects implements nri.Runtime.
func (r requests) Objects() ([]*nri.Pod, []*nri.Container) { return r.k.Runtime.Objects() }

// Update implements nri.Runtime. An update that has its turn when ctx ends is waited for: the plugin is told what became of it.
func (r requests) Update(ctx context.Context, u nri.Update) error {
	return r.k.Tasks.Detach(context.WithoutCancel(ctx), updateLimit, "update for a plugin", "container "+u.ContainerID,
		func(operation context.Context) error {
			turn, cancel := context.WithCancel(operation)
			defer cancel()
			defer context.AfterFunc(ctx, cancel)()
			return r.k.update(turn, u)
		})
}

// UpdateWith makes the updates of others that belong to the creation of a container. The first that fails, and may
// not, fails the creation.
func (k Kit) UpdateWith(ctx context.Context, others []nri.Update) error {
	for _, u := range others {
		err := k.update(ctx, u)
		if err != nil && !u.IgnoreFailure {
			return fmt.Errorf("update container %s for an NRI plugin: %w", u.ContainerID, err)
		}
		if err != nil {
			k.Log.Warn("update for an NRI plugin", "container", u.ContainerID, "error", err)
		}
	}
	return nil
}

// UpdateLater updates containers when the caller has passed on its turn: whose turn the updates
// need may wait for the caller's.
func (k Kit) UpdateLater(updates []nri.Update) {
	if len(updates) == 0 {
		return
	}
	k.Tasks.Operations.Spawn(func() {
		for _, u := range updates {
			err := k.Tasks.Guard("update", "container "+u.ContainerID, func() error {
				return k.update(k.Tasks.Operations.Context(), u)
			})
			if err != nil {
				k.Log.Warn("update for an NRI plugin", "container", u.ContainerID, "error", err)
			}
		}
	}) // else the daemon is ending: plugins are told of everything anew by the next one
}

// update changes a container's limits, or evicts it.
func (k Kit) update(ctx context.Context, u nri.Update) error {
	if u.Evict {
		return k.evictLater(u.ContainerID, u.Reason)
	}
	ctx, cancel := context.WithTimeout(ctx, updateLimit)
	defer cancel()
	return k.Runtime.Update(ctx, u)
}

// evictLater stops a container. Nobody waits for that: it takes the turn that the caller may have, and as long
// as the container wants.
func (k Kit) evictLater(id, reason string) error {
	if err := k.Runtime.CheckContainer(id); err != nil {
		return err
	}
	k.Log.Info("an NRI plugin evicts a container", "container", id, "reason", reason)
	spawned := k.Tasks.Operations.Spawn(func() {
		if err := k.Runtime.StopContainer(k.Tasks.Operations.Context(), id, evictionGrace); err != nil {
			k.Log.Warn("evict for an NRI plugin", "container", id, "error", err)
		}
	})
	if !spawned {
		return errdefs.Unavailable("evict container %s: berth is stopping", id)
	}
	return nil
}
