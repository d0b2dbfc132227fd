package stream

import (
	"context"
	"fmt"
	"sync"
	"time"

	"berth/internal/errdefs"
)

// holds are the containers in which no exec may start, because they are being checkpointed. The
// zero value is ready for use. The lock guards the map. It is held only while the map is used.
type holds struct {
	mu sync.Mutex
	// +checklocks:mu
	held map[string]chan struct{} // closed when the hold ends; by ContainerTarget.String
}

// add holds a container. It returns false if the container is held already.
func (h *holds) add(object string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.held == nil {
		h.held = map[string]chan struct{}{}
	}
	if h.held[object] != nil {
		return false
	}
	h.held[object] = make(chan struct{})
	return true
}

func (h *holds) end(object string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	close(h.held[object])
	delete(h.held, object)
}

// ended returns a channel that is closed when the hold ends, nil if there is no hold.
func (h *holds) ended(object string) <-chan struct{} {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.held[object]
}

// check returns FailedPrecondition for a container that is held.
func (h *holds) check(object string) error {
	if h.ended(object) != nil {
		return errdefs.FailedPrecondition("the container is being checkpointed")
	}
	return nil
}

// takeExec takes the slot of an exec without a client. While the container is held, it waits until
// ctx ends, and takes no slot.
func (s *Service) takeExec(ctx context.Context, c ContainerTarget) (release func(), err error) {
	for {
		release, err := s.execs.take(c.String())
		if err != nil {
			return nil, err
		}
		ended := s.holds.ended(c.String())
		if ended == nil {
			return release, nil
		}
		release()
		if err := s.awaitHold(ctx, c, ended); err != nil {
			return nil, err
		}
	}
}

func (s *Service) awaitHold(ctx context.Context, c ContainerTarget, ended <-chan struct{}) error {
	defer s.tasks.BeginOpen("end of a checkpoint", c.String())()
	select {
	case <-ended:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("exec in container %s, which is being checkpointed: %w", c.ID, context.Cause(ctx))
	}
}

// holdInterval is the time between two checks whether the execs of a held container have ended.
const holdInterval = 5 * time.Millisecond

// Hold keeps execs from starting in a container until release is called. ExecSync waits, and Exec
// and Attach to a terminal fail. It waits for the end of running execs, at most for timeout. The
// error is FailedPrecondition if a running exec does not end, if a terminal is attached, or if the
// container is held already.
func (s *Service) Hold(ctx context.Context, id string, timeout time.Duration) (release func(), err error) {
	c := ContainerTarget{ID: id}
	if !s.holds.add(c.String()) {
		return nil, errdefs.FailedPrecondition("it is being checkpointed already")
	}
	release = sync.OnceFunc(func() { s.holds.end(c.String()) })
	defer s.tasks.BeginUpTo(timeout, "end of execs before a checkpoint", c.String())()
	for deadline := time.Now().Add(timeout); ; {
		switch {
		case s.terminals.count(c.String()) > 0:
			err = errdefs.FailedPrecondition("a client is attached to its terminal")
		case s.execs.count(c.String()) == 0:
			return release, nil
		case time.Now().After(deadline):
			err = errdefs.FailedPrecondition("%d execs in it did not end within %v", s.execs.count(c.String()), timeout)
		}
		if err == nil && ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		if err != nil {
			release()
			return nil, err
		}
		select {
		case <-time.After(holdInterval):
		case <-ctx.Done():
		}
	}
}
