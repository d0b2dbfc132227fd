package cgstats

import "time"

// Sample is the usage of a cgroup up to one moment. Times are in nanoseconds, sizes in bytes.
type Sample struct {
	At     time.Time
	CPU    CPU
	Memory Memory
	IO     Pressure
	// Tasks is pids.current: processes and threads, including descendants. It is unknown if the
	// Reader does not count tasks.
	Tasks      uint64
	TasksKnown bool
}

// CPU has times summed over all cores since the cgroup's creation. A Sample always has Usage. It
// has the other fields on cgroup v2 only. On v1 they are in Detail.
type CPU struct {
	Known            bool // the controller exists
	Usage            uint64
	TimesKnown       bool // User and System are known
	User, System     uint64
	QuotaKnown       bool   // the next three fields are known
	Periods          uint64 // periods of the quota
	ThrottledPeriods uint64
	Throttled        uint64
	Pressure         Pressure
}

// Memory is the memory of the cgroup and its descendants.
type Memory struct {
	Known           bool // the controller exists
	Usage           uint64
	Limit           uint64 // the group's limit, ignoring its ancestors', or Unlimited
	RSS             uint64 // anonymous memory
	Cache           uint64
	Kernel          uint64 // 0 if the kernel does not report it; on v1 part of Detail
	MappedFile      uint64
	ActiveFile      uint64
	InactiveFile    uint64
	PageFaults      uint64
	MajorPageFaults uint64
	SwapKnown       bool // swap accounting is on
	Swap            uint64
	SwapLimit       uint64 // or Unlimited; swap only
	Pressure        Pressure
}

// WorkingSet is the memory that the kernel cannot easily reclaim. kubelet evicts pods by this
// value.
func (m *Memory) WorkingSet() uint64 { return less(m.Usage, m.InactiveFile) }

// Available returns the memory left below the limit, or false if there is no limit.
func (m *Memory) Available() (uint64, bool) {
	return less(m.Limit, m.WorkingSet()), m.Limit != Unlimited
}

// SwapAvailable returns the swap left below its limit, or false if there is no limit.
func (m *Memory) SwapAvailable() (uint64, bool) {
	return less(m.SwapLimit, m.Swap), m.SwapLimit != Unlimited
}

// less returns a-b, or 0 if b is greater. The files are read one after the other, so their values
// may disagree.
func less(a, b uint64) uint64 {
	if a < b {
		return 0
	}
	return a - b
}

// Pressure reports how long tasks stalled for lack of a resource. It is unknown on cgroup v1, which
// has no pressure per group.
type Pressure struct {
	Known      bool
	Some, Full Stall
}

// Stall is one line of a pressure file: averages in percent and a total.
type Stall struct {
	Avg10, Avg60, Avg300 float64
	Total                uint64
}

// Figure is a number that some kernels do not report.
type Figure struct {
	Value uint64
	Known bool
}

// Detail has the values that only metrics need. Its files are not kept open.
type Detail struct {
	CPU          CPU    // complete, on v1 too
	MaxUsage     Figure // peak of the memory in use
	KernelMemory Figure
	LimitHits    Figure // how often the memory limit was reached
	OOMKills     Figure
	Tasks        Figure
	TasksMax     Figure // or Unlimited
	Processes    Figure // processes of the group, without descendants
	Reservation  Figure // memory.low of cgroup v2, the soft limit of v1; or Unlimited
	Devices      []Device
	HugePages    []HugePages
}

// Device is the group's traffic with one block device.
type Device struct {
	Name                  string // "sda"; empty if the device was removed
	Major, Minor          uint32
	ReadBytes, WriteBytes uint64
	Reads, Writes         uint64
}

// HugePages is the group's use of huge pages of one size.
type HugePages struct {
	Size       string // as in the names of the files: "2MB"
	Usage, Max Figure // Max is the peak, which v2 does not report
}

// Interface has the counters of one network interface.
type Interface struct {
	Name   string
	Rx, Tx Traffic
}

// Traffic has the counters of one direction.
type Traffic struct{ Bytes, Packets, Errors, Dropped uint64 }

// Add adds the usage of another cgroup. Limits and pressures are not changed, because they cannot
// be added.
func (s *Sample) Add(other *Sample) {
	s.CPU.Usage += other.CPU.Usage
	s.CPU.User += other.CPU.User
	s.CPU.System += other.CPU.System
	s.CPU.Periods += other.CPU.Periods
	s.CPU.ThrottledPeriods += other.CPU.ThrottledPeriods
	s.CPU.Throttled += other.CPU.Throttled
	s.Memory.Usage += other.Memory.Usage
	s.Memory.RSS += other.Memory.RSS
	s.Memory.Cache += other.Memory.Cache
	s.Memory.Kernel += other.Memory.Kernel
	s.Memory.MappedFile += other.Memory.MappedFile
	s.Memory.ActiveFile += other.Memory.ActiveFile
	s.Memory.InactiveFile += other.Memory.InactiveFile
	s.Memory.PageFaults += other.Memory.PageFaults
	s.Memory.MajorPageFaults += other.Memory.MajorPageFaults
	s.Memory.Swap += other.Memory.Swap
	s.Tasks += other.Tasks
}

// Counters returns the fields that only grow.
func (s *Sample) Counters() Sample {
	c := Sample{CPU: s.CPU, Memory: Memory{PageFaults: s.Memory.PageFaults, MajorPageFaults: s.Memory.MajorPageFaults}}
	c.CPU.Pressure = Pressure{}
	return c
}

// Raise raises each counter that is lower than before to its previous value.
func (s *Sample) Raise(before *Sample) {
	raise := func(counter *uint64, to uint64) { *counter = max(*counter, to) }
	raise(&s.CPU.Usage, before.CPU.Usage)
	raise(&s.CPU.User, before.CPU.User)
	raise(&s.CPU.System, before.CPU.System)
	raise(&s.CPU.Periods, before.CPU.Periods)
	raise(&s.CPU.ThrottledPeriods, before.CPU.ThrottledPeriods)
	raise(&s.CPU.Throttled, before.CPU.Throttled)
	raise(&s.Memory.PageFaults, before.Memory.PageFaults)
	raise(&s.Memory.MajorPageFaults, before.Memory.MajorPageFaults)
}
