package limits

import (
	"testing"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestMerge(t *testing.T) {
	old := &runtimeapi.LinuxContainerResources{CpuShares: 100, MemoryLimitInBytes: 1 << 20, OomScoreAdj: 5,
		HugepageLimits: []*runtimeapi.HugepageLimit{{PageSize: "2MB", Limit: 1}, {PageSize: "1GB", Limit: 1}},
		Unified:        map[string]string{"memory.high": "1", "pids.max": "5"}}
	change := &runtimeapi.LinuxContainerResources{CpuShares: 200, CpuQuota: -1, OomScoreAdj: 7,
		HugepageLimits: []*runtimeapi.HugepageLimit{{PageSize: "1GB", Limit: 2}},
		Unified:        map[string]string{"memory.high": "2"}}
	want := &runtimeapi.LinuxContainerResources{CpuShares: 200, CpuQuota: -1, MemoryLimitInBytes: 1 << 20, OomScoreAdj: 5,
		HugepageLimits: []*runtimeapi.HugepageLimit{{PageSize: "2MB", Limit: 1}, {PageSize: "1GB", Limit: 2}},
		Unified:        map[string]string{"memory.high": "2", "pids.max": "5"}}
	before := proto.Clone(old)
	if got := Merge(old, change); !proto.Equal(got, want) {
		t.Errorf("merged:\n%v\nwant\n%v", got, want)
	}
	if !proto.Equal(old, before) {
		t.Error("the snapshot others may be reading was changed")
	}
	if got := Merge(nil, nil); got == nil || !proto.Equal(got, &runtimeapi.LinuxContainerResources{}) {
		t.Errorf("nothing merged into nothing: %v", got)
	}
	if got := Merge(old, nil); !proto.Equal(got, old) {
		t.Errorf("no change: %v", got)
	}
}

func TestNoSwapStaysNoSwap(t *testing.T) {
	old := &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 1 << 20, MemorySwapLimitInBytes: 1 << 20}
	got := Merge(old, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 2 << 20})
	if got.MemorySwapLimitInBytes != 2<<20 {
		t.Errorf("the limit of memory and swap is %d, below that of memory", got.MemorySwapLimitInBytes)
	}
}

func FuzzMerge(f *testing.F) {
	f.Add([]byte{}, []byte{})
	f.Fuzz(func(t *testing.T, a, b []byte) {
		var old, change runtimeapi.LinuxContainerResources
		if proto.Unmarshal(a, &old) != nil || proto.Unmarshal(b, &change) != nil {
			return
		}
		Merge(&old, &change)
	})
}
