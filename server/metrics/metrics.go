// Package metrics computes the metrics that kubelet offers Prometheus at /metrics/cadvisor if it
// uses the runtime's metrics instead of cAdvisor's (KEP-2371). Names, labels, types and meanings
// are cAdvisor's, so dashboards need no change. Seconds have their fraction only in CRI's
// double_value, which kubelets before 1.38 do not read.
//
// # Contract
//
// The package is pure and only converts measurements. It leaves out missing measurements. Each
// returned metric is in Descriptors, and no two have the same name and labels.
package metrics

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/cgstats"
	"berth/sandbox/state"
	"berth/sandbox/stats"
)

// baseLabels are the labels of every metric, as kubelet configures cAdvisor. id is the cgroup. name
// is the ID of the container or pod.
var baseLabels = []string{"container", "id", "image", "name", "namespace", "pod"}

// podContainer is the container label of a pod's network metrics.
const podContainer = "POD"

// measured is the input of metrics. Missing parts are nil.
type measured struct {
	usage      *stats.Usage
	detail     *cgstats.Detail
	container  *state.Container
	sample     *stats.Sample
	filesystem *stats.Filesystem
	interfaces []cgstats.Interface
}

// emit adds one value with the values of the metric's labels.
type emit func(v uint64, labels ...string)

// metric describes one metric and computes its values.
type metric struct {
	name, help string
	kind       runtimeapi.MetricType
	labels     []string                  // besides baseLabels
	seconds    bool                      // values emits nanoseconds, and clients get seconds
	counted    func(*measured) time.Time // time of a background measurement; nil: now
	values     func(m *measured, emit emit)
}

func ofSample(m *measured) time.Time { return m.sample.At }
func ofStatfs(m *measured) time.Time { return m.filesystem.At }

const (
	counter = runtimeapi.MetricType_COUNTER
	gauge   = runtimeapi.MetricType_GAUGE
)

// metrics are in the order of answers.
var metrics = slices.Concat(
	cpuMetrics, memoryMetrics, diskMetrics, networkMetrics,
	processMetrics, specMetrics, pressureMetrics,
)

var cpuMetrics = []metric{
	{name: "container_cpu_usage_seconds_total", help: "Cumulative cpu time consumed in seconds.", kind: counter,
		labels: []string{"cpu"}, seconds: true,
		values: func(m *measured, emit emit) {
			if m.usage != nil && m.usage.CPU.Known {
				emit(m.usage.CPU.Usage, "total")
			}
		}},
	{name: "container_cpu_user_seconds_total", help: "Cumulative user cpu time consumed in seconds.", kind: counter,
		seconds: true,
		values:  ofTimes(func(c *cgstats.CPU) uint64 { return c.User })},
	{name: "container_cpu_system_seconds_total", help: "Cumulative system cpu time consumed in seconds.", kind: counter,
		seconds: true,
		values:  ofTimes(func(c *cgstats.CPU) uint64 { return c.System })},
	{name: "container_cpu_cfs_periods_total", help: "Number of elapsed enforcement period intervals.", kind: counter,
		values: ofQuota(func(c *cgstats.CPU) uint64 { return c.Periods })},
	{name: "container_cpu_cfs_throttled_periods_total", help: "Number of throttled period intervals.", kind: counter,
		values: ofQuota(func(c *cgstats.CPU) uint64 { return c.ThrottledPeriods })},
	{name: "container_cpu_cfs_throttled_seconds_total", help: "Total time duration the container has been throttled.",
		kind: counter, seconds: true,
		values: ofQuota(func(c *cgstats.CPU) uint64 { return c.Throttled })},
}

var memoryMetrics = []metric{
	{name: "container_memory_cache", help: "Number of bytes of page cache memory.", kind: gauge,
		values: ofMemory(func(m *cgstats.Memory) uint64 { return m.Cache })},
	{name: "container_memory_rss", help: "Size of RSS in bytes.", kind: gauge,
		values: ofMemory(func(m *cgstats.Memory) uint64 { return m.RSS })},
	{name: "container_memory_kernel_usage", help: "Size of kernel memory allocated in bytes.", kind: gauge,
		values: func(m *measured, emit emit) { // the counters of cgroup v1 and v2 differ
			switch {
			case m.detail != nil && m.detail.KernelMemory.Known:
				emit(m.detail.KernelMemory.Value)
			case m.usage != nil && m.usage.Memory.Kernel > 0:
				emit(m.usage.Memory.Kernel)
			}
		}},
	{name: "container_memory_mapped_file", help: "Size of memory mapped files in bytes.", kind: gauge,
		values: ofMemory(func(m *cgstats.Memory) uint64 { return m.MappedFile })},
	{name: "container_memory_swap", help: "Container swap usage in bytes.", kind: gauge,
		values: ofMemory(func(m *cgstats.Memory) uint64 { return m.Swap })},
	{name: "container_memory_failcnt", help: "Number of memory usage hits limits", kind: counter,
		values: ofFigure(func(d *cgstats.Detail) cgstats.Figure { return d.LimitHits })},
	{name: "container_memory_usage_bytes", help: "Current memory usage in bytes, including all memory regardless of " +
		"when it was accessed", kind: gauge,
		values: ofMemory(func(m *cgstats.Memory) uint64 { return m.Usage })},
	{name: "container_memory_max_usage_bytes", help: "Maximum memory usage recorded in bytes", kind: gauge,
		values: ofFigure(func(d *cgstats.Detail) cgstats.Figure { return d.MaxUsage })},
	{name: "container_memory_working_set_bytes", help: "Current working set in bytes.", kind: gauge,
		values: ofMemory((*cgstats.Memory).WorkingSet)},
	{name: "container_memory_total_active_file_bytes", help: "Current total active file in bytes.", kind: gauge,
		values: ofMemory(func(m *cgstats.Memory) uint64 { return m.ActiveFile })},
	{name: "container_memory_total_inactive_file_bytes", help: "Current total inactive file in bytes.", kind: gauge,
		values: ofMemory(func(m *cgstats.Memory) uint64 { return m.InactiveFile })},
	{name: "container_memory_failures_total", help: "Cumulative count of memory allocation failures.", kind: counter,
		labels: []string{"failure_type", "scope"},
		values: func(m *measured, emit emit) {
			if m.usage == nil || !m.usage.Memory.Known {
				return
			}
			for _, scope := range []string{"container", "hierarchy"} { // cAdvisor also reports the same value for both
				emit(m.usage.Memory.PageFaults, "pgfault", scope)
				emit(m.usage.Memory.MajorPageFaults, "pgmajfault", scope)
			}
		}},
	{name: "container_oom_events_total", help: "Count of out of memory events observed for the container", kind: counter,
		values: ofFigure(func(d *cgstats.Detail) cgstats.Figure { return d.OOMKills })},
	{name: "container_hugetlb_usage_bytes", help: "Current hugepage usage in bytes", kind: gauge,
		labels: []string{"pagesize"},
		values: ofHugePages(func(p *cgstats.HugePages) cgstats.Figure { return p.Usage })},
	{name: "container_hugetlb_max_usage_bytes", help: "Maximum hugepage usage recorded in bytes", kind: gauge,
		labels: []string{"pagesize"},
		values: ofHugePages(func(p *cgstats.HugePages) cgstats.Figure { return p.Max })},
}

var diskMetrics = []metric{
	{name: "container_fs_inodes_free", help: "Number of available Inodes", kind: gauge, labels: []string{"device"},
		counted: ofStatfs,
		values:  ofFilesystem(func(f *stats.Filesystem, _ *stats.Sample) uint64 { return f.FreeInodes })},
	{name: "container_fs_inodes_total", help: "Number of Inodes", kind: gauge, labels: []string{"device"},
		counted: ofStatfs,
		values:  ofFilesystem(func(f *stats.Filesystem, _ *stats.Sample) uint64 { return f.Inodes })},
	{name: "container_fs_limit_bytes", help: "Number of bytes that can be consumed by the container on this filesystem.",
		kind: gauge, labels: []string{"device"}, counted: ofStatfs,
		values: ofFilesystem(func(f *stats.Filesystem, _ *stats.Sample) uint64 { return f.Bytes })},
	{name: "container_fs_usage_bytes", help: "Number of bytes that are consumed by the container on this filesystem.",
		kind: gauge, labels: []string{"device"}, counted: ofSample,
		values: ofFilesystem(func(_ *stats.Filesystem, c *stats.Sample) uint64 { return c.Layer.Bytes })},
	{name: "container_fs_reads_bytes_total", help: "Cumulative count of bytes read", kind: counter,
		labels: []string{"device"},
		values: ofDevices(func(d *cgstats.Device) uint64 { return d.ReadBytes })},
	{name: "container_fs_reads_total", help: "Cumulative count of reads completed", kind: counter,
		labels: []string{"device"},
		values: ofDevices(func(d *cgstats.Device) uint64 { return d.Reads })},
	{name: "container_fs_writes_bytes_total", help: "Cumulative count of bytes written", kind: counter,
		labels: []string{"device"},
		values: ofDevices(func(d *cgstats.Device) uint64 { return d.WriteBytes })},
	{name: "container_fs_writes_total", help: "Cumulative count of writes completed", kind: counter,
		labels: []string{"device"},
		values: ofDevices(func(d *cgstats.Device) uint64 { return d.Writes })},
	{name: "container_blkio_device_usage_total", help: "Blkio Device bytes usage", kind: counter,
		labels: []string{"device", "major", "minor", "operation"},
		values: ofDetail(func(d *cgstats.Detail, emit emit) {
			for _, dev := range d.Devices {
				major, minor := strconv.Itoa(int(dev.Major)), strconv.Itoa(int(dev.Minor))
				emit(dev.ReadBytes, deviceName(&dev), major, minor, "Read")
				emit(dev.WriteBytes, deviceName(&dev), major, minor, "Write")
			}
		})},
}

var networkMetrics = []metric{
	{name: "container_network_receive_bytes_total", help: "Cumulative count of bytes received", kind: counter,
		labels: []string{"interface"},
		values: ofInterfaces(func(i *cgstats.Interface) uint64 { return i.Rx.Bytes })},
	{name: "container_network_receive_packets_total", help: "Cumulative count of packets received", kind: counter,
		labels: []string{"interface"},
		values: ofInterfaces(func(i *cgstats.Interface) uint64 { return i.Rx.Packets })},
	{name: "container_network_receive_packets_dropped_total", help: "Cumulative count of packets dropped while receiving",
		kind: counter, labels: []string{"interface"},
		values: ofInterfaces(func(i *cgstats.Interface) uint64 { return i.Rx.Dropped })},
	{name: "container_network_receive_errors_total", help: "Cumulative count of errors encountered while receiving",
		kind: counter, labels: []string{"interface"},
		values: ofInterfaces(func(i *cgstats.Interface) uint64 { return i.Rx.Errors })},
	{name: "container_network_transmit_bytes_total", help: "Cumulative count of bytes transmitted", kind: counter,
		labels: []string{"interface"},
		values: ofInterfaces(func(i *cgstats.Interface) uint64 { return i.Tx.Bytes })},
	{name: "container_network_transmit_packets_total", help: "Cumulative count of packets transmitted", kind: counter,
		labels: []string{"interface"},
		values: ofInterfaces(func(i *cgstats.Interface) uint64 { return i.Tx.Packets })},
	{name: "container_network_transmit_packets_dropped_total",
		help: "Cumulative count of packets dropped while transmitting", kind: counter, labels: []string{"interface"},
		values: ofInterfaces(func(i *cgstats.Interface) uint64 { return i.Tx.Dropped })},
	{name: "container_network_transmit_errors_total", help: "Cumulative count of errors encountered while transmitting",
		kind: counter, labels: []string{"interface"},
		values: ofInterfaces(func(i *cgstats.Interface) uint64 { return i.Tx.Errors })},
}

var processMetrics = []metric{
	{name: "container_processes", help: "Number of processes running inside the container.", kind: gauge,
		values: ofFigure(func(d *cgstats.Detail) cgstats.Figure { return d.Processes })},
	{name: "container_threads", help: "Number of threads running inside the container", kind: gauge,
		values: ofFigure(func(d *cgstats.Detail) cgstats.Figure { return d.Tasks })},
	{name: "container_threads_max", help: "Maximum number of threads allowed inside the container, infinity if value is " +
		"zero", kind: gauge,
		values: ofFigure(func(d *cgstats.Detail) cgstats.Figure { return limitFigure(d.TasksMax) })},
	{name: "container_file_descriptors", help: "Number of open file descriptors for the container.", kind: gauge,
		counted: ofSample,
		values:  ofProcesses(func(p *stats.Processes, emit emit) { emit(p.Files) })},
	{name: "container_sockets", help: "Number of open sockets for the container.", kind: gauge, counted: ofSample,
		values: ofProcesses(func(p *stats.Processes, emit emit) { emit(p.Sockets) })},
	{name: "container_ulimits_soft", help: "Soft ulimit values for the container root process. Unlimited if -1, except " +
		"priority and nice", kind: gauge,
		labels: []string{"ulimit"}, counted: ofSample,
		values: ofProcesses(func(p *stats.Processes, emit emit) {
			if p.MaxFiles != math.MaxUint64 { // CRI values cannot be -1
				emit(p.MaxFiles, "max_open_files")
			}
		})},
	{name: "container_last_seen", help: "Last time a container was seen by the exporter", kind: gauge,
		values: func(m *measured, emit emit) {
			if m.usage != nil {
				emit(uint64(m.usage.At.Unix()))
			}
		}},
}

var specMetrics = []metric{
	{name: "container_start_time_seconds", help: "Start time of the container since unix epoch in seconds.", kind: gauge,
		values: ofContainer(func(c *state.Container, emit emit) { emit(uint64(c.StartedAt.Unix())) })},
	{name: "container_spec_cpu_period", help: "CPU period of the container.", kind: gauge,
		values: ofContainer(func(c *state.Container, emit emit) { emit(orDefault(c.Resources.GetCpuPeriod(), 100000)) })},
	{name: "container_spec_cpu_quota", help: "CPU quota of the container.", kind: gauge,
		values: ofContainer(func(c *state.Container, emit emit) {
			if quota := c.Resources.GetCpuQuota(); quota > 0 {
				emit(uint64(quota))
			}
		})},
	{name: "container_spec_cpu_shares", help: "CPU share of the container.", kind: gauge,
		values: ofContainer(func(c *state.Container, emit emit) { emit(orDefault(c.Resources.GetCpuShares(), 1024)) })},
	{name: "container_spec_memory_limit_bytes", help: "Memory limit for the container.", kind: gauge,
		values: ofMemory(func(m *cgstats.Memory) uint64 { return limit(m.Limit) })},
	{name: "container_spec_memory_swap_limit_bytes", help: "Memory swap limit for the container.", kind: gauge,
		values: ofMemory(func(m *cgstats.Memory) uint64 { return limit(m.SwapLimit) })},
	{name: "container_spec_memory_reservation_limit_bytes", help: "Memory reservation limit for the container.",
		kind:   gauge,
		values: ofFigure(func(d *cgstats.Detail) cgstats.Figure { return limitFigure(d.Reservation) })},
}

var pressureMetrics = []metric{
	{name: "container_pressure_cpu_stalled_seconds_total",
		help: "Total time duration no tasks in the container could make progress due to CPU congestion.", kind: counter,
		seconds: true,
		values: ofPressure(func(u *stats.Usage) (*cgstats.Pressure, *cgstats.Stall) {
			return &u.CPU.Pressure, &u.CPU.Pressure.Full
		})},
	{name: "container_pressure_cpu_waiting_seconds_total",
		help: "Total time duration tasks in the container have waited due to CPU congestion.", kind: counter,
		seconds: true,
		values: ofPressure(func(u *stats.Usage) (*cgstats.Pressure, *cgstats.Stall) {
			return &u.CPU.Pressure, &u.CPU.Pressure.Some
		})},
	{name: "container_pressure_memory_stalled_seconds_total",
		help: "Total time duration no tasks in the container could make progress due to memory congestion.", kind: counter,
		seconds: true,
		values: ofPressure(func(u *stats.Usage) (*cgstats.Pressure, *cgstats.Stall) {
			return &u.Memory.Pressure, &u.Memory.Pressure.Full
		})},
	{name: "container_pressure_memory_waiting_seconds_total",
		help: "Total time duration tasks in the container have waited due to memory congestion.", kind: counter,
		seconds: true,
		values: ofPressure(func(u *stats.Usage) (*cgstats.Pressure, *cgstats.Stall) {
			return &u.Memory.Pressure, &u.Memory.Pressure.Some
		})},
	{name: "container_pressure_io_stalled_seconds_total",
		help: "Total time duration no tasks in the container could make progress due to IO congestion.", kind: counter,
		seconds: true,
		values:  ofPressure(func(u *stats.Usage) (*cgstats.Pressure, *cgstats.Stall) { return &u.IO, &u.IO.Full })},
	{name: "container_pressure_io_waiting_seconds_total",
		help: "Total time duration tasks in the container have waited due to IO congestion.", kind: counter,
		seconds: true,
		values:  ofPressure(func(u *stats.Usage) (*cgstats.Pressure, *cgstats.Stall) { return &u.IO, &u.IO.Some })},
}

// limit returns a limit in cAdvisor's form, in which 0 means no limit.
func limit(v uint64) uint64 {
	if v == cgstats.Unlimited {
		return 0
	}
	return v
}

// orDefault returns a setting, or the kernel's default if it is 0.
func orDefault(v, unset int64) uint64 {
	if v <= 0 {
		v = unset
	}
	return uint64(v)
}

// deviceName returns the device's name in /dev, or its numbers.
func deviceName(d *cgstats.Device) string {
	if d.Name == "" {
		return fmt.Sprintf("%d:%d", d.Major, d.Minor)
	}
	return "/dev/" + d.Name
}

func ofDetail(values func(*cgstats.Detail, emit)) func(*measured, emit) {
	return func(m *measured, emit emit) {
		if m.detail != nil {
			values(m.detail, emit)
		}
	}
}

// ofFigure converts a value that some kernels do not report.
func ofFigure(figure func(*cgstats.Detail) cgstats.Figure) func(*measured, emit) {
	return ofDetail(func(d *cgstats.Detail, emit emit) {
		if f := figure(d); f.Known {
			emit(f.Value)
		}
	})
}

func limitFigure(f cgstats.Figure) cgstats.Figure {
	return cgstats.Figure{Value: limit(f.Value), Known: f.Known}
}

// ofTimes converts a CPU time. cgroup v2 reports CPU times with the usage. Both versions report
// them in the details.
func ofTimes(value func(*cgstats.CPU) uint64) func(*measured, emit) {
	return func(m *measured, emit emit) {
		switch {
		case m.detail != nil && m.detail.CPU.TimesKnown:
			emit(value(&m.detail.CPU))
		case m.usage != nil && m.usage.CPU.TimesKnown:
			emit(value(&m.usage.CPU))
		}
	}
}

// ofQuota emits a value only for containers with a CPU quota, as cAdvisor does.
func ofQuota(value func(*cgstats.CPU) uint64) func(*measured, emit) {
	return func(m *measured, emit emit) {
		if m.detail != nil && m.detail.CPU.QuotaKnown && m.container != nil && m.container.Resources.GetCpuQuota() > 0 {
			emit(value(&m.detail.CPU))
		}
	}
}

func ofMemory(value func(*cgstats.Memory) uint64) func(*measured, emit) {
	return func(m *measured, emit emit) {
		if m.usage != nil && m.usage.Memory.Known {
			emit(value(&m.usage.Memory))
		}
	}
}

func ofHugePages(figure func(*cgstats.HugePages) cgstats.Figure) func(*measured, emit) {
	return ofDetail(func(d *cgstats.Detail, emit emit) {
		for _, p := range d.HugePages {
			if f := figure(&p); f.Known {
				emit(f.Value, p.Size)
			}
		}
	})
}

func ofDevices(value func(*cgstats.Device) uint64) func(*measured, emit) {
	return ofDetail(func(d *cgstats.Detail, emit emit) {
		for _, dev := range d.Devices {
			emit(value(&dev), deviceName(&dev))
		}
	})
}

func ofFilesystem(value func(*stats.Filesystem, *stats.Sample) uint64) func(*measured, emit) {
	return func(m *measured, emit emit) {
		if m.sample != nil && m.filesystem != nil {
			emit(value(m.filesystem, m.sample), m.filesystem.Device)
		}
	}
}

func ofProcesses(values func(*stats.Processes, emit)) func(*measured, emit) {
	return func(m *measured, emit emit) {
		if m.sample != nil && m.sample.Processes != nil {
			values(m.sample.Processes, emit)
		}
	}
}

func ofInterfaces(value func(*cgstats.Interface) uint64) func(*measured, emit) {
	return func(m *measured, emit emit) {
		for _, i := range m.interfaces {
			emit(value(&i), i.Name)
		}
	}
}

func ofContainer(values func(*state.Container, emit)) func(*measured, emit) {
	return func(m *measured, emit emit) {
		if m.container != nil {
			values(m.container, emit)
		}
	}
}

func ofPressure(of func(*stats.Usage) (*cgstats.Pressure, *cgstats.Stall)) func(*measured, emit) {
	return func(m *measured, emit emit) {
		if m.usage == nil {
			return
		}
		if p, stall := of(m.usage); p.Known {
			emit(stall.Total)
		}
	}
}

// Descriptors returns the descriptors of all metrics in the order of answers.
func Descriptors() []*runtimeapi.MetricDescriptor {
	var all []*runtimeapi.MetricDescriptor
	for _, m := range metrics {
		all = append(all, &runtimeapi.MetricDescriptor{Name: m.name, Help: m.help,
			LabelKeys: slices.Concat(baseLabels, m.labels)})
	}
	return all
}

// OfContainer returns a container's metrics. image is the image's name in the container's request.
// detail is nil if it was not measured.
func OfContainer(pod *state.Pod, image string, c *stats.ContainerUsage, detail *cgstats.Detail,
	filesystem *stats.Filesystem) []*runtimeapi.Metric {
	md := pod.Config.GetMetadata()
	labels := []string{c.Info.Config.GetMetadata().GetName(), c.Cgroup, image, c.Info.ID, md.GetNamespace(), md.GetName()}
	return take(labels, &measured{
		usage:      &c.Usage,
		detail:     detail,
		container:  c.Info,
		sample:     c.Sample,
		filesystem: filesystem,
	})
}

// OfPod returns the metrics of the pod's cgroup and of the pod's network, which its containers
// share. The cgroup's metrics have no container label, as with cAdvisor.
func OfPod(stats *stats.PodUsage) []*runtimeapi.Metric {
	md := stats.Info.Config.GetMetadata()
	labels := func(container string) []string {
		return []string{container, stats.Cgroup, "", stats.Info.ID, md.GetNamespace(), md.GetName()}
	}
	return append(take(labels(""), &measured{usage: &stats.Usage}), take(labels(podContainer),
		&measured{interfaces: stats.Interfaces})...)
}

// take computes all metrics for which m has values.
func take(labels []string, m *measured) []*runtimeapi.Metric {
	var all []*runtimeapi.Metric
	for _, one := range metrics {
		one.values(m, func(v uint64, own ...string) {
			taken := &runtimeapi.Metric{Name: one.name, MetricType: one.kind, LabelValues: slices.Concat(labels, own),
				Value: &runtimeapi.UInt64Value{Value: v}}
			if one.seconds {
				taken.Value.Value = v / uint64(time.Second)
				taken.DoubleValue = &runtimeapi.DoubleValue{Value: float64(v) / float64(time.Second)}
			}
			if one.counted != nil {
				taken.Timestamp = one.counted(m).UnixNano()
			}
			all = append(all, taken)
		})
	}
	return all
}
