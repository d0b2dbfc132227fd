package integration

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
)

// limitFiles lists the limits that an update may change, on v1 and v2.
var limitFiles = []string{
	"memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "cpu.shares", "cpu.cfs_quota_us", "cpu.cfs_period_us",
	"memory.max", "memory.swap.max", "memory.high", "memory.min", "cpu.weight", "cpu.max", "cpu.idle",
	"cpuset.cpus", "cpuset.mems", "pids.max",
}

// allLimits reads the kernel's limits of a container, by file.
func allLimits(t *testing.T, c *harness.Container) map[string]string {
	t.Helper()
	pid, limits := c.Pid(t), map[string]string{}
	for _, controller := range []string{"memory", "cpu", "cpuset", "pids"} {
		dir := machine.CgroupDir(t, pid, controller)
		for _, name := range limitFiles {
			if content, err := os.ReadFile(filepath.Join(dir, name)); err == nil {
				limits[name] = strings.TrimSpace(string(content))
			}
		}
	}
	if len(limits) < 6 {
		t.Fatalf("the container has only the limits %v", limits)
	}
	return limits
}

func updateContainer(t *testing.T, c *harness.Container, change *runtimeapi.LinuxContainerResources) error {
	t.Helper()
	return c.Pod.D.Cri.UpdateContainerResources(t.Context(), c.Id, &runtimeapi.ContainerResources{Linux: change})
}

func resizeContainer(t *testing.T, c *harness.Container, change *runtimeapi.LinuxContainerResources) {
	t.Helper()
	harness.Must(t, updateContainer(t, c, change))
}

func wantLimits(t *testing.T, c *harness.Container, want map[string]string) {
	t.Helper()
	got := allLimits(t, c)
	for name, value := range want {
		harness.Equal(t, name, got[name], value)
	}
}

func needController(t *testing.T, name string) {
	t.Helper()
	for _, line := range machine.ReadLines("/proc/self/cgroup") {
		if strings.Contains(","+strings.Split(line, ":")[1]+",", ","+name+",") {
			return
		}
	}
	for _, controller := range strings.Fields(strings.Join(machine.ReadLines("/sys/fs/cgroup/cgroup.controllers"), " ")) {
		if controller == name {
			return
		}
	}
	t.Skipf("this machine has no cgroup controller %s", name)
}

func needCgroup2(t *testing.T) {
	t.Helper()
	if !machine.Cgroup2() {
		t.Skip("this machine has cgroup v1")
	}
}

// If the kernel refuses a part of an update, the daemon rolls back the other parts. Limits that
// were unset are unset again.
func TestUpdateIsAllOrNothing(t *testing.T) {
	needController(t, "cpuset")
	d := harness.StartDaemon(t)
	c := d.RunPod(t, harness.HostNetwork).Run(t)
	before, reported := allLimits(t, c), c.Status(t).Resources
	for _, tt := range []struct {
		name   string
		change *runtimeapi.LinuxContainerResources
		v2     bool
	}{
		{"CPU that does not exist", &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 64 << 20, CpuShares: 512, CpuQuota: 20000, CpuPeriod: 50000, CpusetCpus: "4000"}, false},
		{"memory node that does not exist", &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 64 << 20, CpusetCpus: "0", CpusetMems: "900"}, false},
		{"quota below the kernel's minimum", &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 64 << 20, CpuShares: 512, CpuQuota: 5, CpuPeriod: 100000}, false},
		{"unknown setting", &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 64 << 20, CpuShares: 512,
			Unified: map[string]string{"memory.high": "33554432", "memory.nonsense": "1"}}, true},
		{"bad setting", &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 64 << 20, CpuShares: 512,
			Unified: map[string]string{"memory.high": "33554432", "memory.min": "4096", "pids.max": "many"}}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.v2 {
				needCgroup2(t)
			}
			if err := updateContainer(t, c, tt.change); err == nil {
				t.Fatal("accepted")
			}
			if after := allLimits(t, c); !maps.Equal(before, after) {
				t.Errorf("limits changed\nfrom %v\nto   %v", before, after)
			}
			if after := c.Status(t).Resources; !proto.Equal(reported, after) {
				t.Errorf("reported resources changed from %v to %v", reported, after)
			}
		})
	}
	resizeContainer(t, c, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 64 << 20, CpusetCpus: "0"})
	memory, _ := limitsOf(t, c)
	harness.Equal(t, "memory limit of a valid update", memory, "67108864")
}

// A limit below the current usage is refused, because on v2 the kernel would kill processes to
// enforce it.
func TestMemoryShrinkBelowUsage(t *testing.T) {
	d := harness.StartDaemon(t)
	c := d.RunPod(t, harness.HostNetwork).Run(t, harness.Script("dd if=/dev/zero of=/dev/shm/full bs=1M count=40 2>/dev/null; echo full; sleep 100000"),
		harness.Resources(func(r *runtimeapi.LinuxContainerResources) { r.MemoryLimitInBytes = 128 << 20 }))
	c.WaitOutput(t, "full")
	before := allLimits(t, c)
	harness.WantCode(t, updateContainer(t, c, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 16 << 20, CpuShares: 512}), codes.FailedPrecondition, c.Id, "in use")
	if after := allLimits(t, c); !maps.Equal(before, after) {
		t.Errorf("limits changed\nfrom %v\nto   %v", before, after)
	}
	harness.Equal(t, "state", c.Status(t).State, runtimeapi.ContainerState_CONTAINER_RUNNING)
	harness.Equal(t, "reported memory limit", c.Status(t).Resources.GetLinux().GetMemoryLimitInBytes(), 128<<20)
	c.Exec(t, "rm", "/dev/shm/full")
	resizeContainer(t, c, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 16 << 20})
	memory, _ := limitsOf(t, c)
	harness.Equal(t, "memory limit after the usage has dropped", memory, "16777216")
}

// The limit of memory and the limit of memory with swap change together, up or down. On v1 the
// second is never below the first. v2 limits swap alone.
func TestMemoryAndSwap(t *testing.T) {
	d := harness.StartDaemon(t)
	c := d.RunPod(t, harness.HostNetwork).Run(t, harness.Resources(func(r *runtimeapi.LinuxContainerResources) { r.MemoryLimitInBytes = 64 << 20 }))
	limits := allLimits(t, c)
	if limits["memory.memsw.limit_in_bytes"] == "" && limits["memory.swap.max"] == "" {
		t.Skip("this kernel does not account for swap")
	}
	const mb = 1 << 20
	for _, step := range []struct{ memory, swap, wantMemory, wantBoth int64 }{
		{0, 0, 64 * mb, 64 * mb}, // as created: no swap
		{128 * mb, 0, 128 * mb, 128 * mb},
		{128 * mb, 256 * mb, 128 * mb, 256 * mb},
		{32 * mb, 32 * mb, 32 * mb, 32 * mb},
		{512 * mb, 1024 * mb, 512 * mb, 1024 * mb},
		{64 * mb, 96 * mb, 64 * mb, 96 * mb},
	} {
		if step.memory != 0 {
			resizeContainer(t, c, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: step.memory, MemorySwapLimitInBytes: step.swap})
		}
		if machine.Cgroup2() {
			wantLimits(t, c, map[string]string{"memory.max": fmt.Sprint(step.wantMemory), "memory.swap.max": fmt.Sprint(step.wantBoth - step.wantMemory)})
		} else {
			wantLimits(t, c, map[string]string{"memory.limit_in_bytes": fmt.Sprint(step.wantMemory), "memory.memsw.limit_in_bytes": fmt.Sprint(step.wantBoth)})
		}
	}
	resizeContainer(t, c, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 64 * mb, MemorySwapLimitInBytes: -1})
	if machine.Cgroup2() {
		wantLimits(t, c, map[string]string{"memory.max": fmt.Sprint(64 * mb), "memory.swap.max": "max"})
	}
	harness.WantCode(t, updateContainer(t, c, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 64 * mb, MemorySwapLimitInBytes: 32 * mb}), codes.InvalidArgument, "memory_swap_limit_in_bytes")
}

// kubelet sets memory QoS (KEP-2570) by v2's file names, and changes it with a resize.
func TestMemoryQoS(t *testing.T) {
	needCgroup2(t)
	d := harness.StartDaemon(t)
	c := d.RunPod(t, harness.HostNetwork).Run(t, harness.Resources(func(r *runtimeapi.LinuxContainerResources) {
		r.MemoryLimitInBytes = 64 << 20
		r.Unified = map[string]string{"memory.min": "16777216", "memory.high": "50331648"}
	}))
	wantLimits(t, c, map[string]string{"memory.min": "16777216", "memory.high": "50331648", "memory.max": "67108864"})
	resizeContainer(t, c, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 128 << 20, Unified: map[string]string{"memory.min": "33554432", "memory.high": "max"}})
	wantLimits(t, c, map[string]string{"memory.min": "33554432", "memory.high": "max", "memory.max": "134217728"})
	d.Restart(t)
	harness.Equal(t, "reported memory.min", c.Status(t).Resources.GetLinux().GetUnified()["memory.min"], "33554432")
}

// CPU shares become a weight. An idle cgroup has no weight.
func TestCPUWeight(t *testing.T) {
	needCgroup2(t)
	d := harness.StartDaemon(t)
	c := d.RunPod(t, harness.HostNetwork).Run(t, harness.Resources(func(r *runtimeapi.LinuxContainerResources) { r.CpuShares = 1024 }))
	wantLimits(t, c, map[string]string{"cpu.weight": "100"})
	resizeContainer(t, c, &runtimeapi.LinuxContainerResources{CpuShares: 512, Unified: map[string]string{"cpu.idle": "1"}})
	wantLimits(t, c, map[string]string{"cpu.idle": "1"})
	resizeContainer(t, c, &runtimeapi.LinuxContainerResources{CpuShares: 256, Unified: map[string]string{"cpu.idle": "0"}})
	wantLimits(t, c, map[string]string{"cpu.idle": "0", "cpu.weight": "35"})
}

// shownConfig returns the pod's config from verbose PodSandboxStatus.
func shownConfig(t *testing.T, p *harness.Pod) *runtimeapi.PodSandboxConfig {
	t.Helper()
	response := harness.Get(p.D.Cri.PodSandboxStatus(t.Context(), p.Id, true))(t)
	var info struct {
		Config *runtimeapi.PodSandboxConfig `json:"config"`
	}
	harness.Must(t, json.Unmarshal([]byte(response.Info["info"]), &info))
	return info.Config
}

// kubelet reports its changes of the pod's cgroup. The pod's config contains them, also after a
// restart, and the pod keeps its identity.
func TestUpdatePodSandboxResources(t *testing.T) {
	d := harness.StartDaemon(t)
	config := d.PodConfig(t, harness.HostNetwork)
	config.Linux.Resources = &runtimeapi.LinuxContainerResources{CpuShares: 512, MemoryLimitInBytes: 64 << 20}
	config.Linux.Overhead = &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 1 << 20}
	pod := d.RunPodConfig(t, config)
	client := harness.RawRuntime(t, d)
	update := func(change *runtimeapi.UpdatePodSandboxResourcesRequest) error {
		_, err := client.UpdatePodSandboxResources(t.Context(), change)
		return err
	}
	resized := &runtimeapi.LinuxContainerResources{CpuShares: 1024, MemoryLimitInBytes: 128 << 20}
	harness.Must(t, update(&runtimeapi.UpdatePodSandboxResourcesRequest{PodSandboxId: pod.Id, Resources: resized}))
	check := func(t *testing.T) {
		t.Helper()
		shown := shownConfig(t, pod)
		if !proto.Equal(shown.GetLinux().GetResources(), resized) || !proto.Equal(shown.GetLinux().GetOverhead(), config.Linux.Overhead) {
			t.Errorf("the config shows resources %v, overhead %v", shown.GetLinux().GetResources(), shown.GetLinux().GetOverhead())
		}
	}
	check(t)
	d.Restart(t)
	check(t)
	again := harness.Get(d.Cri.RunPodSandbox(t.Context(), config, ""))(t)
	harness.Equal(t, "pod of a repeated request", again, pod.Id)

	client = harness.RawRuntime(t, d)
	harness.WantCode(t, update(&runtimeapi.UpdatePodSandboxResourcesRequest{PodSandboxId: pod.Id, Overhead: &runtimeapi.LinuxContainerResources{CpuQuota: -5}}), codes.InvalidArgument, "cpu_quota")
	harness.WantCode(t, update(&runtimeapi.UpdatePodSandboxResourcesRequest{PodSandboxId: "feedfacefeed"}), codes.NotFound, "feedfacefeed")
	check(t)
	pod.Stop(t)
	harness.WantCode(t, update(&runtimeapi.UpdatePodSandboxResourcesRequest{PodSandboxId: pod.Id, Resources: resized}), codes.FailedPrecondition, pod.Id)
}

// A container may create its own cgroups. The kernel lists no processes in threaded cgroups, and
// kills them only as a whole. Execs work beside them, and all processes end with the container.
func TestThreadedCgroups(t *testing.T) {
	needCgroup2(t)
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork, harness.PodSecurity(func(s *runtimeapi.LinuxSandboxSecurityContext) { s.Privileged = true }))
	c := pod.Run(t, harness.Security(harness.Privileged), harness.Script(`
		cd /sys/fs/cgroup$(sed s/0::// /proc/self/cgroup) # a privileged container may see all cgroups
		mkdir threads && echo threaded >threads/cgroup.type || exit 1
		sleep 77777 &
		echo $! >threads/cgroup.threads && echo moved
		sleep 100000`))
	c.WaitOutput(t, "moved")
	harness.Equal(t, "exec", c.Exec(t, "echo", "hello"), "hello")
	harness.Eventually(t, "the process is in the threaded cgroup", func() error {
		return wantEqual("processes", len(machine.CommandLines("sleep 77777")), 1)
	})
	_, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"sleep", "1000"}, time.Second)
	if err == nil || !harness.Contains(err.Error(), "timed out") {
		t.Errorf("an exec that outlives its timeout: %v", err)
	}
	c.Stop(t, 0)
	c.WaitExited(t)
	harness.Equal(t, "processes left in the threaded cgroup", len(machine.CommandLines("sleep 77777")), 0)
}

// With memory.oom.group an OOM kill of one process kills the whole container.
func TestOOMKilledAsAGroup(t *testing.T) {
	needCgroup2(t)
	d := harness.StartDaemon(t)
	c, status := d.RunPod(t, harness.HostNetwork).RunToEnd(t, harness.Script("tail /dev/zero & sleep 100000"),
		harness.Resources(func(r *runtimeapi.LinuxContainerResources) {
			r.MemoryLimitInBytes = 16 << 20
			r.Unified = map[string]string{"memory.oom.group": "1"}
		}))
	harness.Equal(t, "reason", status.Reason, "OOMKilled")
	harness.Equal(t, "exit code of "+c.Id, status.ExitCode, 137)
}
