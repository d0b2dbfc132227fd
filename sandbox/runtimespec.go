package sandbox

import (
	"context"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"berth/internal/errdefs"
)

// specLimit is how long the description of a container may take, for which the sources of its mounts are looked at.
const specLimit = 2 * time.Second

// RuntimeSpec returns what the launcher is, or was, told of a container. It looks at the sources of the container's mounts, and so may
// meet a volume that hangs (NFS without its server): who asks waits for two seconds at most, and one looks at a time. Errors:
// NotFound, DeadlineExceeded, Unavailable while an earlier look hangs, else what became of a source.
func (m *Manager) RuntimeSpec(ctx context.Context, id string) (*specs.Spec, error) {
	c, err := m.containers.Find(id)
	if err != nil {
		return nil, err
	}
	p, err := m.pods.Find(c.podID)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, specLimit)
	defer cancel()
	info := c.info.Load()
	return m.lookAt(ctx, c, func() (*specs.Spec, error) {
		return m.launch.Spec(p.described(), m.toLaunch(c, info.Resources, info.Limits))
	})
}

// lookAt does what may hang, and waits for it until ctx ends.
func (m *Manager) lookAt(ctx context.Context, c *container, look func() (*specs.Spec, error)) (*specs.Spec, error) {
	if !c.looking.CompareAndSwap(false, true) {
		return nil, errdefs.Unavailable("describe container %s: somebody looks at its mounts", c.id)
	}
	found := make(chan *specs.Spec, 1)
	err := m.tasks.Detach(ctx, specLimit, "describe", c.String(), func(context.Context) error {
		defer c.looking.Store(false)
		spec, err := look()
		found <- spec
		return err
	})
	if err != nil {
		return nil, err
	}
	return <-found, nil
}
