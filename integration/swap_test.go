package integration

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
)

// swapEnv is set if this test may turn on swap, as in a guest.
const swapEnv = "BERTH_TEST_SWAP"

// turnOnSwap gives the machine size bytes of swap until the test ends.
func turnOnSwap(t *testing.T, size int) {
	t.Helper()
	if os.Getenv(swapEnv) == "" {
		t.Skip("the test would turn on swap for the whole machine; contrib/guest has its own memory and sets " + swapEnv)
	}
	needCgroup2(t)
	dir := harness.Get(os.MkdirTemp("/var/tmp", "swap"))(t) // on a disk, because the kernel refuses files on a tmpfs
	t.Cleanup(func() { harness.Must(t, os.RemoveAll(dir)) })
	file := filepath.Join(dir, "swap")
	system(t, "dd", "if=/dev/zero", "of="+file, "bs=1M", fmt.Sprintf("count=%d", size>>20)) // the kernel refuses sparse files
	harness.Must(t, os.Chmod(file, 0o600))
	system(t, "mkswap", file)
	system(t, "swapon", file)
	t.Cleanup(func() { system(t, "swapoff", file) })
}

func system(t *testing.T, command ...string) {
	t.Helper()
	if out, err := exec.Command(command[0], command[1:]...).CombinedOutput(); err != nil {
		t.Errorf("%v: %v: %s", command, err, out)
	}
}

// holding makes the container use bytes of memory. dd fills its buffer and then waits for a reader.
func holding(bytes int) harness.ContainerOption {
	return harness.Script(fmt.Sprintf("mkfifo /tmp/f; exec 3<>/tmp/f; exec dd if=/dev/zero of=/tmp/f bs=%d count=2", bytes))
}

// The test sets swap limits in each way that a request allows. The kernel lets a container use swap
// up to the limit, reports the usage, and kills a container that needs more.
func TestSwap(t *testing.T) {
	const memory, swap, need = 32 << 20, 96 << 20, 72 << 20
	turnOnSwap(t, 2*swap)
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	for name, limited := range map[string]func(r *runtimeapi.LinuxContainerResources, swap int64){
		"memory_swap_limit_in_bytes": func(r *runtimeapi.LinuxContainerResources, swap int64) { r.MemorySwapLimitInBytes = memory + swap },
		"unified, as kubelet sends it": func(r *runtimeapi.LinuxContainerResources, swap int64) {
			r.Unified = map[string]string{"memory.swap.max": fmt.Sprint(swap)}
		},
	} {
		with := func(swap int64) *runtimeapi.LinuxContainerResources {
			r := &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: memory}
			limited(r, swap)
			return r
		}
		run := func(swap int64) harness.ContainerOption {
			return func(c *runtimeapi.ContainerConfig) { c.Linux.Resources = with(swap) }
		}
		t.Run(name+"/enough", func(t *testing.T) {
			c := pod.Run(t, holding(need), run(swap))
			wantSwap(t, c, need-memory, swap)
			// A limit below the current usage frees no swap. It only prevents growth.
			for _, limit := range []int64{swap / 2, 2 * swap, 0, swap} {
				resizeContainer(t, c, with(limit))
				wantLimits(t, c, map[string]string{"memory.max": fmt.Sprint(memory), "memory.swap.max": fmt.Sprint(limit)})
				wantSwap(t, c, need-memory, uint64(limit))
			}
			haveSystemdWriteLimits(t, c)
			wantLimits(t, c, map[string]string{"memory.max": fmt.Sprint(memory), "memory.swap.max": fmt.Sprint(swap)})
			d.Restart(t)
			wantSwap(t, c, need-memory, swap)
			harness.Equal(t, "state", c.Status(t).State, runtimeapi.ContainerState_CONTAINER_RUNNING)
		})
		t.Run(name+"/none", func(t *testing.T) {
			_, status := pod.RunToEnd(t, holding(need), run(0))
			harness.Equal(t, "reason", status.Reason, "OOMKilled")
			harness.Equal(t, "exit code", status.ExitCode, 137)
		})
		t.Run(name+"/limit too low", func(t *testing.T) {
			_, status := pod.RunToEnd(t, holding(need), run(need/4))
			harness.Equal(t, "reason", status.Reason, "OOMKilled")
			harness.Equal(t, "exit code", status.ExitCode, 137)
		})
	}
}

// A container with a memory limit and no swap limit cannot swap.
func TestNoSwapWithoutSwapLimit(t *testing.T) {
	const memory, need = 32 << 20, 72 << 20
	turnOnSwap(t, 2*need)
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	limited := harness.Resources(func(r *runtimeapi.LinuxContainerResources) { r.MemoryLimitInBytes = memory })
	_, status := pod.RunToEnd(t, holding(need), limited)
	harness.Equal(t, "reason", status.Reason, "OOMKilled")

	c := pod.Run(t, limited)
	none := map[string]string{"memory.swap.max": "0"}
	wantLimits(t, c, none)
	haveSystemdWriteLimits(t, c)
	wantLimits(t, c, none)
	resizeContainer(t, c, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: memory, MemorySwapLimitInBytes: 2 * memory})
	haveSystemdWriteLimits(t, c)
	wantLimits(t, c, map[string]string{"memory.swap.max": fmt.Sprint(memory)})
	resizeContainer(t, c, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: memory, MemorySwapLimitInBytes: memory})
	haveSystemdWriteLimits(t, c)
	wantLimits(t, c, none)
}

// haveSystemdWriteLimits changes an unrelated limit, so that the systemd driver writes all limits
// of the container again.
func haveSystemdWriteLimits(t *testing.T, c *harness.Container) {
	t.Helper()
	if harness.SystemdDriver() {
		unit := filepath.Base(machine.CgroupDir(t, c.Pid(t), "memory"))
		system(t, "systemctl", "set-property", "--runtime", unit, "CPUWeight=50")
	}
}

// wantSwap waits until the container uses least bytes of swap. It compares the statistics of the
// container and of its pod with the kernel's files.
func wantSwap(t *testing.T, c *harness.Container, least, limit uint64) {
	t.Helper()
	ofPod := func() *runtimeapi.ContainerStats {
		for _, s := range podStats(t, c.Pod).Linux.Containers {
			if s.Attributes.Id == c.Id {
				return s
			}
		}
		t.Fatalf("the pod's statistics lack container %s", c.Id)
		return nil
	}
	for what, stats := range map[string]func() *runtimeapi.ContainerStats{"container": func() *runtimeapi.ContainerStats { return containerStats(t, c) }, "pod": ofPod} {
		var got *runtimeapi.SwapUsage
		harness.EventuallyGot(t, "the statistics of the "+what+" show the swap in use", func() (bool, any) {
			got = stats().Swap
			return got.GetSwapUsageBytes().GetValue() >= least, got
		})
		used := got.SwapUsageBytes.Value
		available := uint64(0)
		if used < limit {
			available = limit - used
		}
		harness.Equal(t, "available swap", got.SwapAvailableBytes.GetValue(), available)
	}
	if now := machine.CgroupFile(t, c.Pid(t), "memory", "", "memory.swap.current"); now == "0" {
		t.Error("the kernel has no swap in use, want some")
	}
}
