package sandbox

import (
	"context"
	"fmt"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/nri"
)

// updateResources applies an update that plugins may change.
func (m *Manager) updateResources(ctx context.Context, c lockedContainer,
	res *runtimeapi.LinuxContainerResources) error {
	if err := checkUpdatable(c); err != nil {
		return err
	}
	own, others, err := m.plugins.caller.RequestUpdate(ctx, c.ID, res, m.plugins.describer(c))
	if err != nil {
		return fmt.Errorf("update container %s: %w", c.ID, err)
	}
	if err := m.control.changeResources(ctx, c, own); err != nil {
		return err
	}
	m.plugins.NotifyContainer(ctx, nri.ContainerUpdated, c)
	m.plugins.caller.UpdateLater(others)
	return nil
}
