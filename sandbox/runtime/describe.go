package runtime

import (
	"context"
	"sync/atomic"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"berth/internal/errdefs"
	"berth/sandbox/state"
)

// lookLimit is how long the description of a container may take, for which the sources of its mounts are looked at.
const lookLimit = 2 * time.Second

// Describe is Spec for those who only want to see it. It looks at the sources of the container's mounts, and so may
// meet a volume that hangs (NFS without its server): who asks waits for two seconds at most, and one looks at a time, which
// looking, the container's own, tells. Errors: DeadlineExceeded, Unavailable while an earlier look hangs, else what became of a source.
func (k Launcher) Describe(ctx context.Context, pod *state.Pod, c *state.Container, targetPIDNS string,
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
