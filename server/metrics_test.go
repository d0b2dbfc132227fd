package server

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image"
	"berth/internal/cgstats"
	"berth/internal/diskusage"
	"berth/internal/testutil"
	"berth/sandbox/state"
	"berth/sandbox/stats"
)

// cadvisorNames are the metrics of kubelet's cAdvisor that critest of cri-tools v1.37 expects.
const cadvisorNames = `container_blkio_device_usage_total container_cpu_cfs_periods_total container_cpu_cfs_throttled_periods_total
container_cpu_cfs_throttled_seconds_total container_cpu_system_seconds_total container_cpu_usage_seconds_total container_cpu_user_seconds_total
container_file_descriptors container_fs_inodes_free container_fs_inodes_total container_fs_limit_bytes container_fs_reads_bytes_total
container_fs_reads_total container_fs_usage_bytes container_fs_writes_bytes_total container_fs_writes_total container_hugetlb_max_usage_bytes
container_hugetlb_usage_bytes container_last_seen container_memory_cache container_memory_failcnt container_memory_failures_total
container_memory_kernel_usage container_memory_mapped_file container_memory_max_usage_bytes container_memory_rss container_memory_swap
container_memory_usage_bytes container_memory_working_set_bytes container_network_receive_bytes_total container_network_receive_errors_total
container_network_receive_packets_dropped_total container_network_receive_packets_total container_network_transmit_bytes_total
container_network_transmit_errors_total container_network_transmit_packets_dropped_total container_network_transmit_packets_total
container_oom_events_total container_pressure_cpu_stalled_seconds_total container_pressure_cpu_waiting_seconds_total
container_pressure_io_stalled_seconds_total container_pressure_io_waiting_seconds_total container_pressure_memory_stalled_seconds_total
container_pressure_memory_waiting_seconds_total container_processes container_sockets container_spec_cpu_period container_spec_cpu_quota
container_spec_cpu_shares container_spec_memory_limit_bytes container_spec_memory_reservation_limit_bytes container_spec_memory_swap_limit_bytes
container_start_time_seconds container_threads container_threads_max container_ulimits_soft`

func (f *fakePods) ContainerDetail(string) (*cgstats.Detail, error) { return f.stats.detail, nil }

func known(v uint64) cgstats.Figure { return cgstats.Figure{Value: v, Known: true} }

// metricsFake returns a pod of one container with a value for every metric.
func metricsFake() *fakePods {
	const second = uint64(time.Second)
	c := runningContainer("c1", "p1", nil)
	c.Config.Image.UserSpecifiedImage = "busybox:1"
	c.Resources = &runtimeapi.LinuxContainerResources{CpuPeriod: 50000, CpuQuota: 25000, CpuShares: 512}
	u := someUsage()
	u.CPU.Usage = 61*second + second/2
	u.CPU.Pressure.Some.Total, u.CPU.Pressure.Full.Total = 7*second+1, 8*second
	return &fakePods{containers: []*state.Container{c}, pods: []*state.Pod{testPod{ID: "p1", Config: podConfig("a", nil), Ready: true}.snapshot(), testPod{ID: "p2", Config: podConfig("b", nil)}.snapshot()},
		stats: statsFake{usage: u,
			interfaces: []cgstats.Interface{{Name: "eth0", Rx: cgstats.Traffic{Bytes: 1, Packets: 2, Errors: 3, Dropped: 4}, Tx: cgstats.Traffic{Bytes: 5, Packets: 6, Errors: 7, Dropped: 8}}},
			sample: &stats.Sample{At: time.Unix(9, 0), Mountpoint: "/writable", Layer: diskusage.Usage{Bytes: 51, Inodes: 52},
				Processes: &stats.Processes{Files: 53, Sockets: 54, MaxFiles: 55}},
			detail: &cgstats.Detail{CPU: cgstats.CPU{Known: true, TimesKnown: true, QuotaKnown: true, Usage: 61*second + second/2, User: 62 * second, System: 63 * second, Periods: 64, ThrottledPeriods: 65, Throttled: 66 * second},
				MaxUsage: known(67), KernelMemory: known(68), LimitHits: known(69), OOMKills: known(70), Tasks: known(71), TasksMax: known(cgstats.Unlimited),
				Processes: known(72), Reservation: known(cgstats.Unlimited),
				Devices:   []cgstats.Device{{Name: "sda", Major: 8, ReadBytes: 73, WriteBytes: 74, Reads: 75, Writes: 76}, {Major: 9, Minor: 1}},
				HugePages: []cgstats.HugePages{{Size: "2MB", Usage: known(77), Max: known(78)}}}}}
}

// Each metric has a descriptor with the same number of labels and vice versa, and all of cAdvisor's
// metrics exist.
func TestMetricsMatchDescriptors(t *testing.T) {
	t.Parallel()
	h := start(t, testConfig, metricsFake(), &fakeImages{images: []*image.Image{{ID: idA}}})
	described, err := h.runtime.ListMetricDescriptors(t.Context(), &runtimeapi.ListMetricDescriptorsRequest{})
	testutil.Must(t, err)
	descriptors := map[string]*runtimeapi.MetricDescriptor{}
	for _, d := range described.Descriptors {
		if descriptors[d.Name] != nil || d.Help == "" || !strings.HasPrefix(strings.Join(d.LabelKeys, " "), "container id image name namespace pod") {
			t.Errorf("descriptor %v", d)
		}
		descriptors[d.Name] = d
	}
	for name := range strings.FieldsSeq(cadvisorNames) {
		if descriptors[name] == nil {
			t.Errorf("%s is missing", name)
		}
	}
	list, err := h.runtime.ListPodSandboxMetrics(t.Context(), &runtimeapi.ListPodSandboxMetricsRequest{})
	if err != nil || len(list.PodMetrics) != 1 || list.PodMetrics[0].PodSandboxId != "p1" || len(list.PodMetrics[0].ContainerMetrics) != 1 {
		t.Fatalf("%v, %v", list, err)
	}
	pod := list.PodMetrics[0]
	series, used := map[string]bool{}, map[string]bool{}
	for _, m := range slices.Concat(pod.Metrics, pod.ContainerMetrics[0].Metrics) {
		d := descriptors[m.Name]
		if d == nil || len(d.LabelKeys) != len(m.LabelValues) {
			t.Errorf("descriptor %v, metric %v", d, m)
		}
		key := m.Name + fmt.Sprintf("%q", m.LabelValues)
		if series[key] { // a duplicate would break kubelet's whole page
			t.Errorf("twice: %s", key)
		}
		odd := m.Name == "container_memory_failcnt" || m.Name == "container_fs_inodes_total" // with cAdvisor too
		if (m.MetricType == runtimeapi.MetricType_COUNTER) == strings.HasSuffix(m.Name, "_total") == odd {
			t.Errorf("%s is a %v", m.Name, m.MetricType)
		}
		series[key], used[m.Name] = true, true
	}
	for name := range descriptors {
		if !used[name] {
			t.Errorf("%s has a descriptor but no value", name)
		}
	}
	stream, err := h.runtime.StreamPodSandboxMetrics(t.Context(), &runtimeapi.StreamPodSandboxMetricsRequest{})
	testutil.Must(t, err)
	streamed := drain(t, stream.Recv, (*runtimeapi.StreamPodSandboxMetricsResponse).GetPodSandboxMetrics)
	if !slices.EqualFunc(streamed, list.PodMetrics, func(a, b *runtimeapi.PodSandboxMetrics) bool { return proto.Equal(a, b) }) {
		t.Errorf("the stream sent %v", streamed)
	}
	if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("after its end: %v", err)
	}
}

func TestMetricValues(t *testing.T) {
	t.Parallel()
	h := start(t, testConfig, metricsFake(), &fakeImages{images: []*image.Image{{ID: idA}}})
	list, err := h.runtime.ListPodSandboxMetrics(t.Context(), &runtimeapi.ListPodSandboxMetricsRequest{})
	testutil.Must(t, err)
	const ofContainer, ofPod, ofNetwork = "[c1 /cgroup/c1 busybox:1 c1 ns a", "[ /cgroup/p1  p1 ns a", "[POD /cgroup/p1  p1 ns a"
	got, fractions := map[string]uint64{}, map[string]float64{}
	for _, m := range slices.Concat(list.PodMetrics[0].Metrics, list.PodMetrics[0].ContainerMetrics[0].Metrics) {
		if inSeconds := strings.HasSuffix(m.Name, "_seconds_total"); inSeconds != (m.DoubleValue != nil) {
			t.Errorf("%s has the double value %v", m.Name, m.DoubleValue)
		}
		fractions[m.Name] = m.DoubleValue.GetValue()
		labels := fmt.Sprint(m.LabelValues)
		own, found := strings.CutPrefix(labels, ofContainer)
		if !found {
			own, found = strings.CutPrefix(labels, ofNetwork)
		}
		if whole, isPod := strings.CutPrefix(labels, ofPod); isPod {
			got["pod "+strings.TrimPrefix(m.Name, "container_")+strings.TrimSuffix(whole, "]")] = m.Value.Value
			continue
		}
		if !found || strings.HasPrefix(m.Name, "container_network_") != strings.HasPrefix(labels, ofNetwork) {
			t.Errorf("%s has the labels %v", m.Name, labels)
		}
		counted := strings.HasPrefix(m.Name, "container_fs_") && !strings.HasSuffix(m.Name, "_total") || m.Name == "container_fs_inodes_total" ||
			slices.Contains([]string{"container_file_descriptors", "container_sockets", "container_ulimits_soft"}, m.Name)
		at := int64(0)
		switch {
		case counted && strings.HasPrefix(m.Name, "container_fs_") && m.Name != "container_fs_usage_bytes":
			at = time.Unix(7, 8).UnixNano()
		case counted:
			at = 9e9
		}
		if m.Timestamp != at {
			t.Errorf("%s has the timestamp %d", m.Name, m.Timestamp)
		}
		got[strings.TrimPrefix(m.Name, "container_")+strings.TrimSuffix(own, "]")] = m.Value.Value
	}
	for name, want := range map[string]uint64{
		"cpu_usage_seconds_total total": 61, "pod cpu_usage_seconds_total total": 61, "pod memory_working_set_bytes": 900, "pod memory_rss": 16,
		"cpu_user_seconds_total": 62, "cpu_system_seconds_total": 63, "cpu_cfs_periods_total": 64, "cpu_cfs_throttled_periods_total": 65,
		"cpu_cfs_throttled_seconds_total": 66, "memory_max_usage_bytes": 67, "memory_kernel_usage": 68, "memory_failcnt": 69, "oom_events_total": 70,
		"memory_usage_bytes": 1000, "memory_working_set_bytes": 900, "memory_rss": 16, "memory_cache": 17, "memory_mapped_file": 18, "memory_swap": 21,
		"memory_failures_total pgfault container": 19, "memory_failures_total pgmajfault hierarchy": 20, "spec_memory_limit_bytes": 5000, "spec_memory_swap_limit_bytes": 31,
		"spec_memory_reservation_limit_bytes": 0, "spec_cpu_period": 50000, "spec_cpu_quota": 25000, "spec_cpu_shares": 512, "start_time_seconds": 2, "last_seen": 5,
		"threads": 71, "threads_max": 0, "processes": 72, "file_descriptors": 53, "sockets": 54, "ulimits_soft max_open_files": 55,
		"fs_usage_bytes /dev/vdb": 51, "fs_limit_bytes /dev/vdb": 43, "fs_inodes_total /dev/vdb": 44, "fs_inodes_free /dev/vdb": 45,
		"fs_reads_bytes_total /dev/sda": 73, "fs_writes_bytes_total /dev/sda": 74, "fs_reads_total /dev/sda": 75, "fs_writes_total /dev/sda": 76, "fs_reads_total 9:1": 0,
		"blkio_device_usage_total /dev/sda 8 0 Write": 74, "hugetlb_usage_bytes 2MB": 77, "hugetlb_max_usage_bytes 2MB": 78,
		"pressure_cpu_waiting_seconds_total": 7, "pressure_cpu_stalled_seconds_total": 8,
		"network_receive_bytes_total eth0": 1, "network_receive_packets_total eth0": 2, "network_receive_errors_total eth0": 3, "network_receive_packets_dropped_total eth0": 4,
		"network_transmit_bytes_total eth0": 5, "network_transmit_packets_total eth0": 6, "network_transmit_errors_total eth0": 7, "network_transmit_packets_dropped_total eth0": 8,
	} {
		if v, ok := got[name]; !ok || v != want {
			t.Errorf("%s is %d (%v), want %d", name, v, ok, want)
		}
	}
	for name, want := range map[string]float64{"container_cpu_usage_seconds_total": 61.5, "container_cpu_user_seconds_total": 62,
		"container_cpu_cfs_throttled_seconds_total": 66, "container_pressure_cpu_waiting_seconds_total": 7.000000001} {
		if fractions[name] != want {
			t.Errorf("the double value of %s is %v, want %v", name, fractions[name], want)
		}
	}
}
