package sandbox

import (
	"context"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// RuntimeSpec returns what the launcher is, or was, told of a container. Errors: NotFound, else as of launch.Kit.Describe, which
// may have to look at a volume that hangs.
func (m *Manager) RuntimeSpec(ctx context.Context, id string) (*specs.Spec, error) {
	c, err := m.containers.Find(id)
	if err != nil {
		return nil, err
	}
	p, err := m.pods.Find(c.podID)
	if err != nil {
		return nil, err
	}
	info := c.info.Load()
	return m.launch.Describe(ctx, p.described(), m.toLaunch(c, info.Resources, info.Limits), &c.looking)
}
