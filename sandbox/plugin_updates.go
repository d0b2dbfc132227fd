package sandbox

import (
	"context"
	"fmt"
	"time"

	"berth/internal/errdefs"
	"berth/internal/nri"
)

// evictionGrace is the grace period of a container that a plugin evicts. It is Kubernetes' default
// for pods.
const evictionGrace = 30 * time.Second

// updateTimeout limits how long a plugin's update waits for the container's lock.
const updateTimeout = 10 * time.Second

// Start accepts registrations and requests of plugins.
func (s pluginCaller) Start(ctx context.Context) error {
	return s.Plugins.Start(ctx, pluginRequests{s})
}

// pluginRequests implements nri.Runtime for requests that plugins send at any time.
type pluginRequests struct{ caller pluginCaller }

// Objects implements nri.Runtime.
func (r pluginRequests) Objects() ([]*nri.Pod, []*nri.Container) { return r.caller.Target.Objects() }

// Update implements nri.Runtime. If the update has the container's lock when ctx ends, it completes
// and the plugin gets its result.
func (r pluginRequests) Update(ctx context.Context, u nri.Update) error {
	return r.caller.Tasks.Detach(context.WithoutCancel(ctx), updateTimeout, "update for a plugin",
		"container "+u.ContainerID,
		func(operation context.Context) error {
			turn, cancel := context.WithCancel(operation)
			defer cancel()
			defer context.AfterFunc(ctx, cancel)()
			return r.caller.update(turn, u)
		})
}

// UpdateOthers applies the updates of other containers that belong to the creation of a container.
// The first error of a mandatory update fails the creation.
func (s pluginCaller) UpdateOthers(ctx context.Context, others []nri.Update) error {
	for _, u := range others {
		err := s.update(ctx, u)
		if err != nil && !u.IgnoreFailure {
			return fmt.Errorf("apply update of NRI plugin to container %s: %w", u.ContainerID, err)
		}
		if err != nil {
			s.Log.Warn("apply update of NRI plugin", "container", u.ContainerID, "error", err)
		}
	}
	return nil
}

// UpdateLater applies updates in the background, because a holder of a needed lock may wait for a
// lock of the caller.
func (s pluginCaller) UpdateLater(updates []nri.Update) {
	if len(updates) == 0 {
		return
	}
	s.Tasks.Operations.Spawn(func() {
		for _, u := range updates {
			err := s.Tasks.Guard("update", "container "+u.ContainerID, func() error {
				return s.update(s.Tasks.Operations.Context(), u)
			})
			if err != nil {
				s.Log.Warn("apply update of NRI plugin", "container", u.ContainerID, "error", err)
			}
		}
	}) // otherwise the daemon is shutting down, and the next daemon sends plugins the state again
}

// update changes a container's limits or evicts it.
func (s pluginCaller) update(ctx context.Context, u nri.Update) error {
	if u.Evict {
		return s.evictLater(u.ContainerID, u.Reason)
	}
	ctx, cancel := context.WithTimeout(ctx, updateTimeout)
	defer cancel()
	return s.Target.Update(ctx, u)
}

// evictLater stops a container in the background. The stop takes a lock that the caller may hold,
// and lasts as long as the grace period.
func (s pluginCaller) evictLater(id, reason string) error {
	if err := s.Target.CheckContainer(id); err != nil {
		return err
	}
	s.Log.Info("NRI plugin evicts container", "container", id, "reason", reason)
	spawned := s.Tasks.Operations.Spawn(func() {
		if err := s.Target.StopContainer(s.Tasks.Operations.Context(), id, evictionGrace); err != nil {
			s.Log.Warn("evict container for NRI plugin", "container", id, "error", err)
		}
	})
	if !spawned {
		return errdefs.Unavailable("evict container %s: berth is stopping", id)
	}
	return nil
}
