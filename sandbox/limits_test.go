package sandbox

import (
	"cmp"
	"maps"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestMerge(t *testing.T) {
	t.Parallel()
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
	if got := mergeResources(old, change); !proto.Equal(got, want) {
		t.Errorf("merged:\n%v\nwant\n%v", got, want)
	}
	if !proto.Equal(old, before) {
		t.Error("the argument was modified")
	}
	if got := mergeResources(nil, nil); got == nil || !proto.Equal(got, &runtimeapi.LinuxContainerResources{}) {
		t.Errorf("mergeResources(nil, nil) = %v", got)
	}
	if got := mergeResources(old, nil); !proto.Equal(got, old) {
		t.Errorf("mergeResources(old, nil) = %v", got)
	}
}

func TestMergeKeepsNoSwap(t *testing.T) {
	t.Parallel()
	old := &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 1 << 20, MemorySwapLimitInBytes: 1 << 20}
	got := mergeResources(old, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 2 << 20})
	if got.MemorySwapLimitInBytes != 2<<20 {
		t.Errorf("memory and swap limit is %d, below the memory limit", got.MemorySwapLimitInBytes)
	}
}

// mergeResources takes the set fields of the change and keeps all others. It is idempotent and does
// not modify its arguments.
func FuzzMerge(f *testing.F) {
	add := func(messages ...*runtimeapi.LinuxContainerResources) {
		var data [2][]byte
		for i, m := range messages {
			var err error
			if data[i], err = proto.Marshal(m); err != nil {
				f.Fatal(err)
			}
		}
		f.Add(data[0], data[1])
	}
	f.Add([]byte{}, []byte{})
	add(&runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 5, MemorySwapLimitInBytes: 5, OomScoreAdj: 3, CpusetCpus: "0"},
		&runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 6, OomScoreAdj: 4, CpusetMems: "1"})
	add(&runtimeapi.LinuxContainerResources{HugepageLimits: []*runtimeapi.HugepageLimit{{PageSize: "2MB", Limit: 1}, {PageSize: "1GB", Limit: 2}}, Unified: map[string]string{"a": "1", "b": "2"}},
		&runtimeapi.LinuxContainerResources{HugepageLimits: []*runtimeapi.HugepageLimit{{PageSize: "1GB"}}, Unified: map[string]string{"a": "3"}})
	f.Fuzz(func(t *testing.T, a, b []byte) {
		var old, change runtimeapi.LinuxContainerResources
		unmarshal := proto.UnmarshalOptions{DiscardUnknown: true}
		if unmarshal.Unmarshal(a, &old) != nil || unmarshal.Unmarshal(b, &change) != nil {
			return
		}
		oldBefore, changeBefore := proto.Clone(&old), proto.Clone(&change)
		merged := mergeResources(&old, &change)
		if !proto.Equal(&old, oldBefore) || !proto.Equal(&change, changeBefore) {
			t.Fatal("an argument was modified")
		}
		if again := mergeResources(merged, &change); !proto.Equal(again, merged) {
			t.Fatalf("merged twice:\n%v\nonce:\n%v", again, merged)
		}
		if want := mergedByField(&old, &change); !proto.Equal(merged, want) {
			t.Fatalf("merged:\n%v\nwant\n%v", merged, want)
		}
	})
}

// mergedByField is an independent implementation of Merge, field by field.
func mergedByField(old, change *runtimeapi.LinuxContainerResources) *runtimeapi.LinuxContainerResources {
	want := &runtimeapi.LinuxContainerResources{
		CpuPeriod: cmp.Or(change.CpuPeriod, old.CpuPeriod), CpuQuota: cmp.Or(change.CpuQuota, old.CpuQuota), CpuShares: cmp.Or(change.CpuShares, old.CpuShares),
		CpusetCpus: cmp.Or(change.CpusetCpus, old.CpusetCpus), CpusetMems: cmp.Or(change.CpusetMems, old.CpusetMems),
		MemoryLimitInBytes:     cmp.Or(change.MemoryLimitInBytes, old.MemoryLimitInBytes),
		MemorySwapLimitInBytes: cmp.Or(change.MemorySwapLimitInBytes, old.MemorySwapLimitInBytes),
		OomScoreAdj:            old.OomScoreAdj,
		Unified:                map[string]string{},
	}
	if change.MemorySwapLimitInBytes == 0 && old.MemorySwapLimitInBytes == old.MemoryLimitInBytes {
		want.MemorySwapLimitInBytes = cmp.Or(change.MemoryLimitInBytes, old.MemorySwapLimitInBytes)
	}
	for _, l := range old.HugepageLimits {
		if !slices.ContainsFunc(change.HugepageLimits, func(c *runtimeapi.HugepageLimit) bool { return c.PageSize == l.PageSize }) {
			want.HugepageLimits = append(want.HugepageLimits, l)
		}
	}
	want.HugepageLimits = append(want.HugepageLimits, change.HugepageLimits...)
	maps.Copy(want.Unified, old.Unified)
	maps.Copy(want.Unified, change.Unified)
	return want
}
