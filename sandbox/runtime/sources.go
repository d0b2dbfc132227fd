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

// Sources serializes access to mount sources. A stat of a volume whose server does not answer
// blocks in the kernel and holds a thread. Callers wait without a thread, and each leaves with its
// context. The lock guards the map.
type Sources struct {
	tasks *task.Runner
	mu    sync.Mutex
	busy  map[string]chan struct{} // closed when the current access ends
}

// NewSources returns an idle Sources.
func NewSources(tasks *task.Runner) *Sources {
	return &Sources{tasks: tasks, busy: map[string]chan struct{}{}}
}

// alone runs op when no other call does the same with the source. It returns ctx's error when ctx
// ends. A running op continues then; a waiting one is not started.
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

// enter returns nil if the source is free, else the channel that is closed when it becomes free.
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

// detached runs op, which may hang with a volume of the container, after each volume has answered.
// A dead volume holds one thread, however many containers mount it. When ctx ends, detached returns
// its error and op goes on.
func (k Launcher) detached(ctx context.Context, c *state.Container, what string, op func() error) error {
	object := "container " + c.ID
	defer k.Tasks.Begin("its volumes to answer", object)()
	for _, m := range c.Config.GetMounts() {
		source := m.GetHostPath()
		if oci.IsImageVolume(m) || !path.IsAbs(source) {
			continue
		}
		err := k.Sources.alone(ctx, "look at", source, func() error {
			_, _ = os.Stat(source) // a later step reports the error
			return nil
		})
		if err != nil {
			return fmt.Errorf("mount of %s: %w", m.GetContainerPath(), err)
		}
	}
	return k.Tasks.DetachStep(ctx, task.Limit, what, object, op)
}
