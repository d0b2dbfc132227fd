package integration

import (
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
)

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
