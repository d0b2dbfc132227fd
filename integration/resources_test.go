package integration

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
	"berth/internal/diskusage"
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

// hugepageLimits limits the container's huge pages of 2 MB. It also contains a limit for a size
// that the kernel supports, as kubelet sends it, and one for an unsupported size, which is ignored.
func hugepageLimits(bytes uint64) *runtimeapi.LinuxContainerResources {
	return &runtimeapi.LinuxContainerResources{HugepageLimits: []*runtimeapi.HugepageLimit{{PageSize: "2MB", Limit: bytes}, {PageSize: "1GB"}, {PageSize: "3MB", Limit: 6 << 20}}}
}

// Used and reserved pages have the same limit, which the kernel enforces. An update changes the
// limit. A refused update does not.
func TestHugepageLimits(t *testing.T) {
	pages := mountHugepages(t)
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	run := func(bytes uint64) *harness.Container {
		return pod.Run(t, harness.Mount(&runtimeapi.Mount{HostPath: pages, ContainerPath: "/pages"}),
			func(c *runtimeapi.ContainerConfig) { c.Linux.Resources = hugepageLimits(bytes) })
	}
	c := run(4 << 20)
	if !limitsHugepages() {
		resizeContainer(t, c, hugepageLimits(0))
		t.Skip("NOT TESTED: this machine has no limits for huge pages, so only their omission is tested")
	}
	wantHugepages(t, c, "4194304")
	resizeContainer(t, c, hugepageLimits(2<<20))
	wantHugepages(t, c, "2097152")
	refused := hugepageLimits(8 << 20)
	refused.CpuPeriod, refused.CpuQuota = 100000, 5 // below the kernel's minimum
	if err := updateContainer(t, c, refused); err == nil {
		t.Error("an invalid quota is accepted")
	}
	wantHugepages(t, c, "2097152")
	takeHugepage(t, c)
	harness.Equal(t, "number of refused allocations below the limit", hugepageFile(t, c, ".failcnt", ".events"), "0")
	resizeContainer(t, c, hugepageLimits(0))
	wantHugepages(t, c, "0")

	none := run(0)
	wantHugepages(t, none, "0")
	takeHugepage(t, none)
	harness.Equal(t, "number of refused allocations of a container without huge pages", hugepageFile(t, none, ".rsvd.failcnt", ".events"), "1")
}

// mountHugepages mounts a filesystem of huge pages until the test ends, as kubelet does for a
// volume of them.
func mountHugepages(t *testing.T) string {
	t.Helper()
	dir := machine.HostDir(t)
	if err := unix.Mount("none", dir, "hugetlbfs", 0, "pagesize=2M"); err != nil {
		t.Logf("mount a filesystem of huge pages: %v", err) // this kernel has no huge pages, so it has no limits either
		return dir
	}
	t.Cleanup(func() { harness.Must(t, unix.Unmount(dir, 0)) })
	return dir
}

// limitsHugepages reports whether the containers' cgroups have the hugetlb controller.
func limitsHugepages() bool {
	if machine.Cgroup2() {
		return strings.Contains(" "+strings.Join(machine.ReadLines("/sys/fs/cgroup/cgroup.controllers"), "")+" ", " hugetlb ")
	}
	_, err := os.Stat("/sys/fs/cgroup/hugetlb/cgroup.procs")
	return err == nil
}

// takeHugepage makes the container allocate one page. The container frees it again if the machine
// has one.
func takeHugepage(t *testing.T, c *harness.Container) {
	t.Helper()
	c.Exec(t, "sh", "-c", "fallocate -l 2097152 /pages/one || true; rm /pages/one")
}

// wantHugepages compares the kernel's limits with want.
func wantHugepages(t *testing.T, c *harness.Container, want string) {
	t.Helper()
	harness.Equal(t, "limit for pages of 2 MB", hugepageFile(t, c, ".limit_in_bytes", ".max"), want)
	harness.Equal(t, "limit for reservations of pages of 2 MB", hugepageFile(t, c, ".rsvd.limit_in_bytes", ".rsvd.max"), want) // Linux 5.7
	if _, err := os.Stat("/sys/kernel/mm/hugepages/hugepages-1048576kB"); err == nil {
		v1, v2 := "hugetlb.1GB.limit_in_bytes", "hugetlb.1GB.max"
		harness.Equal(t, "limit for pages of 1 GB", machine.CgroupFile(t, c.Pid(t), "hugetlb", v1, v2), "0")
	}
}

// hugepageFile reads a file for pages of 2 MB in the container's cgroup. v1 and v2 are the suffixes
// of its name.
func hugepageFile(t *testing.T, c *harness.Container, v1, v2 string) string {
	t.Helper()
	const kind = "hugetlb.2MB"
	content := machine.CgroupFile(t, c.Pid(t), "hugetlb", kind+v1, kind+v2)
	return strings.TrimPrefix(content, "max ") // the events file has names before its values
}

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

// onQuotas puts a daemon's root on a filesystem with project quotas. It skips the test if the
// kernel does not support them.
func onQuotas(t *testing.T, mkfs ...string) func(*testing.T, *harness.Daemon) {
	t.Helper()
	image, place := filepath.Join(t.TempDir(), "image"), t.TempDir()
	harness.Must(t, errors.Join(os.WriteFile(image, nil, 0o600), os.Truncate(image, 512<<20)))
	if out, err := exec.Command(mkfs[0], append(mkfs[1:], image)...).CombinedOutput(); err != nil {
		t.Skipf("%s: %v, %s", mkfs[0], err, out)
	}
	if out, err := exec.Command("mount", "-o", "loop,prjquota", image, place).CombinedOutput(); err != nil {
		t.Skipf("the kernel does not support project quotas here: %v, %s", err, out)
	}
	quotas, err := diskusage.OpenQuotas(place)
	if err != nil {
		harness.Must(t, unix.Unmount(place, 0))
		t.Skip(err)
	}
	harness.Must(t, errors.Join(quotas.Close(), unix.Unmount(place, 0)))
	return func(t *testing.T, d *harness.Daemon) {
		disk := filepath.Join(d.Dir, "disk")
		harness.Must(t, os.Mkdir(disk, 0o711))
		out, err := exec.Command("mount", "-o", "loop,prjquota", image, disk).CombinedOutput()
		if err != nil {
			t.Fatalf("%v, %s", err, out)
		}
		d.Root, d.Mounts = filepath.Join(disk, "root"), append(d.Mounts, disk)
	}
}

// A container cannot write more than disk.writable_layer_limit into its filesystem. Other
// containers can still write up to the limit.
func TestWritableLayerLimit(t *testing.T) {
	for name, mkfs := range map[string][]string{
		"ext4": {"mkfs.ext4", "-q", "-O", "project,quota", "-E", "quotatype=prjquota"},
		"xfs":  {"mkfs.xfs", "-q"},
	} {
		t.Run(name, func(t *testing.T) {
			d := harness.StartDaemon(t, onQuotas(t, mkfs...), harness.WithConfig("disk.writable_layer_limit = 8388608\ncontainer.stats_period = \"100ms\""))
			pod := d.RunPod(t, harness.HostNetwork)
			a, b := pod.Run(t), pod.Run(t)
			for _, c := range []*harness.Container{a, b} {
				c.Exec(t, "sh", "-c", "! dd if=/dev/zero of=/full bs=64k count=160 2>/dev/null")
				if size := c.Exec(t, "stat", "-c", "%s", "/full"); len(size) != len("8000000") || size < "7000000" || size > "8388608" {
					t.Errorf("the container wrote %s bytes", size)
				}
			}
			// A deleted file counts as long as it is open.
			hold := "exec 5>/open; dd if=/dev/zero bs=64k count=64 >&5 2>/dev/null; rm /open; exec sleep 100000"
			open := pod.Run(t, harness.Script(hold))
			harness.Eventually(t, "the deleted file is counted", func() error {
				if used := containerStats(t, open).WritableLayer.GetUsedBytes().GetValue(); used < 4<<20 || used > 8<<20 { // XFS reserves some space for a growing file
					return fmt.Errorf("the statistics show %d bytes", used)
				}
				return nil
			})
			d.Restart(t)
			b.Exec(t, "sh", "-c", "! dd if=/dev/zero of=/more bs=64k count=160 2>/dev/null && rm -f /full /more && dd if=/dev/zero of=/more bs=64k count=64 2>/dev/null")
			projects := projectsOf(t, d.Root)
			if len(projects) != 3 {
				t.Errorf("projects of three containers: %v", projects)
			}
			for _, c := range []*harness.Container{a, b, open} {
				harness.Must(t, d.Cri.RemoveContainer(t.Context(), c.Id))
			}
			quotas := harness.Get(diskusage.OpenQuotas(d.Root))(t)
			defer quotas.Close()
			harness.Eventually(t, "no file belongs to the projects", func() error {
				for id := range projects {
					if used, err := quotas.Usage(id); err != nil || used != (diskusage.Usage{}) {
						return fmt.Errorf("project %d: %+v, %v", id, used, err)
					}
				}
				return nil
			})
		})
	}
}

// projectsOf returns the quota projects of all layers.
func projectsOf(t *testing.T, root string) map[uint32]bool {
	t.Helper()
	projects := map[uint32]bool{}
	layers := harness.Get(filepath.Glob(root + "/rootfs/*/upper"))(t)
	for _, layer := range layers {
		out := harness.Get(exec.Command("lsattr", "-pd", layer).Output())(t)
		var id uint32
		harness.Get(fmt.Sscan(strings.Fields(string(out))[0], &id))(t)
		projects[id] = true
	}
	return projects
}

// If a configured limit cannot be enforced, the daemon does not start.
func TestWritableLayerLimitWithoutQuotas(t *testing.T) {
	d := harness.NewDaemon(t, harness.WithConfig("disk.writable_layer_limit = 8388608")) // root is on a tmpfs
	out, err := d.ServeCommand().CombinedOutput()
	if err == nil || !strings.Contains(string(out), "writable_layer_limit cannot be enforced") {
		t.Errorf("%v, output:\n%s", err, out)
	}
	for _, place := range []string{d.State + "/pods", d.State, d.State + "-rootfs"} { // created early in the start
		if err := unix.Unmount(place, unix.MNT_DETACH); err != nil && err != unix.EINVAL && err != unix.ENOENT {
			t.Error(err)
		}
	}
}
