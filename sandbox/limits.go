package sandbox

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
	"berth/sandbox/state"
)

// mergeResources returns a copy of old with the set fields of change. In CRI's resources zero means
// "not set".
func mergeResources(old, change *runtimeapi.LinuxContainerResources) *runtimeapi.LinuxContainerResources {
	merged := &runtimeapi.LinuxContainerResources{}
	if old != nil {
		merged = proto.Clone(old).(*runtimeapi.LinuxContainerResources)
	}
	if change == nil {
		return merged
	}
	kept := slices.DeleteFunc(merged.HugepageLimits, func(have *runtimeapi.HugepageLimit) bool {
		return slices.ContainsFunc(change.HugepageLimits,
			func(l *runtimeapi.HugepageLimit) bool { return l.GetPageSize() == have.GetPageSize() })
	})
	merged.HugepageLimits = kept // a plugin sends the limit of one page size, and kubelet sends the limits of all sizes
	proto.Merge(merged, change)  // copies non-zero fields, merges maps by key and appends lists
	if old != nil && change.MemoryLimitInBytes != 0 && change.MemorySwapLimitInBytes == 0 &&
		old.MemorySwapLimitInBytes == old.MemoryLimitInBytes {
		merged.MemorySwapLimitInBytes = change.MemoryLimitInBytes // keep "no swap"
	}
	merged.OomScoreAdj = old.GetOomScoreAdj() // set at the start of the processes
	return merged
}

// kernelLimits converts resources, and the limits that plugins added, to the runtime-spec. The
// error is InvalidArgument for impossible resources.
func kernelLimits(resources *runtimeapi.LinuxContainerResources, added *nri.Limits,
	facts host.Facts) (*specs.LinuxResources, error) {
	all, err := oci.LinuxResources(resources, facts)
	if err == nil {
		added.AddTo(all)
	}
	return all, err
}

// setLimits sets all limits of the cgroup at a runtime-spec cgroupsPath, or none. restore sets the
// previous limits. The error is FailedPrecondition for limits that the current usage prevents, and
// InvalidArgument for impossible limits.
func setLimits(node state.Node, cgroupsPath string, limits *specs.LinuxResources) (restore func() error, err error) {
	group, err := node.Cgroup(cgroupsPath)
	if err != nil {
		return nil, err
	}
	restore, err = group.Update(limits)
	if err != nil {
		return nil, errdefs.New(updateCode(err), "set limits: %w", err)
	}
	return restore, nil
}

// updateCode returns the gRPC code of a failed update.
func updateCode(err error) codes.Code {
	for _, refused := range []struct {
		err  error
		code codes.Code
	}{
		{cgroup.ErrMemoryInUse, codes.FailedPrecondition},
		{cgroup.ErrNoSuchSetting, codes.InvalidArgument},
		{unix.EBUSY, codes.FailedPrecondition}, // v1: memory and swap in use, or CPUs of child cgroups
		{unix.EINVAL, codes.InvalidArgument},
		{unix.ERANGE, codes.InvalidArgument},
	} {
		if errors.Is(err, refused.err) {
			return refused.code
		}
	}
	return codes.Internal
}
