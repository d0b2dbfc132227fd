package nri

import (
	"maps"

	"github.com/containerd/nri/pkg/api"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Limits are limits that plugins set and that have no CRI field. nil: not set.
// Limits are limits that plugins set and CRI has no field for. A nil field is not set.
type Limits struct {
	Pids              *int64 `json:"pids,omitempty"` // -1: unlimited
	MemoryReservation *int64 `json:"memoryReservation,omitempty"`
}

// Merge returns l with the set fields of change. It modifies neither. Both may be nil.
func (l *Limits) Merge(change *Limits) *Limits {
	if l == nil || change == nil {
		if change == nil {
			return l
		}
		return change
	}
	merged := *l
	if change.Pids != nil {
		merged.Pids = change.Pids
	}
	if change.MemoryReservation != nil {
		merged.MemoryReservation = change.MemoryReservation
	}
	return &merged
}

// AddTo sets the limits in resources.
func (l *Limits) AddTo(resources *specs.LinuxResources) {
	if l == nil {
		return
	}
	if l.Pids != nil {
		resources.Pids = &specs.LinuxPids{Limit: l.Pids}
	}
	if l.MemoryReservation != nil {
		if resources.Memory == nil {
			resources.Memory = &specs.LinuxMemory{}
		}
		resources.Memory.Reservation = l.MemoryReservation
	}
}

// newUpdates converts the updates in an answer. It skips an invalid update if its failure may be
// ignored.
func (p *Plugins) newUpdates(list []*api.ContainerUpdate) ([]Update, error) {
	var updates []Update
	for _, u := range list {
		if u == nil { // the updated container itself, if no plugin has changed it
			continue
		}
		update, err := newUpdate(u)
		switch {
		case err == nil:
			updates = append(updates, update)
		case u.GetIgnoreFailure():
			p.cfg.Log.Warn("NRI plugin: skip invalid update", "container", u.GetContainerId(), "error", err)
		default:
			return nil, err
		}
	}
	return updates, nil
}

func newUpdate(u *api.ContainerUpdate) (Update, error) {
	if len(u.GetLinux().GetResources().GetDevices()) > 0 {
		return Update{ContainerID: u.GetContainerId()},
			refusal("update of the device rules of container %s", u.GetContainerId())
	}
	resources, limits, err := toCRI(u.GetLinux().GetResources())
	return Update{
		ContainerID:   u.GetContainerId(),
		Resources:     resources,
		Limits:        limits,
		IgnoreFailure: u.GetIgnoreFailure(),
	}, err
}

// toCRI splits resources into those that have a CRI field and the others. Zero means "not set" in
// both parts. It refuses a limit that cgroup v2 does not have, or a class that berth does not
// configure.
func toCRI(r *api.LinuxResources) (*runtimeapi.LinuxContainerResources, *Limits, error) {
	if err := refuseLimits(r); err != nil {
		return nil, nil, err
	}
	cpu, memory := r.GetCpu(), r.GetMemory()
	resources := &runtimeapi.LinuxContainerResources{
		CpuPeriod: int64(cpu.GetPeriod().GetValue()), CpuQuota: cpu.GetQuota().GetValue(),
		CpuShares:  int64(cpu.GetShares().GetValue()),
		CpusetCpus: cpu.GetCpus(), CpusetMems: cpu.GetMems(),
		MemoryLimitInBytes: memory.GetLimit().GetValue(), MemorySwapLimitInBytes: memory.GetSwap().GetValue(),
		Unified: maps.Clone(r.GetUnified()),
	}
	for _, l := range r.GetHugepageLimits() {
		resources.HugepageLimits = append(resources.HugepageLimits,
			&runtimeapi.HugepageLimit{PageSize: l.GetPageSize(), Limit: l.GetLimit()})
	}
	limits := &Limits{}
	if r.GetPids() != nil {
		pids := r.GetPids().GetLimit()
		if pids < api.UnlimitedPidsLimit {
			return nil, nil, invalid("limit of %d processes", pids)
		}
		limits.Pids = &pids
	}
	if reservation := memory.GetReservation(); reservation.GetValue() != 0 {
		limits.MemoryReservation = reservation.Get()
	}
	if *limits == (Limits{}) {
		limits = nil
	}
	return resources, limits, nil
}

func refuseLimits(r *api.LinuxResources) error {
	memory := r.GetMemory()
	switch {
	case r.GetBlockioClass() != nil:
		return refusal("block I/O class %q", r.GetBlockioClass().GetValue())
	case r.GetRdtClass() != nil:
		return refusal("RDT class %q", r.GetRdtClass().GetValue())
	case memory.GetKernel().GetValue() != 0:
		return refusal("limit of kernel memory")
	case memory.GetKernelTcp().GetValue() != 0:
		return refusal("limit of TCP memory")
	case memory.GetSwappiness() != nil:
		return refusal("swappiness")
	case memory.GetDisableOomKiller().GetValue():
		return refusal("disabling the OOM killer")
	case memory.GetUseHierarchy().GetValue():
		return refusal("memory hierarchy")
	case r.GetCpu().GetRealtimeRuntime().GetValue() != 0 || r.GetCpu().GetRealtimePeriod().GetValue() != 0:
		return refusal("realtime CPU time")
	}
	return nil
}

func fromCRI(r *runtimeapi.LinuxContainerResources) *api.LinuxResources {
	if r == nil {
		return nil
	}
	resources := &api.LinuxResources{Cpu: &api.LinuxCPU{Cpus: r.GetCpusetCpus(), Mems: r.GetCpusetMems()},
		Memory: &api.LinuxMemory{}, Unified: maps.Clone(r.GetUnified())}
	if n := r.GetCpuPeriod(); n != 0 {
		resources.Cpu.Period = api.UInt64(uint64(n))
	}
	if n := r.GetCpuQuota(); n != 0 {
		resources.Cpu.Quota = api.Int64(n)
	}
	if n := r.GetCpuShares(); n != 0 {
		resources.Cpu.Shares = api.UInt64(uint64(n))
	}
	if n := r.GetMemoryLimitInBytes(); n != 0 {
		resources.Memory.Limit = api.Int64(n)
	}
	if n := r.GetMemorySwapLimitInBytes(); n != 0 {
		resources.Memory.Swap = api.Int64(n)
	}
	for _, l := range r.GetHugepageLimits() {
		resources.HugepageLimits = append(resources.HugepageLimits,
			&api.HugepageLimit{PageSize: l.GetPageSize(), Limit: l.GetLimit()})
	}
	return resources
}
