package sandbox

import (
	"errors"
	"fmt"

	specs "github.com/opencontainers/runtime-spec/specs-go"
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
	if c.rec.Phase != containerCreated && c.rec.Phase != containerRunning {
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
	record := c.rec
	record.Resources = encoded
	if c.rec.Phase != containerRunning {
		err = m.containerRecs.Write(c.id, record)
	} else {
		err = m.applyLimits(c, limits, func() error { return m.containerRecs.Write(c.id, record) })
	}
	if err != nil {
		return fmt.Errorf("update container %s: %w", c.id, err)
	}
	c.rec.Resources, c.resources = encoded, merged
	m.publishContainer(c)
	return nil
}

// applyLimits sets limits and then does what makes them last. If either fails the
// limits before are set again: the kernel may have taken some of the new ones.
func (m *Manager) applyLimits(c *container, limits *specs.LinuxResources, keep func() error) error {
	group, err := cgroup.Open(c.rec.CgroupsPath, m.cfg.SystemdCgroup)
	if err != nil {
		return err
	}
	if err = group.Update(limits); err == nil {
		err = keep()
	}
	if err == nil {
		return nil
	}
	before, e := oci.LinuxResources(c.resources, *m.cfg.Host)
	if e == nil {
		e = group.Update(before)
	}
	if e != nil {
		e = fmt.Errorf("set the limits before again: %w", e)
	}
	return errors.Join(err, e)
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
	if old != nil && change.MemoryLimitInBytes != 0 && change.MemorySwapLimitInBytes == 0 &&
		old.MemorySwapLimitInBytes == old.MemoryLimitInBytes {
		merged.MemorySwapLimitInBytes = change.MemoryLimitInBytes // "no swap" stays so
	}
	merged.OomScoreAdj = old.GetOomScoreAdj() // of processes, not of the cgroup: as it was at their start
	return merged
}
