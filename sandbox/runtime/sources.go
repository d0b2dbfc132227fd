package runtime

import (
	"context"
	"fmt"
	"os"
	"path"
	"sync"

	"berth/internal/task"
	"berth/oci"
	"berth/sandbox/state"
)

// Sources are what mounts are of: volumes, whose servers may not answer. Who asks such a one is in the kernel for as long as that
// lasts, nothing ends it, and it keeps a thread. So it is done aside, which ends for the caller with its context, and by one at a time: those who
// come later wait without a thread. The lock guards the map and is held for no more.
type Sources struct {
	tasks *task.Runner
	mu    sync.Mutex
	busy  map[string]chan struct{} // closed when who is at it has ended
}

// NewSources returns sources at which nobody looks.
func NewSources(tasks *task.Runner) *Sources {
	return &Sources{tasks: tasks, busy: map[string]chan struct{}{}}
}

// alone does something with a source when nobody else does the same. When ctx ends, which is the error, it goes on
// without the caller if it has begun, and is not begun.
func (s *Sources) alone(ctx context.Context, what, source string, op func() error) error {
	end, err := s.begin(ctx, what, source)
	if err != nil {
		return err
	}
	return s.tasks.DetachStep(ctx, task.Limit, what, source, func() error { // not begun only if no operation is to go on
		defer end()
		defer s.tasks.Begin("it to answer", "volume "+source)()
		return op()
	})
}

func (s *Sources) begin(ctx context.Context, what, source string) (end func(), err error) {
	key := what + " " + source
	for {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("%s %s: %w", what, source, err)
		}
		other := s.enter(key)
		if other == nil {
			return func() { s.leave(key) }, nil
		}
		if err := s.await(ctx, other, source); err != nil {
			return nil, fmt.Errorf("%s %s: an earlier try hangs: %w", what, source, err)
		}
	}
}

func (s *Sources) await(ctx context.Context, other chan struct{}, source string) error {
	defer s.tasks.Begin("somebody else to be told by it", "volume "+source)()
	select {
	case <-other:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// enter returns nil if nobody was there, and else what is closed when they leave.
func (s *Sources) enter(key string) (other chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if other = s.busy[key]; other == nil {
		s.busy[key] = make(chan struct{})
	}
	return other
}

func (s *Sources) leave(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.busy[key])
	delete(s.busy, key)
}

// detached runs op, which may hang with a volume of the container, after each volume has answered. A dead volume holds one
// thread, however many containers mount it. When ctx ends, detached returns its error and op goes on.
func (k Launcher) detached(ctx context.Context, c *state.Container, what string, op func() error) error {
	object := "container " + c.ID
	defer k.Tasks.Begin("its volumes to answer", object)()
	for _, m := range c.Config.GetMounts() {
		source := m.GetHostPath()
		if oci.IsImageVolume(m) || !path.IsAbs(source) {
			continue
		}
		err := k.Sources.alone(ctx, "look at", source, func() error {
			_, _ = os.Stat(source) // what it answers is the affair of who looks at it closely
			return nil
		})
		if err != nil {
			return fmt.Errorf("mount of %s: %w", m.GetContainerPath(), err)
		}
	}
	return k.Tasks.DetachStep(ctx, task.Limit, what, object, op)
}
