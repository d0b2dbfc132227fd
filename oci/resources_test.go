package oci

import (
	"encoding/json"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/testutil"
)

func TestLinuxResources(t *testing.T) {
	t.Parallel()
	full := testHost()
	poor := Host{}
	for _, test := range []struct {
		name string
		host Host
		r    *runtimeapi.LinuxContainerResources
		want string // JSON
	}{
		{"nil", full, nil, `{"memory":{},"cpu":{}}`},
		{"empty", full, &runtimeapi.LinuxContainerResources{}, `{"memory":{},"cpu":{}}`},
		{"cpu", full, &runtimeapi.LinuxContainerResources{CpuPeriod: 100000, CpuQuota: 50000, CpuShares: 512, CpusetCpus: "0-3,5", CpusetMems: "0"},
			`{"memory":{},"cpu":{"shares":512,"quota":50000,"period":100000,"cpus":"0-3,5","mems":"0"}}`},
		{"no cpu limit", full, &runtimeapi.LinuxContainerResources{CpuQuota: -1}, `{"memory":{},"cpu":{"quota":-1}}`},
		{"memory without swap", full, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 1 << 20},
			`{"memory":{"limit":1048576,"swap":1048576},"cpu":{},"unified":{"memory.swap.max":"0"}}`},
		{"no swap, on v1", Host{SwapAccounting: true}, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 1 << 20, MemorySwapLimitInBytes: 1 << 20},
			`{"memory":{"limit":1048576,"swap":1048576},"cpu":{}}`},
		{"swap by name", full, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 1 << 20, Unified: map[string]string{"memory.swap.max": "4096"}},
			`{"memory":{"limit":1048576,"swap":1048576},"cpu":{},"unified":{"memory.swap.max":"4096"}}`},
		{"memory and swap", full, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 1 << 20, MemorySwapLimitInBytes: 3 << 20},
			`{"memory":{"limit":1048576,"swap":3145728},"cpu":{}}`},
		{"unlimited swap", full, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 1 << 20, MemorySwapLimitInBytes: -1},
			`{"memory":{"limit":1048576,"swap":-1},"cpu":{}}`},
		{"limit lifted", full, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: -1}, `{"memory":{"limit":-1,"swap":-1},"cpu":{}}`},
		{"no swap accounting", poor, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 1 << 20, MemorySwapLimitInBytes: 3 << 20},
			`{"memory":{"limit":1048576},"cpu":{}}`},
		{"hugepages", full, &runtimeapi.LinuxContainerResources{HugepageLimits: []*runtimeapi.HugepageLimit{
			{PageSize: "2MB", Limit: 4 << 20}, {PageSize: "1GB"}, {PageSize: "64KB"}, {PageSize: "../../x"}}},
			`{"memory":{},"cpu":{},"hugepageLimits":[{"pageSize":"2MB","limit":4194304},{"pageSize":"1GB","limit":0}]}`},
		{"hugepages without controller", poor, &runtimeapi.LinuxContainerResources{HugepageLimits: []*runtimeapi.HugepageLimit{{PageSize: "2MB"}}},
			`{"memory":{},"cpu":{}}`},
		{"unified", full, &runtimeapi.LinuxContainerResources{Unified: map[string]string{
			"pids.max": "100", "memory.oom.group": "1", "hugetlb.2MB.max": "0", "memory.swap.max": "0"}},
			`{"memory":{},"cpu":{},"unified":{"hugetlb.2MB.max":"0","memory.oom.group":"1","memory.swap.max":"0","pids.max":"100"}}`},
		{"unified swap without accounting", Host{CgroupV2: true}, &runtimeapi.LinuxContainerResources{Unified: map[string]string{
			"pids.max": "100", "memory.swap.max": "0"}}, `{"memory":{},"cpu":{},"unified":{"pids.max":"100"}}`},
		{"idle, without a weight", full, &runtimeapi.LinuxContainerResources{CpuShares: 2, Unified: map[string]string{
			"cpu.idle": "1", "cpu.weight": "5"}}, `{"memory":{},"cpu":{"idle":1}}`},
		{"not idle any more", full, &runtimeapi.LinuxContainerResources{CpuShares: 1024, Unified: map[string]string{"cpu.idle": "0\n"}},
			`{"memory":{},"cpu":{"shares":1024,"idle":0}}`},
		{"unified but empty on v1", poor, &runtimeapi.LinuxContainerResources{Unified: map[string]string{}}, `{"memory":{},"cpu":{}}`},
	} {
		t.Run(test.name, func(t *testing.T) {
			r, err := LinuxResources(test.r, test.host)
			testutil.Must(t, err)
			got, err := json.Marshal(r)
			testutil.Must(t, err)
			if string(got) != test.want {
				t.Errorf("got  %s\nwant %s", got, test.want)
			}
		})
	}
}

func TestLinuxResourcesRefused(t *testing.T) {
	t.Parallel()
	unified := func(key, value string) *runtimeapi.LinuxContainerResources {
		return &runtimeapi.LinuxContainerResources{Unified: map[string]string{key: value}}
	}
	v1 := testHost()
	v1.CgroupV2 = false
	for _, test := range []struct {
		host Host
		r    *runtimeapi.LinuxContainerResources
		err  string
	}{
		{testHost(), &runtimeapi.LinuxContainerResources{CpuPeriod: -1}, "cpu_period -1"},
		{testHost(), &runtimeapi.LinuxContainerResources{CpuQuota: -2}, "cpu_quota -2"},
		{testHost(), &runtimeapi.LinuxContainerResources{CpuShares: -1}, "cpu_shares -1"},
		{testHost(), &runtimeapi.LinuxContainerResources{CpusetCpus: "0,\n1"}, "cpuset_cpus"},
		{testHost(), &runtimeapi.LinuxContainerResources{CpusetCpus: "0-"}, "cpuset_cpus"},
		{testHost(), &runtimeapi.LinuxContainerResources{CpusetMems: "all"}, "cpuset_mems"},
		{testHost(), &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: -2}, "memory_limit_in_bytes -2"},
		{testHost(), &runtimeapi.LinuxContainerResources{MemorySwapLimitInBytes: -2}, "memory_swap_limit_in_bytes -2"},
		{testHost(), &runtimeapi.LinuxContainerResources{MemorySwapLimitInBytes: 5}, "needs memory_limit_in_bytes"},
		{testHost(), &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: -1, MemorySwapLimitInBytes: 5}, "needs memory_limit_in_bytes"},
		{testHost(), unified("cpu.idle", "2"), "cpu.idle"},
		{testHost(), unified("cpu.idle", "yes"), "cpu.idle"},
		{testHost(), &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 6, MemorySwapLimitInBytes: 5}, "below memory_limit_in_bytes 6"},
		{testHost(), unified("cgroup.kill", "1"), `"cgroup.kill"`},
		{testHost(), unified("cgroup.procs", "1"), `"cgroup.procs"`},
		{testHost(), unified("../pids.max", "1"), `"../pids.max"`},
		{testHost(), unified("pids", "1"), `"pids"`},
		{testHost(), unified("", "1"), `""`},
		{testHost(), unified("pids.max", "1\n2"), "pids.max"},
		{v1, unified("pids.max", "1"), "cgroup v2"},
	} {
		_, err := LinuxResources(test.r, test.host)
		testutil.WantError(t, err, codes.InvalidArgument, test.err)
	}
}

func TestOOMScoreAdjRange(t *testing.T) {
	t.Parallel()
	for _, n := range []int64{-1001, 1001, 1 << 40} {
		refused(t, func(in *ContainerInput) { in.Config.Linux.Resources.OomScoreAdj = n }, codes.InvalidArgument, "oom_score_adj")
	}
}

// A container without resources must not inherit berth's own score, which systemd units lower.
func TestOOMScoreAdjIsAlwaysSet(t *testing.T) {
	t.Parallel()
	in := testInput()
	in.Config.Linux.Resources = nil
	if p := mustSpec(t, in).Process; p.OOMScoreAdj == nil || *p.OOMScoreAdj != 0 {
		t.Errorf("got %v", p.OOMScoreAdj)
	}
}

func TestCurrentResourcesWin(t *testing.T) {
	t.Parallel()
	in := testInput()
	in.Config.Linux.Resources.CpuShares = 100
	in.Resources = &runtimeapi.LinuxContainerResources{CpuShares: 200, OomScoreAdj: 5}
	spec := mustSpec(t, in)
	if *spec.Linux.Resources.CPU.Shares != 200 || *spec.Process.OOMScoreAdj != 5 {
		t.Errorf("got %+v", spec.Linux.Resources.CPU)
	}
}
