package integration

import (
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func (c *container) stats(t *testing.T) *runtimeapi.ContainerStats {
	t.Helper()
	return get(c.pod.d.cri.ContainerStats(t.Context(), c.id))(t)
}

func (p *pod) stats(t *testing.T) *runtimeapi.PodSandboxStats {
	t.Helper()
	return get(p.d.cri.PodSandboxStats(t.Context(), p.id))(t)
}

// waitProcesses waits until the pod has so many, with its pause. What launches a
// container has threads, and is in its cgroup until it executes the command.
func (p *pod) waitProcesses(t *testing.T, want uint64) {
	t.Helper()
	eventually(t, "processes of the pod", func() error {
		if n := p.stats(t).Linux.Process.ProcessCount.Value; n != want {
			return unexpected("their number", n, want)
		}
		return nil
	})
}

// A container that works is seen to: CPU time, and from the second sample on how
// many cores it is that it uses.
func TestStatsCPU(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	busy, idle := pod.run(t, script("while :; do :; done")), pod.run(t)
	first := busy.stats(t)
	if first.Cpu.UsageNanoCores != nil {
		t.Errorf("a rate from one sample: %v", first.Cpu)
	}
	idle.stats(t)
	var second *runtimeapi.ContainerStats
	eventually(t, "the second sample has a rate", func() error {
		second = busy.stats(t)
		if second.Cpu.UsageNanoCores == nil || second.Cpu.Timestamp-first.Cpu.Timestamp < int64(time.Second) {
			return fmt.Errorf("CPU: %v", second.Cpu)
		}
		return nil
	})
	used := second.Cpu.UsageCoreNanoSeconds.Value - first.Cpu.UsageCoreNanoSeconds.Value
	if used == 0 {
		t.Errorf("no CPU time was used between %v and %v", first.Cpu, second.Cpu)
	}
	// One loop is one core at most; the clock of the scheduler ticks every few ms.
	if rate := second.Cpu.UsageNanoCores.Value; rate == 0 || rate > 1_200_000_000 {
		t.Errorf("%d nanocores", rate)
	}
	if rate := idle.stats(t).Cpu.UsageNanoCores; rate == nil || rate.Value > second.Cpu.UsageNanoCores.Value/2 {
		t.Errorf("the idle container uses %v", rate)
	}
	whole := pod.stats(t).Linux
	if whole.Cpu.UsageCoreNanoSeconds.Value < second.Cpu.UsageCoreNanoSeconds.Value {
		t.Errorf("the pod used less than its container: %v, %v", whole.Cpu, second.Cpu)
	}
	pod.waitProcesses(t, 3)
	equal(t, "containers in the pod", len(whole.Containers), 2)
	equal(t, "network of a pod on the node's", whole.Network.String(), "<nil>")
	if cgroup2() != (second.Cpu.Psi != nil) {
		t.Errorf("pressure: %v", second.Cpu.Psi)
	}

	d.restart(t) // counters go on, a rate takes two samples of the new daemon
	after := busy.stats(t)
	if after.Cpu.UsageCoreNanoSeconds.Value <= second.Cpu.UsageCoreNanoSeconds.Value || after.Cpu.UsageNanoCores != nil {
		t.Errorf("after a restart: %v, before %v", after.Cpu, second.Cpu)
	}
	pod.waitProcesses(t, 3)
}

func TestStatsMemory(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	const limit, size = 128 << 20, 48 << 20
	// dd allocates its buffer, fills it, and waits with it for a reader.
	c := pod.run(t, script(fmt.Sprintf("mkfifo /tmp/f; exec 3<>/tmp/f; exec dd if=/dev/zero of=/tmp/f bs=%d count=2", size)),
		resources(func(r *runtimeapi.LinuxContainerResources) {
			r.MemoryLimitInBytes, r.MemorySwapLimitInBytes = limit, limit
		}))
	var m *runtimeapi.MemoryUsage
	eventually(t, "the memory is seen", func() error {
		s := c.stats(t)
		if m = s.Memory; m.UsageBytes.GetValue() < size || m.RssBytes.GetValue() < size {
			return fmt.Errorf("memory: %v", m)
		}
		return nil
	})
	if m.WorkingSetBytes.Value < size || m.WorkingSetBytes.Value > m.UsageBytes.Value {
		t.Errorf("working set: %v", m)
	}
	equal(t, "working set and available", m.WorkingSetBytes.Value+m.AvailableBytes.GetValue(), limit)
	if m.PageFaults.Value == 0 {
		t.Errorf("page faults: %v", m)
	}
	if swap := c.stats(t).Swap; swap != nil { // where the kernel counts it
		equal(t, "swap", swap.SwapUsageBytes.Value, 0)
		equal(t, "swap that is left", swap.SwapAvailableBytes.GetValue(), 0)
	}
	if whole := pod.stats(t).Linux.Memory; whole.UsageBytes.Value < size || whole.AvailableBytes != nil {
		t.Errorf("memory of the pod, which has no limit: %v", whole)
	}
}

func TestStatsNetwork(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t)
	c := pod.run(t)
	before := pod.stats(t).Linux.Network
	equal(t, "the default interface", before.DefaultInterface.Name, "eth0")
	// Some kernels give each network namespace devices for tunnels, as sit0.
	equal(t, "other interfaces", len(before.Interfaces), len(strings.Fields(c.exec(t, "ls", "/sys/class/net")))-len([]string{"lo", "eth0"}))
	listener := get(net.Listen("tcp", ":0"))(t)
	defer listener.Close()
	const size = 200_000
	received := make(chan int64, 1)
	go func() {
		var n int64
		if conn, err := listener.Accept(); err == nil {
			n, _ = io.Copy(io.Discard, conn) // the number is what is looked at
			conn.Close()
		}
		received <- n
	}()
	_, port, err := net.SplitHostPort(listener.Addr().String())
	must(t, err)
	c.exec(t, "sh", "-c", fmt.Sprintf("head -c %d /dev/zero | nc $(ip route | sed -n 's/^default via \\([^ ]*\\).*/\\1/p') %s", size, port))
	equal(t, "bytes that came", <-received, size)
	var after *runtimeapi.NetworkUsage
	eventually(t, "the traffic is seen", func() error {
		after = pod.stats(t).Linux.Network
		if sent := after.DefaultInterface.TxBytes.Value - before.DefaultInterface.TxBytes.Value; sent < size {
			return fmt.Errorf("sent %d bytes: %v", sent, after)
		}
		return nil
	})
	d.restart(t)
	if again := pod.stats(t).Linux.Network; again.DefaultInterface.TxBytes.Value < after.DefaultInterface.TxBytes.Value {
		t.Errorf("after a restart: %v, before %v", again, after)
	}
}

// What a list tells is what the single call tells, and only of what runs.
func TestStatsLists(t *testing.T) {
	d := startDaemon(t)
	pod, stopped := d.runPod(t, hostNetwork, podLabel("app", "a")), d.runPod(t, hostNetwork)
	running, created := pod.run(t), pod.create(t)
	exited, _ := pod.runToEnd(t, command("true"))
	stopped.run(t)
	stopped.stop(t)

	list := get(d.cri.ListContainerStats(t.Context(), nil))(t)
	if len(list) != 1 || list[0].Attributes.Id != running.id {
		t.Fatalf("running containers: %v", list)
	}
	single := running.stats(t)
	equal(t, "attributes", single.Attributes.String(), list[0].Attributes.String())
	if a, b := list[0].Cpu.UsageCoreNanoSeconds.Value, single.Cpu.UsageCoreNanoSeconds.Value; a > b || b == 0 {
		t.Errorf("CPU time in the list %d, then %d", a, b)
	}
	for _, c := range []*container{created, exited} {
		if s := c.stats(t); s.Attributes.Id != c.id || s.Cpu != nil || s.Memory != nil {
			t.Errorf("a container that does not run: %v", s)
		}
	}
	pods := get(d.cri.ListPodSandboxStats(t.Context(), nil))(t)
	if len(pods) != 1 || pods[0].Attributes.Id != pod.id || len(pods[0].Linux.Containers) != 1 {
		t.Fatalf("ready pods: %v", pods)
	}
	equal(t, "attributes of the pod", pods[0].Attributes.String(), pod.stats(t).Attributes.String())
	if s := stopped.stats(t); s.Attributes.Id != stopped.id || s.Linux == nil || s.Linux.Cpu != nil {
		t.Errorf("a stopped pod: %v", s)
	}

	raw := rawRuntime(t, d)
	containers := get(raw.StreamContainerStats(t.Context(), &runtimeapi.StreamContainerStatsRequest{}))(t)
	if m := get(containers.Recv())(t); len(m.ContainerStats) != 1 || m.ContainerStats[0].Attributes.Id != running.id {
		t.Errorf("streamed: %v", m)
	}
	if _, err := containers.Recv(); err != io.EOF {
		t.Errorf("the stream of containers does not end: %v", err)
	}
	podStream := get(raw.StreamPodSandboxStats(t.Context(), &runtimeapi.StreamPodSandboxStatsRequest{}))(t)
	if m := get(podStream.Recv())(t); len(m.PodSandboxStats) != 1 || m.PodSandboxStats[0].Attributes.Id != pod.id {
		t.Errorf("streamed: %v", m)
	}
	if _, err := podStream.Recv(); err != io.EOF {
		t.Errorf("the stream of pods does not end: %v", err)
	}
}

// A pod that names no cgroup is the sum of its parts.
func TestStatsOfPodWithoutCgroup(t *testing.T) {
	d := startDaemon(t)
	config := d.podConfig(t, hostNetwork)
	config.Linux.CgroupParent = ""
	pod := d.runPodConfig(t, config)
	a, b := pod.run(t), pod.run(t)
	one, two := a.stats(t), b.stats(t)
	whole := pod.stats(t).Linux
	if sum := one.Cpu.UsageCoreNanoSeconds.Value + two.Cpu.UsageCoreNanoSeconds.Value; whole.Cpu.UsageCoreNanoSeconds.Value < sum {
		t.Errorf("CPU time of the pod %v, of its containers %d", whole.Cpu, sum)
	}
	if whole.Memory.UsageBytes.Value < one.Memory.UsageBytes.Value/2 {
		t.Errorf("memory of the pod %v, of a container %v", whole.Memory, one.Memory)
	}
	pod.waitProcesses(t, 3)
}

// Asking opens files, and the end of what they tell of closes them.
func TestStatsFilesAreClosed(t *testing.T) {
	d := startDaemon(t)
	before := len(openFiles(d.cmd.Process.Pid))
	pod := d.runPod(t)
	for range 3 {
		c := pod.run(t)
		pod.stats(t)
		c.stop(t, 0)
	}
	pod.stats(t)
	if now := len(openFiles(d.cmd.Process.Pid)); now <= before {
		t.Errorf("no file of the pod's is open: %d, before %d", now, before)
	}
	pod.stop(t)
	eventually(t, "all files are closed", func() error {
		if diff := d.snapshot(t).grown(d.empty); len(diff) > 0 {
			for _, line := range diff {
				if contains(line, "fd of the daemon") {
					return fmt.Errorf("%s", line)
				}
			}
		}
		return nil
	})
}

// What a container writes is counted in the background, and kubelet hears of it by
// container and by filesystem.
func TestStatsWritableLayer(t *testing.T) {
	d := startDaemon(t, withConfig(`stats_period = "100ms"`))
	pod := d.runPod(t, hostNetwork)
	c := pod.run(t)
	const size = 3 << 20
	c.exec(t, "sh", "-c", fmt.Sprintf("mkdir -p /data && head -c %d /dev/zero >/data/file && ln /data/file /data/again && ln -s /proc /data/link", size))
	counted := func(least uint64) *runtimeapi.FilesystemUsage {
		t.Helper()
		var layer *runtimeapi.FilesystemUsage
		eventually(t, "the writable layer is counted", func() error {
			layer = c.stats(t).WritableLayer
			if layer.GetUsedBytes().GetValue() < least {
				return fmt.Errorf("it is %v", layer)
			}
			return nil
		})
		return layer
	}
	layer := counted(size)
	if layer.UsedBytes.Value > size+1<<20 || layer.InodesUsed.Value < 4 || layer.Timestamp <= 0 {
		t.Errorf("writable layer: %v", layer)
	}
	info := get(d.images.ImageFsInfo(t.Context()))(t)
	images, containers := info.ImageFilesystems[0], info.ContainerFilesystems[0]
	if containers.UsedBytes.Value < size || images.UsedBytes.Value == 0 || containers.InodesUsed.Value < 4 {
		t.Errorf("filesystems: %v", info)
	}
	equal(t, "one filesystem has one name", containers.FsId.Mountpoint, images.FsId.Mountpoint)
	equal(t, "the writable layer's filesystem", layer.FsId.Mountpoint, containers.FsId.Mountpoint)

	c.stop(t, 0) // what it wrote is there until it is removed
	counted(size)
	d.restart(t)
	counted(size)
	must(t, d.cri.RemoveContainer(t.Context(), c.id))
	equal(t, "bytes of no container", get(d.images.ImageFsInfo(t.Context()))(t).ContainerFilesystems[0].UsedBytes.Value, 0)
}

// Writable layers on a filesystem of their own have another name than the images',
// which is how kubelet knows (KEP-4191).
func TestStatsSplitFilesystem(t *testing.T) {
	onItsOwn := func(t *testing.T, d *daemon) {
		must(t, os.MkdirAll(d.root+"/rootfs", 0o700))
		must(t, unix.Mount("writable", d.root+"/rootfs", "tmpfs", 0, "size=64m"))
		d.mounts = append(d.mounts, d.root+"/rootfs")
	}
	d := startDaemon(t, onItsOwn)
	c := d.runPod(t, hostNetwork).run(t)
	info := get(d.images.ImageFsInfo(t.Context()))(t)
	equal(t, "the images' filesystem", info.ImageFilesystems[0].FsId.Mountpoint, d.root+"/images")
	equal(t, "the containers' filesystem", info.ContainerFilesystems[0].FsId.Mountpoint, d.root+"/rootfs")
	eventually(t, "the writable layer is counted", func() error {
		if layer := c.stats(t).WritableLayer; layer.GetFsId().GetMountpoint() != d.root+"/rootfs" {
			return fmt.Errorf("it is %v", layer)
		}
		return nil
	})
}

// The metrics of a real container agree with their descriptors and with what it does.
func TestStatsMetrics(t *testing.T) {
	d := startDaemon(t, withConfig(`stats_period = "100ms"`))
	pod := d.runPod(t)
	c := pod.run(t, script("echo x >/written; exec 5</dev/null 6</dev/null; while :; do :; done"), resources(func(r *runtimeapi.LinuxContainerResources) {
		r.CpuQuota, r.MemoryLimitInBytes, r.MemorySwapLimitInBytes = 50000, 64<<20, 64<<20
	}))
	pod.runToEnd(t, command("true"))
	labels := map[string]int{}
	for _, m := range get(d.cri.ListMetricDescriptors(t.Context()))(t) {
		labels[m.Name] = len(m.LabelKeys)
	}
	var values map[string]uint64
	eventually(t, "the container works and is counted", func() error {
		list := get(d.cri.ListPodSandboxMetrics(t.Context()))(t)
		if len(list) != 1 || list[0].PodSandboxId != pod.id || len(list[0].ContainerMetrics) != 1 || list[0].ContainerMetrics[0].ContainerId != c.id {
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
				return fmt.Errorf("%s is 0 or not there", name)
			}
		}
		return nil
	})
	for name, want := range map[string]uint64{"container_spec_cpu_quota": 50000, "container_spec_cpu_period": 100000, "container_spec_cpu_shares": 2,
		"container_spec_memory_limit_bytes": 64 << 20, "container_processes": 1, "container_threads": 1, "container_oom_events_total": 0, "container_sockets": 0} {
		if got, there := values[name]; !there || got != want {
			t.Errorf("%s is %d (%v), want %d", name, got, there, want)
		}
	}
	if n := values["container_file_descriptors"]; n < 5 || n > 20 {
		t.Errorf("%d file descriptors", n)
	}
	for _, name := range []string{"container_network_transmit_bytes_total", "container_sockets", "container_last_seen", "container_memory_failures_total"} {
		if _, there := values[name]; !there {
			t.Errorf("%s is not there", name)
		}
	}
	stream := get(rawRuntime(t, d).StreamPodSandboxMetrics(t.Context(), &runtimeapi.StreamPodSandboxMetricsRequest{}))(t)
	if m := get(stream.Recv())(t); len(m.PodSandboxMetrics) != 1 || m.PodSandboxMetrics[0].PodSandboxId != pod.id {
		t.Errorf("streamed: %v", m)
	}
	if _, err := stream.Recv(); err != io.EOF {
		t.Errorf("the stream does not end: %v", err)
	}
}
