package cgroup

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/cgroups"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"berth/internal/testutil"
)

// held reads all limits of a group, by file.
func held(t *testing.T, g *Group) map[string]string {
	t.Helper()
	limits, err := g.limits(nil)
	testutil.Must(t, err)
	all := map[string]string{}
	for _, l := range limits {
		all[l.path] = l.content
	}
	if len(all) < 4 {
		t.Fatalf("the group has only the limits %v", all)
	}
	return all
}

func ptr[T any](v T) *T { return &v }

func TestUpdateIsAllOrNothing(t *testing.T) {
	g := group(t)
	before := held(t, g)
	r := &specs.LinuxResources{
		Memory: &specs.LinuxMemory{Limit: ptr[int64](64 << 20), Swap: ptr[int64](64 << 20)},
		CPU:    &specs.LinuxCPU{Shares: ptr[uint64](512), Quota: ptr[int64](20000), Period: ptr[uint64](50000), Cpus: "4000"},
		Pids:   &specs.LinuxPids{Limit: ptr[int64](50)},
	}
	if _, err := g.Update(r); err == nil {
		t.Fatal("Update accepted a CPU that does not exist")
	}
	if after := held(t, g); !maps.Equal(before, after) {
		t.Errorf("a refused update changed the limits\nfrom %v\nto   %v", before, after)
	}
	r.CPU.Cpus = ""
	restore, err := g.Update(r)
	testutil.Must(t, err)
	if maps.Equal(before, held(t, g)) {
		t.Error("Update changed nothing")
	}
	testutil.Must(t, restore())
	if after := held(t, g); !maps.Equal(before, after) {
		t.Errorf("restored\nfrom %v\nto   %v", before, after)
	}
}

func TestUpdateRefusesUnknownSetting(t *testing.T) {
	g := group(t)
	if !cgroups.IsCgroup2UnifiedMode() {
		t.Skip("settings by name are cgroup v2's, this machine has v1")
	}
	before := held(t, g)
	_, err := g.Update(&specs.LinuxResources{Unified: map[string]string{"pids.max": "5", "memory.nonsense": "1"}})
	if !errors.Is(err, ErrNoSuchSetting) || !strings.Contains(err.Error(), "memory.nonsense") {
		t.Errorf("error %v", err)
	}
	if after := held(t, g); !maps.Equal(before, after) {
		t.Errorf("changed from %v to %v", before, after)
	}
}

func TestLinesRestorePreviousContent(t *testing.T) {
	for _, tt := range []struct {
		file, was, now string
		want           []string
	}{
		{"memory.max", "max\n", "5\n", []string{"max"}},
		{"cpuset.cpus", "\n", "0\n", []string{""}},
		{"io.weight", "default 100\n", "default 50\n8:0 10\n", []string{"default 100", "8:0 default"}},
		{"io.max", "", "8:0 rbps=1 wbps=max riops=max wiops=max\n", []string{"8:0 rbps=max wbps=max riops=max wiops=max"}},
		{"io.max", "8:0 rbps=1 wbps=2 riops=max wiops=max\n", "8:0 rbps=5 wbps=max riops=max wiops=max\n",
			[]string{"8:0 rbps=1 wbps=2 riops=max wiops=max"}},
		{"io.latency", "", "8:0 target=10\n", []string{"8:0 target=0"}},
	} {
		if got := (limit{filepath.Join("/x", tt.file), tt.was}).lines(tt.now); !slices.Equal(got, tt.want) {
			t.Errorf("%s from %q to %q: writes %q, want %q", tt.file, tt.now, tt.was, got, tt.want)
		}
	}
}

func TestResourcesForSystemd(t *testing.T) {
	for _, tt := range []struct {
		name   string
		limits []limit
		want   cgroups.Resources
	}{
		{"no limits", []limit{{"/x/memory.max", "max\n"}, {"/x/memory.swap.max", "max\n"}, {"/x/cpu.max", "max 100000\n"}, {"/x/cpuset.cpus", "\n"}},
			cgroups.Resources{Memory: -1, CpuQuota: -1, CpuPeriod: 100000, Unified: map[string]string{"memory.swap.max": "max"}}},
		{"no swap", []limit{{"/x/memory.swap.max", "0\n"}, {"/x/memory.max", "4096\n"}, {"/x/memory.high", "max\n"}},
			cgroups.Resources{Memory: 4096, Unified: map[string]string{"memory.high": "max", "memory.swap.max": "0"}}},
		{"swap", []limit{{"/x/memory.max", "4096\n"}, {"/x/memory.swap.max", "8192\n"}, {"/x/cpu.weight", "79\n"}, {"/x/cpuset.cpus", "0-1\n"}},
			cgroups.Resources{Memory: 4096, CpuWeight: 79, CpusetCpus: "0-1", Unified: map[string]string{"memory.swap.max": "8192"}}},
	} {
		got := resourcesOf(tt.limits)
		if got.Memory != tt.want.Memory || got.MemorySwap != tt.want.MemorySwap || got.CpuQuota != tt.want.CpuQuota || got.CpuPeriod != tt.want.CpuPeriod ||
			got.CpuWeight != tt.want.CpuWeight || got.CpusetCpus != tt.want.CpusetCpus || !maps.Equal(got.Unified, tt.want.Unified) {
			t.Errorf("%s: got %+v\nwant %+v", tt.name, got, tt.want)
		}
	}
}

// CRI uses v1's units, which are converted for v2 (KEP-2254, KEP-2400).
func TestSharesAndSwapAreConvertedForV2(t *testing.T) {
	for shares, weight := range map[uint64]uint64{0: 0, 1: 1, 2: 1, 100: 17, 512: 59, 1024: 100, 2048: 174, 262144: 10000} {
		if got := convert(&specs.LinuxResources{CPU: &specs.LinuxCPU{Shares: &shares}}).CpuWeight; got != weight {
			t.Errorf("%d shares are a weight of %d, want %d", shares, got, weight)
		}
	}
	for _, tt := range []struct{ memory, swap, want int64 }{
		{0, 0, 0}, {100, 100, 0}, {100, 300, 200}, {100, -1, -1}, {-1, -1, -1},
	} {
		c := convert(&specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: &tt.memory, Swap: &tt.swap}})
		if got, err := cgroups.ConvertMemorySwapToCgroupV2Value(c.MemorySwap, c.Memory); err != nil || got != tt.want {
			t.Errorf("memory %d, memory and swap %d: memory.swap.max %d (%v), want %d", tt.memory, tt.swap, got, err, tt.want)
		}
	}
}

func TestReclaimableExcludesSharedMemory(t *testing.T) {
	const stat = "anon 100\nfile 60\nshmem 20\ninactive_anon 5\nactive_file 30\ninactive_file 10\nslab_reclaimable 7\nslab_unreclaimable 1\n"
	if got := reclaimable(stat); got != 47 {
		t.Errorf("%d bytes, want 47: shared memory is not reclaimable", got)
	}
}

func TestRestoreIgnoresRemovedCgroup(t *testing.T) {
	path := filepath.Join(t.TempDir(), "memory.max")
	testutil.Must(t, os.WriteFile(path, []byte("max\n"), 0o600))
	l := limit{path, "5\n"}
	testutil.Must(t, l.restore())
	if data, err := os.ReadFile(path); err != nil || !strings.HasPrefix(string(data), "5") {
		t.Errorf("restored to %q, %v", data, err)
	}
	testutil.Must(t, os.Remove(path))
	if err := l.restore(); err != nil {
		t.Error(err)
	}
}

func TestLoweredLimitBelowUsageIsRefused(t *testing.T) {
	for _, tt := range []struct {
		max     string
		limit   int64
		refused bool
	}{
		{"max", 100, true}, {"200", 100, true}, {"max", 400, false},
		{"100", 100, false}, {"50", 100, false}, // an OOM kill is imminent anyway, and the update must not cause it
	} {
		dir := t.TempDir()
		for name, content := range map[string]string{"memory.max": tt.max, "memory.current": "300", "memory.stat": "inactive_file 10\n"} {
			testutil.Must(t, os.WriteFile(filepath.Join(dir, name), []byte(content+"\n"), 0o600))
		}
		if err := makeRoomIn(dir, tt.limit); errors.Is(err, ErrMemoryInUse) != tt.refused || !tt.refused && err != nil {
			t.Errorf("from %s to %d: %v", tt.max, tt.limit, err)
		}
	}
}
