package sandbox

import (
	"context"
	"errors"
	"fmt"
	"slices"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/cgroup"
	"berth/internal/errdefs"
	"berth/internal/nri"
	"berth/oci"
)

// updateResources makes an update as plugins want it. It needs the container's turn.
func (m *Manager) updateResources(ctx context.Context, c *container, res *runtimeapi.LinuxContainerResources) error {
	if err := checkUpdatable(c); err != nil {
		return err
	}
	own, others, err := m.askToUpdate(ctx, c, res)
	if err != nil {
		return fmt.Errorf("update container %s: %w", c.id, err)
	}
	if err := m.changeResources(c, own); err != nil {
		return err
	}
	m.tellOfContainer(ctx, nri.ContainerUpdated, c)
	m.updateLater(others)
	return nil
}

func checkUpdatable(c *container) error {
	if c.removed {
		return errdefs.NotFound("container %q does not exist", c.id)
	}
	if c.rec.Phase != containerCreated && c.rec.Phase != containerRunning {
		return errdefs.FailedPrecondition("container %s has exited", c.id)
	}
	return nil
}

// changeResources applies, records and publishes new limits, or leaves all as it was. It needs the
// container's turn. The kernel comes first: a daemon that dies in between leaves a container whose
// status shows the limits before, and kubelet asks again.
func (m *Manager) changeResources(c *container, change nri.Update) (err error) {
	recorded, limitsBefore, resourcesBefore := c.rec.Resources, c.rec.Limits, c.resources
	if err := m.setResources(c, mergeResources(c.resources, change.Resources), c.rec.Limits.Merge(change.Limits)); err != nil {
		return err
	}
	restore := func() error { return nil }
	if c.rec.Phase == containerRunning {
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
func (m *Manager) setResources(c *container, resources *runtimeapi.LinuxContainerResources, limits *nri.Limits) error {
	if _, err := m.cgroupLimits(resources, limits); err != nil {
		return err
	}
	encoded, err := proto.Marshal(resources)
	if err != nil {
		return errdefs.InvalidArgument("encode resources: %w", err)
	}
	c.rec.Resources, c.rec.Limits, c.resources = encoded, limits, resources
	return nil
}

// cgroupLimits is what the kernel is told of limits.
func (m *Manager) cgroupLimits(resources *runtimeapi.LinuxContainerResources, limits *nri.Limits) (*specs.LinuxResources, error) {
	all, err := oci.LinuxResources(resources, *m.cfg.Host)
	if err == nil {
		limits.AddTo(all)
	}
	return all, err
}

// applyLimits sets all the container's limits, or none. restore sets back those before.
func (m *Manager) applyLimits(c *container) (restore func() error, err error) {
	limits, err := m.cgroupLimits(c.resources, c.rec.Limits)
	if err != nil {
		return nil, err
	}
	group, err := cgroup.Open(c.rec.CgroupsPath, m.cfg.SystemdCgroup)
	if err != nil {
		return nil, err
	}
	restore, err = group.Update(limits)
	if err != nil {
		return nil, errdefs.New(updateCode(err), "update container %s: %w", c.id, err)
	}
	return restore, nil
}

// updateCode is the gRPC code for a refused update.
func updateCode(err error) codes.Code {
	for _, refused := range []struct {
		err  error
		code codes.Code
	}{
		{cgroup.ErrMemoryInUse, codes.FailedPrecondition},
		{cgroup.ErrNoSuchSetting, codes.InvalidArgument},
		{unix.EBUSY, codes.FailedPrecondition}, // v1: memory and swap in use, or CPUs of groups below
		{unix.EINVAL, codes.InvalidArgument},
		{unix.ERANGE, codes.InvalidArgument},
	} {
		if errors.Is(err, refused.err) {
			return refused.code
		}
	}
	return codes.Internal
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
	kept := slices.DeleteFunc(merged.HugepageLimits, func(have *runtimeapi.HugepageLimit) bool {
		return slices.ContainsFunc(change.HugepageLimits, func(l *runtimeapi.HugepageLimit) bool { return l.GetPageSize() == have.GetPageSize() })
	})
	merged.HugepageLimits = kept // a plugin changes the limit of one page size; kubelet sends all
	proto.Merge(merged, change)  // sets what is not zero; maps are merged by key, lists appended to
	if old != nil && change.MemoryLimitInBytes != 0 && change.MemorySwapLimitInBytes == 0 &&
		old.MemorySwapLimitInBytes == old.MemoryLimitInBytes {
		merged.MemorySwapLimitInBytes = change.MemoryLimitInBytes // "no swap" stays so
	}
	merged.OomScoreAdj = old.GetOomScoreAdj() // of processes, not of the cgroup: as it was at their start
	return merged
}
