package sandbox

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/nri"
	"berth/sandbox/limits"
	"berth/sandbox/state"
)

// updateResources makes an update as plugins want it. It needs the container's turn.
func (m *Manager) updateResources(ctx context.Context, c *container, res *runtimeapi.LinuxContainerResources) error {
	if err := checkUpdatable(c); err != nil {
		return err
	}
	own, others, err := m.plugins.RequestUpdate(ctx, c.id, res, m.describer(c))
	if err != nil {
		return fmt.Errorf("update container %s: %w", c.id, err)
	}
	if err := m.changeResources(c, own); err != nil {
		return err
	}
	m.tellOfContainer(ctx, nri.ContainerUpdated, c)
	m.plugins.UpdateLater(others)
	return nil
}

func checkUpdatable(c *container) error {
	if c.removed {
		return errdefs.NotFound("container %q does not exist", c.id)
	}
	if c.rec.Phase != state.ContainerCreated && c.rec.Phase != state.ContainerRunning {
		return errdefs.FailedPrecondition("container %s has exited", c.id)
	}
	return nil
}

// changeResources applies, records and publishes new limits, or leaves all as it was. It needs the
// container's turn. The kernel comes first: a daemon that dies in between leaves a container whose
// status shows the limits before, and kubelet asks again.
func (m *Manager) changeResources(c *container, change nri.Update) (err error) {
	recorded, limitsBefore, resourcesBefore := c.rec.Resources, c.rec.Limits, c.resources
	if err := m.setResources(c, limits.Merge(c.resources, change.Resources), c.rec.Limits.Merge(change.Limits)); err != nil {
		return err
	}
	restore := func() error { return nil }
	if c.rec.Phase == state.ContainerRunning {
		restore, err = m.applyLimits(c)
	}
	if err == nil {
		if err = m.containerRecs.Write(c.id, c.rec); err != nil {
			err = errors.Join(err, restore())
		}
	}
	if err != nil {
		c.rec.Resources, c.rec.Limits, c.resources = recorded, limitsBefore, resourcesBefore
		return err
	}
	m.publishContainer(c)
	return nil
}

// setResources notes limits that can be, without recording them.
func (m *Manager) setResources(c *container, resources *runtimeapi.LinuxContainerResources, added *nri.Limits) error {
	if _, err := limits.Kernel(resources, added, *m.cfg.Host); err != nil {
		return err
	}
	encoded, err := proto.Marshal(resources)
	if err != nil {
		return errdefs.InvalidArgument("encode resources: %w", err)
	}
	c.rec.Resources, c.rec.Limits, c.resources = encoded, added, resources
	return nil
}

// applyLimits sets all the container's limits, or none. restore sets back those before.
func (m *Manager) applyLimits(c *container) (restore func() error, err error) {
	wanted, err := limits.Kernel(c.resources, c.rec.Limits, *m.cfg.Host)
	if err != nil {
		return nil, err
	}
	restore, err = limits.Apply(c.rec.CgroupsPath, m.cfg.SystemdCgroup, wanted)
	if err != nil {
		return nil, fmt.Errorf("update container %s: %w", c.id, err)
	}
	return restore, nil
}
