package integration

import (
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/inventory"
	"berth/integration/machine"
)

func containerStats(t *testing.T, c *harness.Container) *runtimeapi.ContainerStats {
	t.Helper()
	return harness.Get(c.Pod.D.Cri.ContainerStats(t.Context(), c.Id))(t)
}

func podStats(t *testing.T, p *harness.Pod) *runtimeapi.PodSandboxStats {
	t.Helper()
	return harness.Get(p.D.Cri.PodSandboxStats(t.Context(), p.Id))(t)
}

// waitProcesses waits until the pod has this number of processes, including its pause. A launcher
// has threads in the container's cgroup until it executes the command.
func waitProcesses(t *testing.T, p *harness.Pod, want uint64) {
	t.Helper()
	harness.EventuallyGot(t, fmt.Sprintf("%d processes in the pod", want), func() (bool, any) { n := podStats(t, p).Linux.Process.ProcessCount.Value; return n == want, n })
}

// The statistics of a busy container contain its CPU time, and from the second sample on the number
// of used cores.
func TestStatsCPU(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	busy, idle := pod.Run(t, harness.Script("while :; do :; done")), pod.Run(t)
	idle.Pid(t) // waits until it has executed its command
	first := containerStats(t, busy)
	if first.Cpu.UsageNanoCores != nil {
		t.Errorf("a rate after one sample: %v", first.Cpu)
	}
	containerStats(t, idle)
	var second *runtimeapi.ContainerStats
	harness.EventuallyGot(t, "the second sample has a rate", func() (bool, any) {
		second = containerStats(t, busy)
		return second.Cpu.UsageNanoCores != nil && second.Cpu.Timestamp-first.Cpu.Timestamp >= int64(time.Second), second
	})
	used := second.Cpu.UsageCoreNanoSeconds.Value - first.Cpu.UsageCoreNanoSeconds.Value
	if used == 0 {
		t.Errorf("no CPU time was used between %v and %v", first.Cpu, second.Cpu)
	}
	// One loop uses at most one core. The scheduler's clock ticks every few ms.
	if rate := second.Cpu.UsageNanoCores.Value; rate == 0 || rate > 1_200_000_000 {
		t.Errorf("%d nanocores", rate)
	}
	if rate := containerStats(t, idle).Cpu.UsageNanoCores; rate == nil || rate.Value > second.Cpu.UsageNanoCores.Value/2 {
		t.Errorf("the idle container uses %v", rate)
	}
	whole := podStats(t, pod).Linux
	if whole.Cpu.UsageCoreNanoSeconds.Value < second.Cpu.UsageCoreNanoSeconds.Value {
		t.Errorf("the pod used less than its container: %v, %v", whole.Cpu, second.Cpu)
	}
	waitProcesses(t, pod, 3)
	harness.Equal(t, "containers in the pod", len(whole.Containers), 2)
	harness.Equal(t, "network of a pod on the node's", whole.Network.String(), "<nil>")
	if machine.Cgroup2() != (second.Cpu.Psi != nil) {
		t.Errorf("pressure: %v", second.Cpu.Psi)
	}

	d.Restart(t) // counters continue; a rate needs two samples of the new daemon
	after := containerStats(t, busy)
	if after.Cpu.UsageCoreNanoSeconds.Value <= second.Cpu.UsageCoreNanoSeconds.Value || after.Cpu.UsageNanoCores != nil {
		t.Errorf("after a restart: %v, before %v", after.Cpu, second.Cpu)
	}
	waitProcesses(t, pod, 3)
}

func TestStatsMemory(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	const limit, size = 128 << 20, 48 << 20
	c := pod.Run(t, holding(size),
		harness.Resources(func(r *runtimeapi.LinuxContainerResources) {
			r.MemoryLimitInBytes, r.MemorySwapLimitInBytes = limit, limit
		}))
	var m *runtimeapi.MemoryUsage
	harness.EventuallyGot(t, "the statistics show the memory", func() (bool, any) {
		s := containerStats(t, c)
		m = s.Memory
		return m.UsageBytes.GetValue() >= size && m.RssBytes.GetValue() >= size, m
	})
	if m.WorkingSetBytes.Value < size || m.WorkingSetBytes.Value > m.UsageBytes.Value {
		t.Errorf("working set: %v", m)
	}
	harness.Equal(t, "working set and available", m.WorkingSetBytes.Value+m.AvailableBytes.GetValue(), limit)
	if m.PageFaults.Value == 0 {
		t.Errorf("page faults: %v", m)
	}
	if swap := containerStats(t, c).Swap; swap != nil { // if the kernel counts it
		harness.Equal(t, "swap", swap.SwapUsageBytes.Value, 0)
		harness.Equal(t, "available swap", swap.SwapAvailableBytes.GetValue(), 0)
	}
	if whole := podStats(t, pod).Linux.Memory; whole.UsageBytes.Value < size || whole.AvailableBytes != nil {
		t.Errorf("memory of the pod, which has no limit: %v", whole)
	}
}

// The pressure of CPU, memory and I/O comes from the container's cgroup.
func TestStatsPressure(t *testing.T) {
	if !machine.Cgroup2() {
		t.Skip("the kernel reports pressure only for cgroup v2")
	}
	d := harness.StartDaemon(t)
	c := d.RunPod(t, harness.HostNetwork).Run(t, harness.Script("while :; do :; done"), harness.Resources(func(r *runtimeapi.LinuxContainerResources) {
		r.CpuQuota, r.CpuPeriod = 10_000, 100_000
	}))
	dir := machine.CgroupDir(t, c.Pid(t), "cpu")
	of := map[string]func(s *runtimeapi.ContainerStats) *runtimeapi.PsiStats{
		"cpu":    func(s *runtimeapi.ContainerStats) *runtimeapi.PsiStats { return s.Cpu.Psi },
		"memory": func(s *runtimeapi.ContainerStats) *runtimeapi.PsiStats { return s.Memory.Psi },
		"io":     func(s *runtimeapi.ContainerStats) *runtimeapi.PsiStats { return s.Io.GetPsi() },
	}
	harness.EventuallyGot(t, "a throttled container has CPU pressure", func() (bool, any) {
		s := containerStats(t, c)
		return of["cpu"](s).GetSome().GetTotal() != 0 && of["cpu"](s).GetFull().GetTotal() != 0, s
	})
	for what, psi := range of {
		path := filepath.Join(dir, what+".pressure")
		before := kernelPressure(t, path)
		got := psi(containerStats(t, c))
		after := kernelPressure(t, path)
		if got == nil {
			t.Errorf("the statistics contain no pressure of %s", what)
			continue
		}
		for kind, total := range map[string]uint64{"some": got.Some.GetTotal(), "full": got.Full.GetTotal()} {
			if total < before[kind] || total > after[kind] {
				t.Errorf("%s.%s is %d ns, want a value between %d and %d", what, kind, total, before[kind], after[kind])
			}
		}
	}
}

// kernelPressure returns the totals in a pressure file, in ns.
func kernelPressure(t *testing.T, path string) map[string]uint64 {
	t.Helper()
	totals := map[string]uint64{}
	for _, line := range machine.ReadLines(path) {
		kind, rest, _ := strings.Cut(line, " ")
		_, total, _ := strings.Cut(rest, "total=")
		totals[kind] = 1000 * harness.Get(strconv.ParseUint(total, 10, 64))(t)
	}
	harness.Equal(t, "lines of "+path, len(totals), 2)
	return totals
}

func TestStatsNetwork(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t)
	c := pod.Run(t)
	before := podStats(t, pod).Linux.Network
	harness.Equal(t, "the default interface", before.DefaultInterface.Name, "eth0")
	// Some kernels create tunnel devices such as sit0 in each network namespace.
	want := slices.DeleteFunc(strings.Fields(c.Exec(t, "ls", "/sys/class/net")), func(name string) bool { return name == "lo" })
	var listed []string
	for _, in := range before.Interfaces {
		listed = append(listed, in.Name)
	}
	slices.Sort(listed)
	slices.Sort(want)
	harness.Equal(t, "all interfaces", strings.Join(listed, " "), strings.Join(want, " "))
	for _, in := range before.Interfaces {
		if in.Name == "eth0" && in.TxBytes.GetValue() != before.DefaultInterface.TxBytes.GetValue() {
			t.Errorf("the list and the default interface have different counts: %v", before)
		}
	}
	listener := harness.Get(net.Listen("tcp", ":0"))(t)
	defer listener.Close()
	const size = 200_000
	received := make(chan int64, 1)
	go func() {
		var n int64
		if conn, err := listener.Accept(); err == nil {
			n, _ = io.Copy(io.Discard, conn) // only the number matters
			conn.Close()
		}
		received <- n
	}()
	_, port, err := net.SplitHostPort(listener.Addr().String())
	harness.Must(t, err)
	c.Exec(t, "sh", "-c", fmt.Sprintf("head -c %d /dev/zero | nc $(ip route | sed -n 's/^default via \\([^ ]*\\).*/\\1/p') %s", size, port))
	harness.Equal(t, "received bytes", <-received, size)
	var after *runtimeapi.NetworkUsage
	harness.EventuallyGot(t, "the statistics show the traffic", func() (bool, any) {
		after = podStats(t, pod).Linux.Network
		sent := after.DefaultInterface.TxBytes.Value - before.DefaultInterface.TxBytes.Value
		return sent >= size, sent
	})
	d.Restart(t)
	if again := podStats(t, pod).Linux.Network; again.DefaultInterface.TxBytes.Value < after.DefaultInterface.TxBytes.Value {
		t.Errorf("after a restart: %v, before %v", again, after)
	}
}

// A list contains the same statistics as the single call, for running objects only.
func TestStatsLists(t *testing.T) {
	d := harness.StartDaemon(t)
	pod, stopped := d.RunPod(t, harness.HostNetwork, harness.PodLabel("app", "a")), d.RunPod(t, harness.HostNetwork)
	running, created := pod.Run(t), pod.Create(t)
	exited, _ := pod.RunToEnd(t, harness.Command("true"))
	stopped.Run(t)
	stopped.Stop(t)

	list := harness.Get(d.Cri.ListContainerStats(t.Context(), nil))(t)
	if len(list) != 1 || list[0].Attributes.Id != running.Id {
		t.Fatalf("running containers: %v", list)
	}
	single := containerStats(t, running)
	harness.Equal(t, "attributes", single.Attributes.String(), list[0].Attributes.String())
	if a, b := list[0].Cpu.UsageCoreNanoSeconds.Value, single.Cpu.UsageCoreNanoSeconds.Value; a > b || b == 0 {
		t.Errorf("CPU time in the list %d, then %d", a, b)
	}
	for _, c := range []*harness.Container{created, exited} {
		if s := containerStats(t, c); s.Attributes.Id != c.Id || s.Cpu != nil || s.Memory != nil {
			t.Errorf("statistics of a stopped container: %v", s)
		}
	}
	pods := harness.Get(d.Cri.ListPodSandboxStats(t.Context(), nil))(t)
	if len(pods) != 1 || pods[0].Attributes.Id != pod.Id || len(pods[0].Linux.Containers) != 1 {
		t.Fatalf("ready pods: %v", pods)
	}
	harness.Equal(t, "attributes of the pod", pods[0].Attributes.String(), podStats(t, pod).Attributes.String())
	if s := podStats(t, stopped); s.Attributes.Id != stopped.Id || s.Linux == nil || s.Linux.Cpu != nil {
		t.Errorf("statistics of a stopped pod: %v", s)
	}

	raw := harness.RawRuntime(t, d)
	containers := harness.Get(raw.StreamContainerStats(t.Context(), &runtimeapi.StreamContainerStatsRequest{}))(t)
	if m := harness.Get(containers.Recv())(t); len(m.ContainerStats) != 1 || m.ContainerStats[0].Attributes.Id != running.Id {
		t.Errorf("streamed: %v", m)
	}
	if _, err := containers.Recv(); err != io.EOF {
		t.Errorf("the stream of containers does not end with EOF: %v", err)
	}
	podStream := harness.Get(raw.StreamPodSandboxStats(t.Context(), &runtimeapi.StreamPodSandboxStatsRequest{}))(t)
	if m := harness.Get(podStream.Recv())(t); len(m.PodSandboxStats) != 1 || m.PodSandboxStats[0].Attributes.Id != pod.Id {
		t.Errorf("streamed: %v", m)
	}
	if _, err := podStream.Recv(); err != io.EOF {
		t.Errorf("the stream of pods does not end: %v", err)
	}
}

// The statistics of a pod without a cgroup are the sum of those of its containers and its pause.
func TestStatsOfPodWithoutCgroup(t *testing.T) {
	d := harness.StartDaemon(t)
	config := d.PodConfig(t, harness.HostNetwork)
	config.Linux.CgroupParent = ""
	pod := d.RunPodConfig(t, config)
	a, b := pod.Run(t), pod.Run(t)
	waitProcesses(t, pod, 3) // launchers use more memory than the containers
	one, two := containerStats(t, a), containerStats(t, b)
	whole := podStats(t, pod).Linux
	if sum := one.Cpu.UsageCoreNanoSeconds.Value + two.Cpu.UsageCoreNanoSeconds.Value; whole.Cpu.UsageCoreNanoSeconds.Value < sum {
		t.Errorf("CPU time of the pod %v, of its containers %d", whole.Cpu, sum)
	}
	if whole.Memory.UsageBytes.Value < one.Memory.UsageBytes.Value/2 {
		t.Errorf("memory of the pod %v, of a container %v", whole.Memory, one.Memory)
	}
	busy := pod.Run(t, harness.Script("while [ ! -e /tmp/stop ]; do :; done"))
	const work = uint64(100 * time.Millisecond) // by the kernel's clock; a guest may count little of its host's time
	harness.EventuallyGot(t, "the container has used CPU time", func() (bool, any) {
		used := containerStats(t, busy).Cpu.UsageCoreNanoSeconds.Value
		return used >= work, used
	})
	busy.Release(t, "/tmp/stop")
	busy.WaitExited(t)
	after := podStats(t, pod).Linux.Cpu.UsageCoreNanoSeconds.Value
	if after < whole.Cpu.UsageCoreNanoSeconds.Value+work {
		t.Errorf("CPU time of the pod %d after a container that worked has ended, %v before", after, whole.Cpu)
	}
	harness.Must(t, d.Cri.RemoveContainer(t.Context(), busy.Id))
	a.Stop(t, 0)
	if removed := podStats(t, pod).Linux.Cpu.UsageCoreNanoSeconds.Value; removed < after {
		t.Errorf("CPU time of the pod went from %d to %d", after, removed)
	}
}

// The daemon keeps files open for statistics. It closes them when the object ends.
func TestStatsFilesAreClosed(t *testing.T) {
	d := harness.StartDaemon(t)
	before := len(inventory.OpenFiles(d.Cmd.Process.Pid))
	pod := d.RunPod(t)
	for range 3 {
		c := pod.Run(t)
		podStats(t, pod)
		c.Stop(t, 0)
	}
	podStats(t, pod)
	if now := len(inventory.OpenFiles(d.Cmd.Process.Pid)); now <= before {
		t.Errorf("no file of the pod is open: %d, before %d", now, before)
	}
	pod.Stop(t)
	harness.Eventually(t, "all files are closed", func() error {
		if diff := d.Snapshot(t).Grown(d.Empty); len(diff) > 0 {
			for _, line := range diff {
				if harness.Contains(line, "fd of the daemon") && !harness.Contains(line, "a mount of an image") { // mounts belong to the image
					return fmt.Errorf("%s", line)
				}
			}
		}
		return nil
	})
}

// The daemon counts writable layers in the background. kubelet gets the counts by container and by
// filesystem.
func TestStatsWritableLayer(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithConfig(`container.stats_period = "100ms"`))
	pod := d.RunPod(t, harness.HostNetwork)
	c := pod.Run(t)
	const size = 3 << 20
	c.Exec(t, "sh", "-c", fmt.Sprintf("mkdir -p /data && head -c %d /dev/zero >/data/file && ln /data/file /data/again && ln -s /proc /data/link", size))
	counted := func(least uint64) *runtimeapi.FilesystemUsage {
		t.Helper()
		var layer *runtimeapi.FilesystemUsage
		harness.EventuallyGot(t, "the writable layer is counted", func() (bool, any) {
			layer = containerStats(t, c).WritableLayer
			return layer.GetUsedBytes().GetValue() >= least, layer
		})
		return layer
	}
	layer := counted(size)
	if layer.UsedBytes.Value > size+1<<20 || layer.InodesUsed.Value < 4 || layer.Timestamp <= 0 {
		t.Errorf("writable layer: %v", layer)
	}
	info := harness.Get(d.Images.ImageFsInfo(t.Context()))(t)
	images, containers := info.ImageFilesystems[0], info.ContainerFilesystems[0]
	if containers.UsedBytes.Value < size || images.UsedBytes.Value == 0 || containers.InodesUsed.Value < 4 {
		t.Errorf("filesystems: %v", info)
	}
	harness.Equal(t, "mount point of the common filesystem", containers.FsId.Mountpoint, images.FsId.Mountpoint)
	harness.Equal(t, "the writable layer's filesystem", layer.FsId.Mountpoint, containers.FsId.Mountpoint)

	harness.EventuallyGot(t, "a stopped container was counted again", func() (bool, any) {
		later := containerStats(t, c).WritableLayer
		return later.Timestamp > layer.Timestamp && later.UsedBytes.Value == layer.UsedBytes.Value, later
	})
	c.Exec(t, "sh", "-c", fmt.Sprintf("head -c %d /dev/zero >/data/more", size)) // runs again
	counted(2 * size)
	c.Stop(t, 0) // the layer exists until the container is removed
	counted(size)
	d.Restart(t)
	counted(size)
	harness.Must(t, d.Cri.RemoveContainer(t.Context(), c.Id))
	harness.Equal(t, "bytes of no container", harness.Get(d.Images.ImageFsInfo(t.Context()))(t).ContainerFilesystems[0].UsedBytes.Value, 0)
}

// Writes of another container of the pod into a layer count, even while the layer's own container
// sleeps.
func TestStatsWritableLayerCountsOtherContainersWrites(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithConfig(`container.stats_period = "100ms"`))
	pod := d.RunPod(t, harness.HostNetwork, harness.SharedPID)
	sleeping, writer := pod.Run(t, harness.ContainerNamed("sleeping"), harness.Command("sleep", "98765")), pod.Run(t, harness.ContainerNamed("writer"))
	var before *runtimeapi.FilesystemUsage
	harness.Eventually(t, "the layer is counted twice", func() error {
		layer := containerStats(t, sleeping).WritableLayer
		if layer == nil || before == nil || layer.Timestamp == before.Timestamp {
			before = layer
			return fmt.Errorf("the layer's usage is %v", layer)
		}
		return nil
	})
	const size = 3 << 20
	sleeping.Pid(t) // waits until it has executed its command
	writer.Exec(t, "sh", "-c", fmt.Sprintf(`for p in /proc/[0-9]*; do if grep -q 98765 $p/cmdline && ! grep -q proc $p/cmdline; then head -c %d /dev/zero >$p/root/written; fi; done`, size))
	harness.EventuallyGot(t, "the write is counted", func() (bool, any) {
		layer := containerStats(t, sleeping).WritableLayer
		return layer.UsedBytes.Value >= size, layer
	})
}

// If writable layers have a separate filesystem, its name differs from that of the images'
// filesystem. kubelet detects the split by the names (KEP-4191).
func TestStatsSplitFilesystem(t *testing.T) {
	onItsOwn := func(t *testing.T, d *harness.Daemon) {
		harness.Must(t, os.MkdirAll(d.Root+"/rootfs", 0o700))
		harness.Must(t, unix.Mount("writable", d.Root+"/rootfs", "tmpfs", 0, "size=64m"))
		d.Mounts = append(d.Mounts, d.Root+"/rootfs")
	}
	d := harness.StartDaemon(t, onItsOwn)
	c := d.RunPod(t, harness.HostNetwork).Run(t)
	info := harness.Get(d.Images.ImageFsInfo(t.Context()))(t)
	harness.Equal(t, "the images' filesystem", info.ImageFilesystems[0].FsId.Mountpoint, d.Root+"/images")
	harness.Equal(t, "the containers' filesystem", info.ContainerFilesystems[0].FsId.Mountpoint, d.Root+"/rootfs")
	harness.EventuallyGot(t, "the writable layer is counted", func() (bool, any) {
		layer := containerStats(t, c).WritableLayer
		return layer.GetFsId().GetMountpoint() == d.Root+"/rootfs", layer
	})
}

// The metrics of a real container match their descriptors and its activity.
func TestStatsMetrics(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithConfig(`container.stats_period = "100ms"`))
	pod := d.RunPod(t)
	c := pod.Run(t, harness.Script("echo x >/written; exec 5</dev/null 6</dev/null; while :; do :; done"), harness.Resources(func(r *runtimeapi.LinuxContainerResources) {
		r.CpuQuota, r.MemoryLimitInBytes, r.MemorySwapLimitInBytes = 50000, 64<<20, 64<<20
	}))
	pod.RunToEnd(t, harness.Command("true"))
	labels := map[string]int{}
	for _, m := range harness.Get(d.Cri.ListMetricDescriptors(t.Context()))(t) {
		labels[m.Name] = len(m.LabelKeys)
	}
	var values map[string]uint64
	harness.Eventually(t, "the metrics show the container's activity", func() error {
		list := harness.Get(d.Cri.ListPodSandboxMetrics(t.Context()))(t)
		if len(list) != 1 || list[0].PodSandboxId != pod.Id || len(list[0].ContainerMetrics) != 1 || list[0].ContainerMetrics[0].ContainerId != c.Id {
			return fmt.Errorf("metrics: %v", list)
		}
		values = map[string]uint64{}
		for _, m := range append(list[0].Metrics, list[0].ContainerMetrics[0].Metrics...) {
			if n, described := labels[m.Name]; !described || n != len(m.LabelValues) {
				t.Errorf("the descriptor of %v has %d labels", m, n)
			}
			values[m.Name] = m.Value.Value
		}
		// A user-mode kernel counts a process's own time as the kernel's.
		values["either"] = values["container_cpu_user_seconds_total"] + values["container_cpu_system_seconds_total"]
		for _, name := range []string{"container_cpu_usage_seconds_total", "either", "container_cpu_cfs_periods_total",
			"container_memory_usage_bytes", "container_memory_max_usage_bytes", "container_fs_limit_bytes", "container_fs_usage_bytes", "container_start_time_seconds"} {
			if values[name] == 0 {
				return fmt.Errorf("%s is 0 or missing", name)
			}
		}
		if n := values["container_sockets"]; n > 0 { // sockets of libcontainer's init, if counted before it executed the command
			return fmt.Errorf("%d sockets", n)
		}
		if n := values["container_file_descriptors"]; n < 5 { // counted before the shell had opened its descriptors
			return fmt.Errorf("%d file descriptors", n)
		}
		return nil
	})
	for name, want := range map[string]uint64{"container_spec_cpu_quota": 50000, "container_spec_cpu_period": 100000, "container_spec_cpu_shares": 2,
		"container_spec_memory_limit_bytes": 64 << 20, "container_processes": 1, "container_threads": 1, "container_oom_events_total": 0, "container_sockets": 0} {
		if got, there := values[name]; !there || got != want {
			t.Errorf("%s is %d (%v), want %d", name, got, there, want)
		}
	}
	if n := values["container_file_descriptors"]; n > 20 {
		t.Errorf("%d file descriptors", n)
	}
	for _, name := range []string{"container_network_transmit_bytes_total", "container_sockets", "container_last_seen", "container_memory_failures_total"} {
		if _, there := values[name]; !there {
			t.Errorf("%s is missing", name)
		}
	}
	stream := harness.Get(harness.RawRuntime(t, d).StreamPodSandboxMetrics(t.Context(), &runtimeapi.StreamPodSandboxMetricsRequest{}))(t)
	if m := harness.Get(stream.Recv())(t); len(m.PodSandboxMetrics) != 1 || m.PodSandboxMetrics[0].PodSandboxId != pod.Id {
		t.Errorf("streamed: %v", m)
	}
	if _, err := stream.Recv(); err != io.EOF {
		t.Errorf("the stream does not end: %v", err)
	}
}
