package cgstats

import "time"

// Sample is what a cgroup used up to one moment. Times are in nanoseconds, sizes
// in bytes.
type Sample struct {
	At     time.Time
	CPU    CPU
	Memory Memory
	IO     Pressure
	// Tasks is pids.current: processes and their threads, of the groups below too.
	// Not known if the reader does not read it.
	Tasks      uint64
	TasksKnown bool
}

// CPU time is a sum over all cores since the cgroup was made. A Sample has Usage;
// on cgroup v2 the rest as well, on v1 it is part of Detail.
type CPU struct {
	Known            bool // the controller is there
	Usage            uint64
	TimesKnown       bool // User and System
	User, System     uint64
	QuotaKnown       bool   // the next three
	Periods          uint64 // of the quota
	ThrottledPeriods uint64
	Throttled        uint64
	Pressure         Pressure
}

// Memory is that of the cgroup and the groups below it.
type Memory struct {
	Known           bool // the controller is there
	Usage           uint64
	Limit           uint64 // or Unlimited; the group's own, whatever its ancestors have
	RSS             uint64 // anonymous memory
	Cache           uint64
	Kernel          uint64 // 0 where the kernel does not tell; on v1 part of Detail
	MappedFile      uint64
	ActiveFile      uint64
	InactiveFile    uint64
	PageFaults      uint64
	MajorPageFaults uint64
	SwapKnown       bool // swap is counted
	Swap            uint64
	SwapLimit       uint64 // or Unlimited; of swap alone
	Pressure        Pressure
}

// WorkingSet is the memory that can't be had back easily: what kubelet evicts by.
func (m *Memory) WorkingSet() uint64 { return less(m.Usage, m.InactiveFile) }

// Available is what is left of the limit, and false without one.
func (m *Memory) Available() (uint64, bool) {
	return less(m.Limit, m.WorkingSet()), m.Limit != Unlimited
}

// SwapAvailable is what is left of the swap limit, and false without one.
func (m *Memory) SwapAvailable() (uint64, bool) {
	return less(m.SwapLimit, m.Swap), m.SwapLimit != Unlimited
}

// less is a-b, or 0: files are read one after the other and need not agree.
func less(a, b uint64) uint64 {
	if a < b {
		return 0
	}
	return a - b
}

// Pressure tells for how long tasks were stalled by the lack of a resource. It is
// not known on cgroup v1, where the kernel keeps none per group.
type Pressure struct {
	Known      bool
	Some, Full Stall
}

// Stall is one line of a pressure file: averages in percent, and a sum.
type Stall struct {
	Avg10, Avg60, Avg300 float64
	Total                uint64
}

// Figure is a number that not every kernel tells.
type Figure struct {
	Value uint64
	Known bool
}

// Detail is what only metrics need: its files are not kept open.
type Detail struct {
	CPU          CPU    // complete, on v1 too
	MaxUsage     Figure // most memory ever used
	KernelMemory Figure
	LimitHits    Figure // how often the memory limit was reached
	OOMKills     Figure
	Tasks        Figure
	TasksMax     Figure // or Unlimited
	Processes    Figure // in the group itself
	Reservation  Figure // memory.low of cgroup v2, the soft limit of v1; or Unlimited
	Devices      []Device
	HugePages    []HugePages
}

// Device is the group's traffic with one block device.
type Device struct {
	Name                  string // "sda"; empty if the device is gone
	Major, Minor          uint32
	ReadBytes, WriteBytes uint64
	Reads, Writes         uint64
}

// HugePages is the group's use of huge pages of one size.
type HugePages struct {
	Size       string // as in the files' names: "2MB"
	Usage, Max Figure // Max is the most ever used, which v2 does not tell
}

// Interface is what one network interface counted.
type Interface struct {
	Name   string
	Rx, Tx Traffic
}

// Traffic of one direction.
type Traffic struct{ Bytes, Packets, Errors, Dropped uint64 }

// Add adds what another cgroup used. Limits and pressures stay: they have no sum.
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

// Counters is the part that only grows.
func (s *Sample) Counters() Sample {
	c := Sample{CPU: s.CPU, Memory: Memory{PageFaults: s.Memory.PageFaults, MajorPageFaults: s.Memory.MajorPageFaults}}
	c.CPU.Pressure = Pressure{}
	return c
}

// Raise raises counters to what they were before, where they are lower.
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
