package oci

import (
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
)

// LinuxResources converts the limits of a container, for its creation by [ContainerSpec] and for
// UpdateContainerResources. Fields that are 0 or empty stay unset. The creation overwrites Devices
// of the result. A nil argument sets no limits.
//
// kubelet sends a limit for every hugepage size that the kernel supports. A limit is left out if
// this host has no limit file for its size. A swap limit is left out if the kernel does not account
// for swap.
func LinuxResources(r *runtimeapi.LinuxContainerResources, host Host) (*specs.LinuxResources, error) {
	cpu, err := cpuLimits(r)
	if err != nil {
		return nil, err
	}
	memory, err := memoryLimits(r, host)
	if err != nil {
		return nil, err
	}
	unified, err := unifiedLimits(r.GetUnified(), host)
	if err != nil {
		return nil, err
	}
	if err := takeIdle(unified, cpu); err != nil {
		return nil, err
	}
	unified = nameNoSwap(unified, memory, host)
	return &specs.LinuxResources{
		CPU:            cpu,
		Memory:         memory,
		HugepageLimits: hugepageLimits(r.GetHugepageLimits(), host),
		Unified:        unified,
	}, nil
}

func cpuLimits(r *runtimeapi.LinuxContainerResources) (*specs.LinuxCPU, error) {
	cpu := &specs.LinuxCPU{}
	if n := r.GetCpuPeriod(); n < 0 {
		return nil, errdefs.InvalidArgument("cpu_period %d is negative", n)
	} else if n != 0 {
		period := uint64(n)
		cpu.Period = &period
	}
	if n := r.GetCpuQuota(); n < -1 { // -1: no limit
		return nil, errdefs.InvalidArgument("cpu_quota %d is negative", n)
	} else if n != 0 {
		cpu.Quota = &n
	}
	if n := r.GetCpuShares(); n < 0 {
		return nil, errdefs.InvalidArgument("cpu_shares %d is negative", n)
	} else if n != 0 {
		shares := uint64(n)
		cpu.Shares = &shares
	}
	for field, list := range map[string]string{"cpuset_cpus": r.GetCpusetCpus(), "cpuset_mems": r.GetCpusetMems()} {
		if list != "" && !cpuList.MatchString(list) {
			return nil, errdefs.InvalidArgument("%s %q is not a list like 0-3,5", field, list)
		}
	}
	cpu.Cpus, cpu.Mems = r.GetCpusetCpus(), r.GetCpusetMems()
	return cpu, nil
}

var cpuList = regexp.MustCompile(`^[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*$`)

// memoryLimits sets memory and memory+swap. If a container has a memory limit but no swap limit,
// both limits are set to the same value, so it gets no swap. libcontainer converts the sum to v2's
// memory.swap.max.
func memoryLimits(r *runtimeapi.LinuxContainerResources, host Host) (*specs.LinuxMemory, error) {
	limit, swap := r.GetMemoryLimitInBytes(), r.GetMemorySwapLimitInBytes()
	if limit < -1 {
		return nil, errdefs.InvalidArgument("memory_limit_in_bytes %d is negative", limit)
	}
	if swap < -1 {
		return nil, errdefs.InvalidArgument("memory_swap_limit_in_bytes %d is negative", swap)
	}
	if swap > 0 && limit <= 0 {
		return nil, errdefs.InvalidArgument("memory_swap_limit_in_bytes %d needs memory_limit_in_bytes", swap)
	}
	if swap > 0 && swap < limit {
		return nil, errdefs.InvalidArgument("memory_swap_limit_in_bytes %d, which counts memory and swap, is below "+
			"memory_limit_in_bytes %d", swap, limit)
	}
	memory := &specs.LinuxMemory{}
	if limit != 0 {
		memory.Limit = &limit
	}
	if swap == 0 {
		swap = limit
	}
	if swap != 0 && host.SwapAccounting {
		memory.Swap = &swap
	}
	return memory, nil
}

func hugepageLimits(limits []*runtimeapi.HugepageLimit, host Host) []specs.LinuxHugepageLimit {
	var out []specs.LinuxHugepageLimit
	for _, l := range limits {
		if slices.Contains(host.HugepageSizes, l.GetPageSize()) {
			out = append(out, specs.LinuxHugepageLimit{Pagesize: l.GetPageSize(), Limit: l.GetLimit()})
		}
	}
	return out
}

// unifiedKey matches the name of a limit file of cgroup v2.
var unifiedKey = regexp.MustCompile(`^[a-z0-9_]+(\.[a-zA-Z0-9_]+)+$`)

// unifiedLimits returns the raw settings of cgroup v2. It leaves out files of the cgroup core,
// which move, freeze and kill processes.
func unifiedLimits(unified map[string]string, host Host) (map[string]string, error) {
	if len(unified) == 0 {
		return nil, nil
	}
	if !host.CgroupV2 {
		return nil, errdefs.InvalidArgument("unified resources need cgroup v2, this host has v1")
	}
	out := maps.Clone(unified)
	for key, value := range unified {
		if !unifiedKey.MatchString(key) || strings.HasPrefix(key, "cgroup.") {
			return nil, errdefs.InvalidArgument("unified: %q is not a limit of cgroup v2", key)
		}
		if strings.ContainsFunc(strings.TrimSuffix(value, "\n"), isControl) {
			return nil, errdefs.InvalidArgument("unified: %s has value %q, which has control characters", key, value)
		}
	}
	if !host.SwapAccounting {
		maps.DeleteFunc(out, func(key, _ string) bool { return strings.HasPrefix(key, "memory.swap.") })
	}
	return out, nil
}

// takeIdle moves the unified setting cpu.idle to the field CPU.Idle, because the order matters. The
// kernel refuses a weight for an idle cgroup (EINVAL), and libcontainer writes unified settings
// last.
func takeIdle(unified map[string]string, cpu *specs.LinuxCPU) error {
	value, set := unified["cpu.idle"]
	if !set {
		return nil
	}
	idle, err := strconv.ParseInt(strings.TrimSpace(value), 10, 64)
	if err != nil || idle < 0 || idle > 1 {
		return errdefs.InvalidArgument("unified: cpu.idle is %q, not 0 or 1", value)
	}
	delete(unified, "cpu.idle")
	cpu.Idle = &idle
	if idle == 1 {
		cpu.Shares = nil
		delete(unified, "cpu.weight")
		delete(unified, "cpu.weight.nice")
	}
	return nil
}

// nameNoSwap sets the swap limit 0 also as a unified setting. If only the two limits are equal,
// libcontainer writes 0 to the file, but does not set the property of the systemd unit. systemd
// then removes the limit when the next property is set.
func nameNoSwap(unified map[string]string, memory *specs.LinuxMemory, host Host) map[string]string {
	const name = "memory.swap.max"
	if _, named := unified[name]; named || !host.CgroupV2 || memory.Limit == nil || memory.Swap == nil ||
		*memory.Limit < 0 || *memory.Swap != *memory.Limit {
		return unified
	}
	if unified == nil {
		unified = map[string]string{}
	}
	unified[name] = "0"
	return unified
}

// oomScoreAdj checks an oom_score_adj. The caller of ContainerSpec raises it to the lowest value
// that the host permits.
func oomScoreAdj(want int64) (int, error) {
	if want < -1000 || want > 1000 {
		return 0, errdefs.InvalidArgument("oom_score_adj %d is not between -1000 and 1000", want)
	}
	return int(want), nil
}
