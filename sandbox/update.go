package sandbox

import (
	"context"
	"errors"
	"fmt"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/nri"
	"berth/sandbox/state"
)

// updateResources applies an update that plugins may change.
func (m *Manager) updateResources(ctx context.Context, c lockedContainer,
	res *runtimeapi.LinuxContainerResources) error {
	if err := checkUpdatable(c); err != nil {
		return err
	}
	own, others, err := m.plugins.RequestUpdate(ctx, c.ID, res, m.describer(c))
	if err != nil {
		return fmt.Errorf("update container %s: %w", c.ID, err)
	}
	if err := m.changeResources(c, own); err != nil {
		return err
	}
	m.notifyContainer(ctx, nri.ContainerUpdated, c)
	m.plugins.UpdateLater(others)
	return nil
}

func checkUpdatable(c lockedContainer) error {
	if c.Phase() == state.Removed {
		return errdefs.NotFound("container %q does not exist", c.ID)
	}
	if c.Phase() != state.ContainerCreated && c.Phase() != state.ContainerRunning {
		return errdefs.FailedPrecondition("container %s has exited", c.ID)
	}
	return nil
}

// changeResources applies, records and publishes new limits, or changes nothing. It changes the
// kernel's limits first: if the daemon dies before the record, the status shows the old limits and
// kubelet repeats the update.
func (m *Manager) changeResources(c lockedContainer, change nri.Update) (err error) {
	limitsBefore, resourcesBefore := c.Limits, c.Resources
	if err := m.setResources(c, mergeResources(c.Resources, change.Resources), c.Limits.Merge(change.Limits)); err != nil {
		return err
	}
	restore := func() error { return nil }
	if c.Phase() == state.ContainerRunning {
		restore, err = m.applyLimits(c)
	}
	if err == nil {
		if err = m.records.WriteContainer(c.ContainerSpec, c.ContainerStatus); err != nil {
			err = errors.Join(err, restore())
		}
	}
	if err != nil {
		c.Limits, c.Resources = limitsBefore, resourcesBefore
		return err
	}
	m.publishContainer(c)
	return nil
}

// setResources checks and stores limits without recording them.
func (m *Manager) setResources(c lockedContainer, resources *runtimeapi.LinuxContainerResources,
	added *nri.Limits) error {
	if _, err := kernelLimits(resources, added, m.host); err != nil {
		return err
	}
	c.Limits, c.Resources = added, resources
	return nil
}

// applyLimits sets all the container's limits, or none. restore sets the previous limits.
func (m *Manager) applyLimits(c lockedContainer) (restore func() error, err error) {
	wanted, err := kernelLimits(c.Resources, c.Limits, m.host)
	if err != nil {
		return nil, err
	}
	restore, err = setLimits(c.CgroupsPath, m.cfg.SystemdCgroup, wanted)
	if err != nil {
		return nil, fmt.Errorf("update container %s: %w", c.ID, err)
	}
	return restore, nil
}
