package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image"
	"berth/internal/cgstats"
	"berth/internal/diskusage"
	"berth/internal/errdefs"
	"berth/internal/testutil"
	"berth/sandbox/state"
	"berth/sandbox/stats"
)

// statsFake measures running objects, and fails for the IDs in broken.
type statsFake struct {
	usage      stats.Usage
	interfaces []cgstats.Interface
	sample     *stats.Sample
	detail     *cgstats.Detail
	broken     []string
}

func (f *fakePods) ContainerStats(c *state.Container) (stats.ContainerUsage, error) {
	stats := stats.ContainerUsage{Info: c, Cgroup: "/cgroup/" + c.ID}
	if slices.Contains(f.stats.broken, c.ID) {
		return stats, errdefs.Internal("read cgroup of %s", c.ID)
	}
	if c.State() == runtimeapi.ContainerState_CONTAINER_RUNNING {
		stats.Running, stats.Usage = true, f.stats.usage
	}
	stats.Sample = f.stats.sample
	return stats, nil
}

func (f *fakePods) PodStats(p *state.Pod, containers []*state.Container) (stats.PodUsage, error) {
	stats := stats.PodUsage{Info: p, Cgroup: "/cgroup/" + p.ID}
	if slices.Contains(f.stats.broken, p.ID) {
		return stats, errdefs.Internal("read cgroup of %s", p.ID)
	}
	for _, c := range containers {
		if one, err := f.ContainerStats(c); err == nil && one.Running {
			stats.Containers = append(stats.Containers, one)
		}
	}
	if p.Ready() {
		stats.Running, stats.Usage, stats.Interfaces = true, f.stats.usage, f.stats.interfaces
	}
	return stats, nil
}

func (f *fakePods) WritableFilesystem() stats.Filesystem {
	return stats.Filesystem{At: time.Unix(7, 8), Mountpoint: "/writable", Device: "/dev/vdb", Used: diskusage.Usage{Bytes: 41, Inodes: 42},
		Bytes: 43, Inodes: 44, FreeInodes: 45}
}

// someUsage returns a usage with a different value in each field.
func someUsage() stats.Usage {
	return stats.Usage{NanoCores: 11, NanoCoresKnown: true, Sample: cgstats.Sample{At: time.Unix(5, 6), Tasks: 12, TasksKnown: true,
		CPU: cgstats.CPU{Known: true, Usage: 13, User: 113, System: 114, Periods: 115, ThrottledPeriods: 116, Throttled: 117,
			Pressure: cgstats.Pressure{Known: true, Some: cgstats.Stall{Total: 14, Avg10: 1.5, Avg60: 2.5, Avg300: 3.5}, Full: cgstats.Stall{Total: 15}}},
		Memory: cgstats.Memory{Known: true, Usage: 1000, Limit: 5000, RSS: 16, Cache: 17, MappedFile: 18, InactiveFile: 100, ActiveFile: 118, PageFaults: 19,
			MajorPageFaults: 20, SwapKnown: true, Swap: 21, SwapLimit: 31, Pressure: cgstats.Pressure{Known: true, Full: cgstats.Stall{Total: 22}}},
		IO: cgstats.Pressure{Known: true, Full: cgstats.Stall{Total: 23}},
	}}
}

func runningContainer(id, pod string, labels map[string]string) *state.Container {
	cfg := containerConfig(id, idA)
	cfg.Labels, cfg.Annotations = labels, map[string]string{"n": " kept\n"}
	return testContainer{ID: id, PodID: pod, Config: cfg, State: runtimeapi.ContainerState_CONTAINER_RUNNING, ImageID: idA, StartedAt: time.Unix(2, 0)}.snapshot()
}

func TestStatsAreTranslated(t *testing.T) {
	u := someUsage()
	pods := &fakePods{containers: []*state.Container{runningContainer("c1", "p1", nil)},
		pods: []*state.Pod{testPod{ID: "p1", Config: podConfig("a", nil), Ready: true}.snapshot()},
		stats: statsFake{usage: u, sample: &stats.Sample{At: time.Unix(9, 0), Mountpoint: "/writable", Layer: diskusage.Usage{Bytes: 51, Inodes: 52}}, interfaces: []cgstats.Interface{
			{Name: "eth0", Rx: cgstats.Traffic{Bytes: 1, Packets: 2, Errors: 3, Dropped: 4}, Tx: cgstats.Traffic{Bytes: 5, Packets: 6, Errors: 7, Dropped: 8}}, {Name: "net1"}}}}
	h := start(t, testConfig, pods, &fakeImages{})
	at := u.At.UnixNano()
	v := value
	none := &runtimeapi.PsiData{}
	cpu := &runtimeapi.CpuUsage{Timestamp: at, UsageCoreNanoSeconds: v(13), UsageNanoCores: v(11), Psi: &runtimeapi.PsiStats{
		Some: &runtimeapi.PsiData{Total: 14, Avg10: 1.5, Avg60: 2.5, Avg300: 3.5}, Full: &runtimeapi.PsiData{Total: 15}}}
	memory := &runtimeapi.MemoryUsage{Timestamp: at, WorkingSetBytes: v(900), AvailableBytes: v(4100), UsageBytes: v(1000), RssBytes: v(16), PageFaults: v(19),
		MajorPageFaults: v(20), Psi: &runtimeapi.PsiStats{Some: none, Full: &runtimeapi.PsiData{Total: 22}}}
	disk := &runtimeapi.IoUsage{Timestamp: at, Psi: &runtimeapi.PsiStats{Some: none, Full: &runtimeapi.PsiData{Total: 23}}}
	want := &runtimeapi.ContainerStats{Cpu: cpu, Memory: memory, Io: disk,
		Attributes:    &runtimeapi.ContainerAttributes{Id: "c1", Metadata: &runtimeapi.ContainerMetadata{Name: "c1", Attempt: 2}, Annotations: map[string]string{"n": " kept\n"}},
		Swap:          &runtimeapi.SwapUsage{Timestamp: at, SwapUsageBytes: v(21), SwapAvailableBytes: v(10)},
		WritableLayer: &runtimeapi.FilesystemUsage{Timestamp: 9e9, FsId: &runtimeapi.FilesystemIdentifier{Mountpoint: "/writable"}, UsedBytes: v(51), InodesUsed: v(52)}}
	one, err := h.runtime.ContainerStats(t.Context(), &runtimeapi.ContainerStatsRequest{ContainerId: "c1"})
	if err != nil || !proto.Equal(one.Stats, want) {
		t.Errorf("error %v\n got %v\nwant %v", err, one.GetStats(), want)
	}
	cfg := podConfig("a", nil)
	wantPod := &runtimeapi.PodSandboxStats{Attributes: &runtimeapi.PodSandboxAttributes{Id: "p1", Metadata: cfg.Metadata, Annotations: cfg.Annotations},
		Linux: &runtimeapi.LinuxPodSandboxStats{Cpu: cpu, Memory: memory, Io: disk, Containers: []*runtimeapi.ContainerStats{want},
			Process: &runtimeapi.ProcessUsage{Timestamp: at, ProcessCount: v(12)},
			Network: &runtimeapi.NetworkUsage{Timestamp: at,
				DefaultInterface: &runtimeapi.NetworkInterfaceUsage{Name: "eth0", RxBytes: v(1), RxErrors: v(3), TxBytes: v(5), TxErrors: v(7)},
				Interfaces: []*runtimeapi.NetworkInterfaceUsage{{Name: "eth0", RxBytes: v(1), RxErrors: v(3), TxBytes: v(5), TxErrors: v(7)},
					{Name: "net1", RxBytes: v(0), RxErrors: v(0), TxBytes: v(0), TxErrors: v(0)}}}}}
	pod, err := h.runtime.PodSandboxStats(t.Context(), &runtimeapi.PodSandboxStatsRequest{PodSandboxId: "p1"})
	if err != nil || !proto.Equal(pod.Stats, wantPod) {
		t.Errorf("error %v\n got %v\nwant %v", err, pod.GetStats(), wantPod)
	}
}

// kubelet takes 0 for a measured value, so unknown values are left out.
func TestStatsOmitUnknownValues(t *testing.T) {
	u := stats.Usage{Sample: cgstats.Sample{At: time.Unix(1, 0), CPU: cgstats.CPU{Known: true}, Memory: cgstats.Memory{Known: true, Limit: cgstats.Unlimited, SwapKnown: true, SwapLimit: cgstats.Unlimited}}}
	pods := &fakePods{containers: []*state.Container{runningContainer("c1", "p1", nil), exited()},
		pods:  []*state.Pod{testPod{ID: "p1", Config: podConfig("a", nil), Ready: true}.snapshot(), testPod{ID: "p2", Config: podConfig("b", nil)}.snapshot()},
		stats: statsFake{usage: u}}
	pods.containers[1].ID = "c2"
	h := start(t, testConfig, pods, &fakeImages{})
	one, err := h.runtime.ContainerStats(t.Context(), &runtimeapi.ContainerStatsRequest{ContainerId: "c1"})
	testutil.Must(t, err)
	s := one.Stats
	if s.Cpu.UsageNanoCores != nil || s.Cpu.Psi != nil || s.Memory.AvailableBytes != nil || s.Memory.Psi != nil || s.Swap.SwapAvailableBytes != nil || s.Io != nil || s.WritableLayer != nil {
		t.Errorf("got %v", s)
	}
	pods.stats.usage = stats.Usage{Sample: cgstats.Sample{At: time.Unix(1, 0)}}
	one, err = h.runtime.ContainerStats(t.Context(), &runtimeapi.ContainerStatsRequest{ContainerId: "c1"})
	if s := one.GetStats(); err != nil || s.Cpu != nil || s.Memory != nil || s.Swap != nil || s.Io != nil {
		t.Errorf("%v, %v", s, err)
	}
	one, err = h.runtime.ContainerStats(t.Context(), &runtimeapi.ContainerStatsRequest{ContainerId: "c2"})
	if s := one.GetStats(); err != nil || s.Attributes.Id != "c2" || s.Cpu != nil || s.Memory != nil {
		t.Errorf("exited: %v, %v", s, err)
	}
	for _, id := range []string{"p1", "p2"} {
		pod, err := h.runtime.PodSandboxStats(t.Context(), &runtimeapi.PodSandboxStatsRequest{PodSandboxId: id})
		if s := pod.GetStats().GetLinux(); err != nil || s == nil || s.Network != nil || s.Process != nil {
			t.Errorf("%s: %v, %v", id, s, err)
		}
	}
}

func TestStatsErrors(t *testing.T) {
	pods := &fakePods{containers: []*state.Container{runningContainer("c1", "p1", nil)}, stats: statsFake{broken: []string{"c1", "p1"}},
		pods: []*state.Pod{testPod{ID: "p1", Config: podConfig("a", nil), Ready: true}.snapshot()}}
	h := start(t, testConfig, pods, &fakeImages{})
	for id, code := range map[string]codes.Code{"": codes.InvalidArgument, "x": codes.NotFound} {
		if _, err := h.runtime.ContainerStats(t.Context(), &runtimeapi.ContainerStatsRequest{ContainerId: id}); status.Code(err) != code {
			t.Errorf("container %q: %v", id, err)
		}
		if _, err := h.runtime.PodSandboxStats(t.Context(), &runtimeapi.PodSandboxStatsRequest{PodSandboxId: id}); status.Code(err) != code {
			t.Errorf("pod %q: %v", id, err)
		}
	}
	if _, err := h.runtime.ContainerStats(t.Context(), &runtimeapi.ContainerStatsRequest{ContainerId: "c1"}); status.Code(err) != codes.Internal {
		t.Errorf("broken container: %v", err)
	}
	if _, err := h.runtime.PodSandboxStats(t.Context(), &runtimeapi.PodSandboxStatsRequest{PodSandboxId: "p1"}); status.Code(err) != codes.Internal {
		t.Errorf("broken pod: %v", err)
	}
}

// Lists and streams contain all running objects that match. An object that cannot be measured is
// logged and left out.
func TestStatsListsAndBatches(t *testing.T) {
	app := map[string]string{"app": "x"}
	stopped := exitedNow(runningContainer("c4", "p2", app))
	pods := &fakePods{
		containers: []*state.Container{runningContainer("c1", "p1", app), runningContainer("c2", "p2", nil), runningContainer("c3", "p2", app), stopped, runningContainer("c5", "p2", app)},
		pods: []*state.Pod{testPod{ID: "p1", Config: podConfig("a", app), Ready: true}.snapshot(), testPod{ID: "p2", Config: podConfig("b", nil), Ready: true}.snapshot(),
			testPod{ID: "p3", Config: podConfig("c", app)}.snapshot(), testPod{ID: "p4", Config: podConfig("d", app), Ready: true}.snapshot()},
		stats: statsFake{usage: someUsage(), broken: []string{"c5", "p4"}}}
	h := start(t, testConfig, pods, &fakeImages{})
	for _, c := range []struct {
		want   string
		filter *runtimeapi.ContainerStatsFilter
	}{
		{"c1 c2 c3", nil}, {"c1", &runtimeapi.ContainerStatsFilter{Id: "c1"}}, {"c1", &runtimeapi.ContainerStatsFilter{Id: "c1", LabelSelector: app}},
		{"c2 c3", &runtimeapi.ContainerStatsFilter{PodSandboxId: "p2"}}, {"c1 c3", &runtimeapi.ContainerStatsFilter{LabelSelector: app}},
		{"c3", &runtimeapi.ContainerStatsFilter{LabelSelector: app, PodSandboxId: "p2"}}, {"", &runtimeapi.ContainerStatsFilter{Id: "c4"}},
		{"", &runtimeapi.ContainerStatsFilter{Id: "c1", PodSandboxId: "p2"}}, {"", &runtimeapi.ContainerStatsFilter{Id: "unknown"}},
		{"", &runtimeapi.ContainerStatsFilter{PodSandboxId: "unknown"}},
	} {
		want, filter := c.want, c.filter
		list, err := h.runtime.ListContainerStats(t.Context(), &runtimeapi.ListContainerStatsRequest{Filter: filter})
		testutil.Must(t, err)
		var ids []string
		for _, s := range list.Stats {
			ids = append(ids, s.Attributes.Id)
		}
		if strings.Join(ids, " ") != want {
			t.Errorf("%v: %v", filter, ids)
		}
		stream, err := h.runtime.StreamContainerStats(t.Context(), &runtimeapi.StreamContainerStatsRequest{Filter: filter})
		testutil.Must(t, err)
		got := drain(t, stream.Recv, (*runtimeapi.StreamContainerStatsResponse).GetContainerStats)
		if !slices.EqualFunc(got, list.Stats, func(a, b *runtimeapi.ContainerStats) bool { return proto.Equal(a, b) }) {
			t.Errorf("%v: the stream sent %v", filter, got)
		}
	}
	for _, c := range []struct {
		want   string
		filter *runtimeapi.PodSandboxStatsFilter
	}{
		{"p1[c1] p2[c2 c3]", nil}, {"p1[c1]", &runtimeapi.PodSandboxStatsFilter{LabelSelector: app}}, {"p2[c2 c3]", &runtimeapi.PodSandboxStatsFilter{Id: "p2"}},
		{"", &runtimeapi.PodSandboxStatsFilter{Id: "p3"}}, {"", &runtimeapi.PodSandboxStatsFilter{Id: "p2", LabelSelector: app}},
	} {
		want, filter := c.want, c.filter
		list, err := h.runtime.ListPodSandboxStats(t.Context(), &runtimeapi.ListPodSandboxStatsRequest{Filter: filter})
		testutil.Must(t, err)
		var found []string
		for _, s := range list.Stats {
			var ids []string
			for _, c := range s.Linux.Containers {
				ids = append(ids, c.Attributes.Id)
			}
			found = append(found, s.Attributes.Id+fmt.Sprint(ids))
		}
		if strings.Join(found, " ") != want {
			t.Errorf("%v: %v", filter, found)
		}
		stream, err := h.runtime.StreamPodSandboxStats(t.Context(), &runtimeapi.StreamPodSandboxStatsRequest{Filter: filter})
		testutil.Must(t, err)
		got := drain(t, stream.Recv, (*runtimeapi.StreamPodSandboxStatsResponse).GetPodSandboxStats)
		if !slices.EqualFunc(got, list.Stats, func(a, b *runtimeapi.PodSandboxStats) bool { return proto.Equal(a, b) }) {
			t.Errorf("%v: the stream sent %v", filter, got)
		}
	}
	if log := h.log.String(); !strings.Contains(log, "read cgroup of c5") || !strings.Contains(log, "read cgroup of p4") {
		t.Errorf("the log does not name the failed measurement:\n%s", log)
	}
}

// drain reads a stream to its end.
func drain[M, T any](t *testing.T, recv func() (M, error), items func(M) []T) (all []T) {
	t.Helper()
	for {
		m, err := recv()
		if errors.Is(err, io.EOF) {
			return all
		}
		testutil.Must(t, err)
		if len(items(m)) == 0 {
			t.Error("a message without items")
		}
		all = append(all, items(m)...)
	}
}

// A cancelled client causes no further work.
func TestStatsListsStop(t *testing.T) {
	s := &runtimeService{pods: metricsFake(), images: &fakeImages{images: []*image.Image{{ID: idA}}}, log: slog.New(slog.DiscardHandler)}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	containers, err1 := s.ListContainerStats(ctx, nil)
	pods, err2 := s.ListPodSandboxStats(ctx, nil)
	metrics, err3 := s.ListPodSandboxMetrics(ctx, nil)
	for _, err := range []error{err1, err2, err3} {
		if !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	}
	if len(containers.GetStats())+len(pods.GetStats())+len(metrics.GetPodMetrics()) > 0 {
		t.Errorf("measured: %v %v %v", containers, pods, metrics)
	}
}
