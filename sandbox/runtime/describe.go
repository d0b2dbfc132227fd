package runtime

import (
	"context"
	"sync/atomic"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"berth/internal/errdefs"
	"berth/sandbox/state"
)

// describeTimeout bounds the inspection of mount sources for a description.
const describeTimeout = 2 * time.Second

// Describe returns the same runtime-spec as Spec, for display. It inspects mount sources, and may
// block on a hanging volume, for example on NFS if the server is down. A caller therefore waits at
// most two seconds, and only one inspection of a container runs at a time. Errors:
// DeadlineExceeded. Unavailable while an earlier inspection hangs. Otherwise the error of a source.
func (k Launcher) Describe(ctx context.Context, pod *state.Pod, c *state.Container, targetPIDNS func() (string, error),
	describing *atomic.Bool) (*specs.Spec, error) {
	ctx, cancel := context.WithTimeout(ctx, describeTimeout)
	defer cancel()
	return k.describeOnce(ctx, c.ID, describing, func() (*specs.Spec, error) {
		return k.describe(ctx, pod, c, targetPIDNS)
	})
}

// describeOnce runs describe, which may hang, and waits for it until ctx ends.
func (k Launcher) describeOnce(ctx context.Context, id string, describing *atomic.Bool,
	describe func() (*specs.Spec, error)) (*specs.Spec, error) {
	if !describing.CompareAndSwap(false, true) {
		return nil, errdefs.Unavailable("describe container %s: an earlier inspection of its mounts has not finished", id)
	}
	found := make(chan *specs.Spec, 1)
	err := k.Tasks.Detach(ctx, describeTimeout, "describe", "container "+id, func(context.Context) error {
		defer describing.Store(false)
		spec, err := describe()
		found <- spec
		return err
	})
	if err != nil {
		return nil, err
	}
	return <-found, nil
}
