package sandbox

import (
	"errors"
	"fmt"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
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
	if err := m.containerRecs.Write(c.id, record); err != nil {
		return err
	}
	if c.rec.Phase == containerRunning {
		if err := m.applyLimits(c, limits); err != nil {
			return errors.Join(err, m.containerRecs.Write(c.id, c.rec))
		}
	}
	c.rec.Resources, c.resources = encoded, merged
	m.publishContainer(c)
	return nil
}

// applyLimits sets limits. If the kernel refuses one, the limits before are set
// again: it may have taken others.
func (m *Manager) applyLimits(c *container, limits *specs.LinuxResources) error {
	group, err := cgroup.Open(c.rec.CgroupsPath, m.cfg.SystemdCgroup)
	if err != nil {
		return err
	}
	err = group.Update(limits)
	if err == nil {
		return nil
	}
	code := codes.Internal
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ERANGE) || errors.Is(err, unix.EBUSY) {
		code = codes.InvalidArgument // EBUSY: cgroup v1 holds more memory than the new limit
	}
	err = errdefs.New(code, "update container %s: %w", c.id, err)
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
