package runtime

import (
	"context"
	"sync/atomic"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"berth/internal/errdefs"
	"berth/sandbox/state"
)

// lookLimit bounds the inspection of mount sources for a description.
const lookLimit = 2 * time.Second

// Describe returns the same runtime-spec as Spec, for display. It inspects mount sources and may
// meet a hanging volume, such as NFS without its server. So a caller waits two seconds at most, and
// looking admits one inspection of a container at a time. Errors: DeadlineExceeded; Unavailable
// while an earlier inspection hangs; else the error of a source.
func (k Launcher) Describe(ctx context.Context, pod *state.Pod, c *state.Container, targetPIDNS func() (string, error),
	looking *atomic.Bool) (*specs.Spec, error) {
	ctx, cancel := context.WithTimeout(ctx, lookLimit)
	defer cancel()
	return k.lookAt(ctx, c.ID, looking, func() (*specs.Spec, error) { return k.describe(pod, c, targetPIDNS) })
}

// lookAt does what may hang, and waits for it until ctx ends.
func (k Launcher) lookAt(ctx context.Context, id string, looking *atomic.Bool,
	look func() (*specs.Spec, error)) (*specs.Spec, error) {
	if !looking.CompareAndSwap(false, true) {
		return nil, errdefs.Unavailable("describe container %s: somebody looks at its mounts", id)
	}
	found := make(chan *specs.Spec, 1)
	err := k.Tasks.Detach(ctx, lookLimit, "describe", "container "+id, func(context.Context) error {
		defer looking.Store(false)
		spec, err := look()
		found <- spec
		return err
	})
	if err != nil {
		return nil, err
	}
	return <-found, nil
}
