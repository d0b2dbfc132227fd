package runtime

import (
	"context"
	"fmt"
	"os"
	"path"
	"sync"

	specs "github.com/opencontainers/runtime-spec/specs-go"

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
	// +checklocks:mu
	busy map[string]chan struct{} // closed when the current access ends
}

// NewSources returns an idle Sources.
func NewSources(tasks *task.Runner) *Sources {
	return &Sources{tasks: tasks, busy: map[string]chan struct{}{}}
}

// exclusive runs op while no other call runs the same operation on the source. When ctx ends, it
// returns ctx's error. A running op then continues, and a waiting op is not started.
func (s *Sources) exclusive(ctx context.Context, what, source string, op func() error) error {
	end, err := s.begin(ctx, what, source)
	if err != nil {
		return err
	}
	return s.tasks.DetachStep(ctx, task.Timeout, what, source, func() error { // it fails only after the daemon's shutdown
		defer end()
		defer s.tasks.Begin("answer", "volume "+source)()
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
			return nil, fmt.Errorf("%s %s: an earlier access hangs: %w", what, source, err)
		}
	}
}

func (s *Sources) await(ctx context.Context, other chan struct{}, source string) error {
	defer s.tasks.Begin("concurrent access", "volume "+source)()
	select {
	case <-other:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// enter returns nil if the source is free. Otherwise it returns the channel that is closed when the
// source becomes free.
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

// detached runs op, which may block on a hanging volume, after each volume of the container has
// answered. A dead volume blocks only one thread, even if many containers mount it. When ctx ends,
// detached returns ctx's error and op continues.
func (k Launcher) detached(ctx context.Context, c *state.Container, what string, op func() error) error {
	if err := k.awaitVolumes(ctx, c); err != nil {
		return err
	}
	return k.Tasks.DetachStep(ctx, task.Timeout, what, c.String(), op)
}

// awaitVolumes returns when each volume of the container has answered, or with ctx's error.
func (k Launcher) awaitVolumes(ctx context.Context, c *state.Container) error {
	defer k.Tasks.Begin("answer of volumes", c.String())()
	for _, m := range c.Config.GetMounts() {
		source := m.GetHostPath()
		if oci.IsImageVolume(m) || !path.IsAbs(source) {
			continue
		}
		err := k.Sources.exclusive(ctx, "inspect", source, func() error {
			_, _ = os.Stat(source) // a later step reports the error
			return nil
		})
		if err != nil {
			return fmt.Errorf("mount of %s: %w", m.GetContainerPath(), err)
		}
	}
	return nil
}

// launchSpec returns the planned runtime-spec, or builds it if it is nil. It first waits until all
// volumes have answered, so that no dead volume blocks the launcher. It also loads the default
// AppArmor profile.
func (k Launcher) launchSpec(
	ctx context.Context, pod *state.Pod, c *state.Container, planned *specs.Spec, targetPIDNS func() (string, error),
) (*specs.Spec, error) {
	if planned == nil {
		return k.RuntimeSpec(ctx, pod, c, targetPIDNS)
	}
	k.AppArmor.Ensure(ctx)
	return planned, k.awaitVolumes(ctx, c)
}
