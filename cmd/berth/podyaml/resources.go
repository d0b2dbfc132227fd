package podyaml

import (
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Constants of the kernel and kubelet (pkg/kubelet/cm/helpers_linux.go, pkg/kubelet/qos/policy.go).
const (
	minShares    = 2
	maxShares    = 262144
	sharesPerCPU = 1024
	quotaPeriod  = 100000 // µs
	minQuota     = 1000   // µs

	oomGuaranteed = -997
	oomBestEffort = 1000
)

const hugePages = "hugepages-"

func knownResource(name corev1.ResourceName) bool {
	if size, ok := strings.CutPrefix(string(name), hugePages); ok {
		_, err := resource.ParseQuantity(size)
		return err == nil
	}
	return name == corev1.ResourceCPU || name == corev1.ResourceMemory
}

// shares converts a CPU request in thousandths of a CPU (MilliCPUToShares).
func shares(milli int64) int64 {
	return min(max(milli*sharesPerCPU/1000, minShares), maxShares)
}

// quota converts a CPU limit in thousandths of a CPU (MilliCPUToQuota). 0 means no limit.
func quota(milli int64) int64 {
	if milli == 0 {
		return 0
	}
	return max(milli*quotaPeriod/1000, minQuota)
}

// qos returns the pod's QoS class (ComputePodQOS), which depends on the requests of all containers.
func qos(pod *corev1.Pod) corev1.PodQOSClass {
	any, guaranteed := false, true
	for _, c := range containers(pod) {
		for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory} {
			limit, request := c.Resources.Limits[name], c.Resources.Requests[name]
			any = any || !limit.IsZero() || !request.IsZero()
			guaranteed = guaranteed && !limit.IsZero() && limit.Cmp(request) == 0
		}
	}
	switch {
	case !any:
		return corev1.PodQOSBestEffort
	case guaranteed:
		return corev1.PodQOSGuaranteed
	}
	return corev1.PodQOSBurstable
}

// oomScore returns the container's oom_score_adj (GetContainerOOMScoreAdjust). A larger memory
// request protects a container longer.
func (p *Plan) oomScore(c *corev1.Container) int64 {
	switch qos(p.Pod) {
	case corev1.PodQOSGuaranteed:
		return oomGuaranteed
	case corev1.PodQOSBestEffort:
		return oomBestEffort
	}
	request := c.Resources.Requests[corev1.ResourceMemory]
	score := int64(oomBestEffort)
	if p.Host.Memory > 0 {
		score -= 1000 * request.Value() / p.Host.Memory
	}
	return min(max(score, 1000+oomGuaranteed), oomBestEffort-1)
}

// resources returns a container's limits in CRI's form.
func (p *Plan) resources(c *corev1.Container) *runtimeapi.LinuxContainerResources {
	memory := c.Resources.Limits[corev1.ResourceMemory]
	out := cpuAndMemory(c.Resources.Requests.Cpu().MilliValue(), c.Resources.Limits.Cpu().MilliValue(), memory.Value())
	out.OomScoreAdj = p.oomScore(c)
	for _, name := range sortedNames(c.Resources.Limits) {
		if size, ok := strings.CutPrefix(string(name), hugePages); ok {
			limit := c.Resources.Limits[name]
			out.HugepageLimits = append(out.HugepageLimits, &runtimeapi.HugepageLimit{
				PageSize: pageSize(resource.MustParse(size)), Limit: uint64(limit.Value()),
			})
		}
	}
	return out
}

func cpuAndMemory(requestMilli, limitMilli, memory int64) *runtimeapi.LinuxContainerResources {
	return &runtimeapi.LinuxContainerResources{
		CpuShares: shares(requestMilli), CpuPeriod: quotaPeriod, CpuQuota: quota(limitMilli), MemoryLimitInBytes: memory,
	}
}

// pageSize formats the size of a huge page as in the kernel's cgroup file names.
func pageSize(size resource.Quantity) string {
	n := size.Value()
	units := []string{"B", "KB", "MB", "GB", "TB"}
	unit := 0
	for n >= 1024 && n%1024 == 0 && unit < len(units)-1 {
		n /= 1024
		unit++
	}
	return resource.NewQuantity(n, resource.DecimalSI).String() + units[unit]
}

// podResources returns the sums over the containers that run at the same time. Init containers run
// one at a time, so only the largest of them counts. A limit counts only if every container has it.
func (p *Plan) podResources() *runtimeapi.LinuxContainerResources {
	request := p.sum(func(c Container) (int64, bool) { return c.Resources.Requests.Cpu().MilliValue(), true })
	limit := p.sum(func(c Container) (int64, bool) {
		v := c.Resources.Limits.Cpu().MilliValue()
		return v, v > 0
	})
	memory := p.sum(func(c Container) (int64, bool) {
		v := c.Resources.Limits.Memory().Value()
		return v, v > 0
	})
	return cpuAndMemory(request, limit, memory)
}

// sum adds up a value of all containers. It returns 0 if a container lacks the value.
func (p *Plan) sum(get func(Container) (int64, bool)) int64 {
	var total, alone int64
	for _, c := range containers(p.Pod) {
		v, ok := get(c)
		switch {
		case !ok:
			return 0
		case c.Init:
			alone = max(alone, v)
		default:
			total += v
		}
	}
	return max(total, alone)
}

func sortedNames(list corev1.ResourceList) []corev1.ResourceName {
	return slices.Sorted(maps.Keys(list))
}
