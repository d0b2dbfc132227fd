// Package limits has the resources of containers: merges changes into them, and sets
// them in a cgroup.
//
// # Contract
//
// Merge is pure, and what it is given stays as it is: snapshots that others read. A set of limits is
// applied whole or not at all. Refusals have the gRPC code that tells whose fault they are.
package limits

import (
	"errors"
	"slices"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/cgroup"
	"berth/internal/errdefs"
	"berth/internal/host"
	"berth/internal/nri"
	"berth/oci"
)

// Merge returns old with the fields that are set in change. Zero means
// "not set" in CRI's resources.
func Merge(old, change *runtimeapi.LinuxContainerResources) *runtimeapi.LinuxContainerResources {
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

// Kernel is what the kernel is told of resources, and of what plugins add to them. InvalidArgument for
// resources that can't be.
func Kernel(resources *runtimeapi.LinuxContainerResources, added *nri.Limits, facts host.Facts) (*specs.LinuxResources, error) {
	all, err := oci.LinuxResources(resources, facts)
	if err == nil {
		added.AddTo(all)
	}
	return all, err
}

// Apply sets all limits of the cgroup at a runtime-spec cgroupsPath, or none. restore sets back those
// before. FailedPrecondition for what can't be now, InvalidArgument for what can't be.
func Apply(cgroupsPath string, systemd bool, limits *specs.LinuxResources) (restore func() error, err error) {
	group, err := cgroup.Open(cgroupsPath, systemd)
	if err != nil {
		return nil, err
	}
	restore, err = group.Update(limits)
	if err != nil {
		return nil, errdefs.New(updateCode(err), "set limits: %w", err)
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
