package sandbox

import (
	"fmt"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/cgroup"
	"berth/internal/errdefs"
	"berth/oci"
)

// updateResources needs the container's turn.
func (m *Manager) updateResources(c *container, res *runtimeapi.LinuxContainerResources) error {
	if c.removed {
		return errdefs.NotFound("container %q does not exist", c.id)
	}
	if c.rec.Phase == containerExited {
		return errdefs.FailedPrecondition("container %s has exited", c.id)
	}
	merged := mergeResources(c.resources, res)
	limits, err := oci.LinuxResources(merged, *m.cfg.Host)
	if err != nil {
		return err
	}
	encoded, err := proto.Marshal(merged)
	if err != nil {
		return errdefs.InvalidArgument("encode resources: %w", err)
	}
	if c.rec.Phase == containerRunning {
		group, err := cgroup.Open(c.rec.CgroupsPath, m.cfg.SystemdCgroup)
		if err != nil {
			return err
		}
		if err := group.Update(limits); err != nil {
			return fmt.Errorf("update container %s: %w", c.id, err)
		}
	}
	record := c.rec
	record.Resources = encoded
	if err := m.containerRecs.Write(c.id, record); err != nil {
		return err
	}
	c.rec.Resources, c.resources = encoded, merged
	m.publishContainer(c)
	return nil
}

// mergeResources returns old with the fields that are set in change. Zero means
// "not set" in CRI's resources.
func mergeResources(old, change *runtimeapi.LinuxContainerResources) *runtimeapi.LinuxContainerResources {
	merged := &runtimeapi.LinuxContainerResources{}
	if old != nil {
		merged = proto.Clone(old).(*runtimeapi.LinuxContainerResources)
	}
	if change == nil {
		return merged
	}
	if len(change.HugepageLimits) > 0 {
		merged.HugepageLimits = nil // a list is replaced, not appended to
	}
	proto.Merge(merged, change) // sets what is not zero; maps are merged by key
	return merged
}
