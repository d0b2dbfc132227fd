package integration

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// limits reads what the kernel enforces: memory limit, CPU quota and weight.
func (c *container) limits(t *testing.T) (memory, quota string) {
	t.Helper()
	pid := c.pid(t)
	memory = cgroupFile(t, pid, "memory", "memory.limit_in_bytes", "memory.max")
	quota = cgroupFile(t, pid, "cpu", "cpu.cfs_quota_us", "cpu.max")
	return memory, strings.Fields(quota)[0]
}

func TestContainerResources(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	c := pod.run(t, resources(func(r *runtimeapi.LinuxContainerResources) {
		r.MemoryLimitInBytes, r.CpuQuota, r.CpuPeriod, r.CpuShares, r.CpusetCpus, r.OomScoreAdj = 64<<20, 50000, 100000, 512, "0", 777
	}))
	memory, quota := c.limits(t)
	equal(t, "memory limit", memory, "67108864")
	equal(t, "CPU quota", quota, "50000")
	equal(t, "cpuset", cgroupFile(t, c.pid(t), "cpuset", "cpuset.cpus", "cpuset.cpus"), "0")
	equal(t, "oom_score_adj", c.exec(t, "cat", "/proc/1/oom_score_adj"), "777")
	reported := c.status(t).Resources.GetLinux()
	equal(t, "reported memory limit", reported.GetMemoryLimitInBytes(), int64(64<<20))
	equal(t, "reported quota", reported.GetCpuQuota(), 50000)
	equal(t, "reported shares", reported.GetCpuShares(), 512)
	equal(t, "reported cpuset", reported.GetCpusetCpus(), "0")
}

// Settings of cgroup v2 by name: with v1 they are refused, not ignored.
func TestContainerUnifiedResources(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	unified := resources(func(r *runtimeapi.LinuxContainerResources) {
		r.Unified = map[string]string{"pids.max": "77", "memory.high": "33554432"}
	})
	if !cgroup2() {
		_, err := pod.tryCreate(t, unified)
		wantCode(t, err, codes.InvalidArgument, "unified", "cgroup v2")
		return
	}
	c := pod.run(t, unified)
	equal(t, "pids.max", cgroupFile(t, c.pid(t), "pids", "", "pids.max"), "77")
	equal(t, "memory.high", cgroupFile(t, c.pid(t), "memory", "", "memory.high"), "33554432")
}

func TestUpdateContainerResources(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	initial := resources(func(r *runtimeapi.LinuxContainerResources) { r.MemoryLimitInBytes, r.CpuQuota = 64<<20, 50000 })
	update := &runtimeapi.ContainerResources{Linux: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 128 << 20, CpuQuota: 75000, CpuPeriod: 100000, CpuShares: 1024}}
	check := func(t *testing.T, c *container) {
		t.Helper()
		memory, quota := c.limits(t)
		equal(t, "memory limit", memory, "134217728")
		equal(t, "CPU quota", quota, "75000")
		reported := c.status(t).Resources.GetLinux()
		equal(t, "reported memory limit", reported.GetMemoryLimitInBytes(), int64(128<<20))
		equal(t, "reported quota", reported.GetCpuQuota(), 75000)
	}
	t.Run("running", func(t *testing.T) {
		c := pod.run(t, initial)
		must(t, d.cri.UpdateContainerResources(t.Context(), c.id, update))
		check(t, c)
		d.restart(t)
		check(t, c)
	})
	t.Run("created", func(t *testing.T) {
		c := pod.create(t, initial)
		must(t, d.cri.UpdateContainerResources(t.Context(), c.id, update))
		c.start(t)
		check(t, c)
	})
	t.Run("refused changes nothing", func(t *testing.T) {
		c := pod.run(t, initial)
		bad := &runtimeapi.ContainerResources{Linux: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 128 << 20, CpusetCpus: "not-a-list"}}
		wantCode(t, d.cri.UpdateContainerResources(t.Context(), c.id, bad), codes.InvalidArgument, "not-a-list")
		memory, _ := c.limits(t)
		equal(t, "memory limit", memory, "67108864")
	})
	t.Run("refused by the kernel changes nothing", func(t *testing.T) {
		c := pod.run(t, initial)
		bad := &runtimeapi.ContainerResources{Linux: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 128 << 20, CpusetCpus: "4000"}}
		if err := d.cri.UpdateContainerResources(t.Context(), c.id, bad); err == nil {
			t.Fatal("a CPU that does not exist is accepted")
		}
		memory, _ := c.limits(t)
		equal(t, "memory limit", memory, "67108864")
		equal(t, "reported memory limit", c.status(t).Resources.GetLinux().GetMemoryLimitInBytes(), int64(64<<20))
	})
	t.Run("exited", func(t *testing.T) {
		c, _ := pod.runToEnd(t, command("true"))
		wantCode(t, d.cri.UpdateContainerResources(t.Context(), c.id, update), codes.FailedPrecondition, c.id)
	})
	t.Run("unknown", func(t *testing.T) {
		wantCode(t, d.cri.UpdateContainerResources(t.Context(), "feedfacefeed", update), codes.NotFound, "feedfacefeed")
	})
}
