package server

import (
	"context"
	"iter"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/cgstats"
	"berth/internal/diskusage"
	"berth/sandbox/state"
	"berth/sandbox/stats"
)

// Statistics is the part of the sandbox manager that measures containers and pods.
type Statistics interface {
	ContainerStats(info *state.Container) (stats.ContainerUsage, error)
	PodStats(info *state.Pod, containers []*state.Container) (stats.PodUsage, error)
	ContainerDetail(id string) (*cgstats.Detail, error)
	WritableFilesystem() stats.Filesystem
}

// ContainerStats implements RuntimeService. The answer for a stopped container lacks CPU and
// memory.
func (s *runtimeService) ContainerStats(_ context.Context,
	req *runtimeapi.ContainerStatsRequest) (*runtimeapi.ContainerStatsResponse, error) {
	if err := need(field{"container_id", req.GetContainerId() != ""}); err != nil {
		return nil, err
	}
	c, err := s.pods.Container(req.GetContainerId())
	if err != nil {
		return nil, err
	}
	stats, err := s.pods.ContainerStats(c)
	if err != nil {
		return nil, err
	}
	return &runtimeapi.ContainerStatsResponse{Stats: containerStats(&stats)}, nil
}

// ListContainerStats implements RuntimeService.
func (s *runtimeService) ListContainerStats(ctx context.Context,
	req *runtimeapi.ListContainerStatsRequest) (*runtimeapi.ListContainerStatsResponse, error) {
	resp := &runtimeapi.ListContainerStatsResponse{}
	for stats := range s.allContainerStats(ctx, req.GetFilter()) {
		resp.Stats = append(resp.Stats, stats)
	}
	return resp, ctx.Err()
}

// StreamContainerStats implements RuntimeService.
func (s *runtimeService) StreamContainerStats(req *runtimeapi.StreamContainerStatsRequest,
	stream runtimeapi.RuntimeService_StreamContainerStatsServer) error {
	return sendBatches(s.allContainerStats(stream.Context(), req.GetFilter()),
		func(batch []*runtimeapi.ContainerStats) error {
			return stream.Send(&runtimeapi.StreamContainerStatsResponse{ContainerStats: batch})
		})
}

// allContainerStats measures the running containers that match until ctx ends. It leaves out
// containers that cannot be measured.
func (s *runtimeService) allContainerStats(ctx context.Context,
	filter *runtimeapi.ContainerStatsFilter) iter.Seq[*runtimeapi.ContainerStats] {
	return func(yield func(*runtimeapi.ContainerStats) bool) {
		containers := s.pods.Containers()
		id, known := resolve(filter.GetId(), containers, func(c *state.Container) string { return c.ID })
		pod, podKnown := resolve(filter.GetPodSandboxId(), s.pods.Pods(), func(p *state.Pod) string { return p.ID })
		if !known || !podKnown {
			return
		}
		for _, c := range containers {
			if ctx.Err() != nil {
				return
			}
			if c.State() != runtimeapi.ContainerState_CONTAINER_RUNNING || id != "" && c.ID != id || pod != "" &&
				c.PodID != pod ||
				!selected(filter.GetLabelSelector(), c.Config.GetLabels()) {
				continue
			}
			stats, err := s.pods.ContainerStats(c)
			if err != nil {
				s.unmeasured.containers.Warn(s.log, "measure container", "container", c.ID, "error", err)
			}
			if stats.Running && !yield(containerStats(&stats)) {
				return
			}
		}
	}
}

// PodSandboxStats implements RuntimeService. The answer for a pod that is not ready lacks CPU,
// memory, network and processes.
func (s *runtimeService) PodSandboxStats(_ context.Context,
	req *runtimeapi.PodSandboxStatsRequest) (*runtimeapi.PodSandboxStatsResponse, error) {
	if err := need(field{"pod_sandbox_id", req.GetPodSandboxId() != ""}); err != nil {
		return nil, err
	}
	pod, err := s.pods.Pod(req.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	stats, err := s.pods.PodStats(pod, s.containersByPod()[pod.ID])
	if err != nil {
		return nil, err
	}
	return &runtimeapi.PodSandboxStatsResponse{Stats: podStats(&stats)}, nil
}

// ListPodSandboxStats implements RuntimeService.
func (s *runtimeService) ListPodSandboxStats(ctx context.Context,
	req *runtimeapi.ListPodSandboxStatsRequest) (*runtimeapi.ListPodSandboxStatsResponse, error) {
	resp := &runtimeapi.ListPodSandboxStatsResponse{}
	for stats := range s.allPodStats(ctx, req.GetFilter()) {
		resp.Stats = append(resp.Stats, podStats(&stats))
	}
	return resp, ctx.Err()
}

// StreamPodSandboxStats implements RuntimeService.
func (s *runtimeService) StreamPodSandboxStats(req *runtimeapi.StreamPodSandboxStatsRequest,
	stream runtimeapi.RuntimeService_StreamPodSandboxStatsServer) error {
	items := func(yield func(*runtimeapi.PodSandboxStats) bool) {
		for stats := range s.allPodStats(stream.Context(), req.GetFilter()) {
			if !yield(podStats(&stats)) {
				return
			}
		}
	}
	return sendBatches(items, func(batch []*runtimeapi.PodSandboxStats) error {
		return stream.Send(&runtimeapi.StreamPodSandboxStatsResponse{PodSandboxStats: batch})
	})
}

// allPodStats measures the ready pods that match until ctx ends. It leaves out pods that cannot be
// measured.
func (s *runtimeService) allPodStats(ctx context.Context,
	filter *runtimeapi.PodSandboxStatsFilter) iter.Seq[stats.PodUsage] {
	return func(yield func(stats.PodUsage) bool) {
		pods := s.pods.Pods()
		id, known := resolve(filter.GetId(), pods, func(p *state.Pod) string { return p.ID })
		if !known {
			return
		}
		containers := s.containersByPod()
		for _, pod := range pods {
			if ctx.Err() != nil {
				return
			}
			if !pod.Ready() || id != "" && pod.ID != id || !selected(filter.GetLabelSelector(), pod.Config.GetLabels()) {
				continue
			}
			stats, err := s.pods.PodStats(pod, containers[pod.ID])
			if err != nil {
				s.unmeasured.pods.Warn(s.log, "measure pod", "pod", pod.ID, "error", err)
			}
			if stats.Running && !yield(stats) {
				return
			}
		}
	}
}

// containersByPod returns all containers by the ID of their pod, oldest first.
func (s *runtimeService) containersByPod() map[string][]*state.Container {
	byPod := map[string][]*state.Container{}
	for _, c := range s.pods.Containers() {
		byPod[c.PodID] = append(byPod[c.PodID], c)
	}
	return byPod
}

func containerStats(stats *stats.ContainerUsage) *runtimeapi.ContainerStats {
	item := &runtimeapi.ContainerStats{Attributes: &runtimeapi.ContainerAttributes{
		Id:          stats.Info.ID,
		Metadata:    stats.Info.Config.GetMetadata(),
		Labels:      stats.Info.Config.GetLabels(),
		Annotations: stats.Info.Config.GetAnnotations(),
	}}
	if u := &stats.Usage; stats.Running {
		item.Cpu, item.Memory, item.Swap, item.Io = cpuUsage(u), memoryUsage(u), swapUsage(u), ioUsage(u)
	}
	if c := stats.Sample; c != nil {
		item.WritableLayer = filesystemUsage(c.Mountpoint, c.At, c.Layer)
	}
	return item
}

func filesystemUsage(mountpoint string, at time.Time, used diskusage.Usage) *runtimeapi.FilesystemUsage {
	return &runtimeapi.FilesystemUsage{Timestamp: at.UnixNano(),
		FsId:      &runtimeapi.FilesystemIdentifier{Mountpoint: mountpoint},
		UsedBytes: value(used.Bytes), InodesUsed: value(used.Inodes)}
}

func podStats(stats *stats.PodUsage) *runtimeapi.PodSandboxStats {
	item := &runtimeapi.PodSandboxStats{
		Attributes: &runtimeapi.PodSandboxAttributes{
			Id:          stats.Info.ID,
			Metadata:    stats.Info.Config.GetMetadata(),
			Labels:      stats.Info.Config.GetLabels(),
			Annotations: stats.Info.Config.GetAnnotations(),
		},
		Linux: &runtimeapi.LinuxPodSandboxStats{},
	}
	for _, c := range stats.Containers {
		item.Linux.Containers = append(item.Linux.Containers, containerStats(&c))
	}
	if u := &stats.Usage; stats.Running {
		item.Linux.Cpu, item.Linux.Memory, item.Linux.Io = cpuUsage(u), memoryUsage(u), ioUsage(u)
		// pids.current counts threads, as CRI-O's statistics do. containerd and cAdvisor count
		// processes. kubelet ranks pods by this value, and threads use up the node's PIDs.
		if u.TasksKnown {
			item.Linux.Process = &runtimeapi.ProcessUsage{Timestamp: u.At.UnixNano(), ProcessCount: value(u.Tasks)}
		}
		item.Linux.Network = networkUsage(stats)
	}
	return item
}

// cpuUsage returns nil if the kernel does not count CPU time per cgroup. Other unknown fields are
// left out too, because kubelet takes every value for a measurement.
func cpuUsage(u *stats.Usage) *runtimeapi.CpuUsage {
	if !u.CPU.Known {
		return nil
	}
	cpu := &runtimeapi.CpuUsage{
		Timestamp:            u.At.UnixNano(),
		UsageCoreNanoSeconds: value(u.CPU.Usage),
		Psi:                  psi(&u.CPU.Pressure),
	}
	if u.NanoCoresKnown {
		cpu.UsageNanoCores = value(u.NanoCores)
	}
	return cpu
}

func memoryUsage(u *stats.Usage) *runtimeapi.MemoryUsage {
	if !u.Memory.Known {
		return nil
	}
	memory := &runtimeapi.MemoryUsage{
		Timestamp:       u.At.UnixNano(),
		WorkingSetBytes: value(u.Memory.WorkingSet()),
		UsageBytes:      value(u.Memory.Usage),
		RssBytes:        value(u.Memory.RSS),
		PageFaults:      value(u.Memory.PageFaults),
		MajorPageFaults: value(u.Memory.MajorPageFaults),
		Psi:             psi(&u.Memory.Pressure),
	}
	if available, limited := u.Memory.Available(); limited {
		memory.AvailableBytes = value(available)
	}
	return memory
}

func swapUsage(u *stats.Usage) *runtimeapi.SwapUsage {
	if !u.Memory.SwapKnown {
		return nil
	}
	swap := &runtimeapi.SwapUsage{Timestamp: u.At.UnixNano(), SwapUsageBytes: value(u.Memory.Swap)}
	if available, limited := u.Memory.SwapAvailable(); limited {
		swap.SwapAvailableBytes = value(available)
	}
	return swap
}

func ioUsage(u *stats.Usage) *runtimeapi.IoUsage {
	if !u.IO.Known {
		return nil
	}
	return &runtimeapi.IoUsage{Timestamp: u.At.UnixNano(), Psi: psi(&u.IO)}
}

func psi(p *cgstats.Pressure) *runtimeapi.PsiStats {
	if !p.Known {
		return nil
	}
	return &runtimeapi.PsiStats{Some: psiData(&p.Some), Full: psiData(&p.Full)}
}

func psiData(s *cgstats.Stall) *runtimeapi.PsiData {
	return &runtimeapi.PsiData{Total: s.Total, Avg10: s.Avg10, Avg60: s.Avg60, Avg300: s.Avg300}
}

// Like containerd, networkUsage returns the traffic of all interfaces, including the default
// interface. kubelet's summary copies the list. If the default interface were missing, readers of
// the summary would think that the pod has no network. networkUsage returns nil for pods on the
// host's network, because kubelet reads the default interface without a check for nil.
func networkUsage(stats *stats.PodUsage) *runtimeapi.NetworkUsage {
	if len(stats.Interfaces) == 0 {
		return nil
	}
	network := &runtimeapi.NetworkUsage{Timestamp: stats.Usage.At.UnixNano(),
		DefaultInterface: interfaceUsage(&stats.Interfaces[0])}
	for _, in := range stats.Interfaces {
		network.Interfaces = append(network.Interfaces, interfaceUsage(&in))
	}
	return network
}

func interfaceUsage(in *cgstats.Interface) *runtimeapi.NetworkInterfaceUsage {
	return &runtimeapi.NetworkInterfaceUsage{Name: in.Name, RxBytes: value(in.Rx.Bytes), RxErrors: value(in.Rx.Errors),
		TxBytes: value(in.Tx.Bytes), TxErrors: value(in.Tx.Errors)}
}

func value(v uint64) *runtimeapi.UInt64Value { return &runtimeapi.UInt64Value{Value: v} }
