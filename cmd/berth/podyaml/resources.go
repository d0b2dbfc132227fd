package podyaml

import (
	corev1 "k8s.io/api/core/v1"
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

// honouredResources are the resources that need no kubelet.
var honouredResources = []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory}

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
		for _, name := range honouredResources {
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
	return &runtimeapi.LinuxContainerResources{
		CpuShares:          shares(c.Resources.Requests.Cpu().MilliValue()),
		CpuPeriod:          quotaPeriod,
		CpuQuota:           quota(c.Resources.Limits.Cpu().MilliValue()),
		MemoryLimitInBytes: c.Resources.Limits.Memory().Value(),
		OomScoreAdj:        p.oomScore(c),
	}
}
