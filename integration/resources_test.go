package integration

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
)

// limitsOf returns the kernel's memory limit and CPU quota of a container.
func limitsOf(t *testing.T, c *harness.Container) (memory, quota string) {
	t.Helper()
	pid := c.Pid(t)
	memory = machine.CgroupFile(t, pid, "memory", "memory.limit_in_bytes", "memory.max")
	quota = machine.CgroupFile(t, pid, "cpu", "cpu.cfs_quota_us", "cpu.max")
	return memory, strings.Fields(quota)[0]
}

func TestContainerResources(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	c := pod.Run(t, harness.Resources(func(r *runtimeapi.LinuxContainerResources) {
		r.MemoryLimitInBytes, r.CpuQuota, r.CpuPeriod, r.CpuShares, r.CpusetCpus, r.OomScoreAdj = 64<<20, 50000, 100000, 512, "0", 777
	}))
	memory, quota := limitsOf(t, c)
	harness.Equal(t, "memory limit", memory, "67108864")
	harness.Equal(t, "CPU quota", quota, "50000")
	harness.Equal(t, "cpuset", machine.CgroupFile(t, c.Pid(t), "cpuset", "cpuset.cpus", "cpuset.cpus"), "0")
	harness.Equal(t, "oom_score_adj", c.Exec(t, "cat", "/proc/1/oom_score_adj"), "777")
	reported := c.Status(t).Resources.GetLinux()
	harness.Equal(t, "reported memory limit", reported.GetMemoryLimitInBytes(), int64(64<<20))
	harness.Equal(t, "reported quota", reported.GetCpuQuota(), 50000)
	harness.Equal(t, "reported shares", reported.GetCpuShares(), 512)
	harness.Equal(t, "reported cpuset", reported.GetCpusetCpus(), "0")
}

// Settings of cgroup v2 by name are refused with v1, not ignored.
func TestContainerUnifiedResources(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	unified := harness.Resources(func(r *runtimeapi.LinuxContainerResources) {
		r.Unified = map[string]string{"pids.max": "77", "memory.high": "33554432"}
	})
	if !machine.Cgroup2() {
		_, err := pod.TryCreate(t, unified)
		harness.WantCode(t, err, codes.InvalidArgument, "unified", "cgroup v2")
		return
	}
	c := pod.Run(t, unified)
	harness.Equal(t, "pids.max", machine.CgroupFile(t, c.Pid(t), "pids", "", "pids.max"), "77")
	harness.Equal(t, "memory.high", machine.CgroupFile(t, c.Pid(t), "memory", "", "memory.high"), "33554432")
}

func TestUpdateContainerResources(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	initial := harness.Resources(func(r *runtimeapi.LinuxContainerResources) { r.MemoryLimitInBytes, r.CpuQuota = 64<<20, 50000 })
	update := &runtimeapi.ContainerResources{Linux: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 128 << 20, CpuQuota: 75000, CpuPeriod: 100000, CpuShares: 1024}}
	check := func(t *testing.T, c *harness.Container) {
		t.Helper()
		memory, quota := limitsOf(t, c)
		harness.Equal(t, "memory limit", memory, "134217728")
		harness.Equal(t, "CPU quota", quota, "75000")
		reported := c.Status(t).Resources.GetLinux()
		harness.Equal(t, "reported memory limit", reported.GetMemoryLimitInBytes(), int64(128<<20))
		harness.Equal(t, "reported quota", reported.GetCpuQuota(), 75000)
	}
	t.Run("running", func(t *testing.T) {
		c := pod.Run(t, initial)
		harness.Must(t, d.Cri.UpdateContainerResources(t.Context(), c.Id, update))
		check(t, c)
		d.Restart(t)
		check(t, c)
	})
	t.Run("created", func(t *testing.T) {
		c := pod.Create(t, initial)
		harness.Must(t, d.Cri.UpdateContainerResources(t.Context(), c.Id, update))
		c.Start(t)
		check(t, c)
	})
	t.Run("a refused update changes nothing", func(t *testing.T) {
		c := pod.Run(t, initial)
		bad := &runtimeapi.ContainerResources{Linux: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 128 << 20, CpusetCpus: "not-a-list"}}
		harness.WantCode(t, d.Cri.UpdateContainerResources(t.Context(), c.Id, bad), codes.InvalidArgument, "not-a-list")
		memory, _ := limitsOf(t, c)
		harness.Equal(t, "memory limit", memory, "67108864")
	})
	t.Run("an update that the kernel refuses changes nothing", func(t *testing.T) {
		c := pod.Run(t, initial)
		bad := &runtimeapi.ContainerResources{Linux: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 128 << 20, CpusetCpus: "4000"}}
		if err := d.Cri.UpdateContainerResources(t.Context(), c.Id, bad); err == nil {
			t.Fatal("a CPU that does not exist is accepted")
		}
		memory, _ := limitsOf(t, c)
		harness.Equal(t, "memory limit", memory, "67108864")
		harness.Equal(t, "reported memory limit", c.Status(t).Resources.GetLinux().GetMemoryLimitInBytes(), int64(64<<20))
	})
	t.Run("exited", func(t *testing.T) {
		c, _ := pod.RunToEnd(t, harness.Command("true"))
		harness.WantCode(t, d.Cri.UpdateContainerResources(t.Context(), c.Id, update), codes.FailedPrecondition, c.Id)
	})
	t.Run("unknown", func(t *testing.T) {
		harness.WantCode(t, d.Cri.UpdateContainerResources(t.Context(), "feedfacefeed", update), codes.NotFound, "feedfacefeed")
	})
}
